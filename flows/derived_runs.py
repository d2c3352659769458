"""Configurations of runs that start from a stored run: forks, evaluations, reprocessed branches.

    stored_run(home, "my_run")           the run, and its configuration as a recipe file
    fork_run(home, "my_run@4")           a fork under the configuration of its parent
    evaluation_config(home, run="my_run")   a run that only evaluates the weights
    reprocessing(home, of="my_run")      a branch that stored rollouts are reprocessed into

Imports no Prefect: a command line refuses wrong input before a Prefect server starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from rlpipe.batch.files import adapters_of
from rlpipe.config.introduced import upgraded
from rlpipe.config.load import default_name, load_run
from rlpipe.config.model import BranchModel
from rlpipe.config.run import RunConfig
from rlpipe.config.text import dump
from rlpipe.errors import ConfigError
from rlpipe.lineage.continuation import REPROCESSED_KEYS
from rlpipe.lineage.named_runs import MOST_NAMES, require_commit, require_run
from rlpipe.lineage.rollouts import iterations as stored_iterations
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.store.branches import Branches, parse_commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import find_run, get_run
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import Commit, Stage


@dataclass(frozen=True)
class StoredRun:
    """A run of a store."""

    run: str
    files: Files
    config: dict[str, Any]
    """The configuration of the run's last start on this machine and home, else the branch's."""
    recipe: Path
    """A recipe file with `config`."""


def stored_run(
    home: Path, run: str, store: str | None = None, *, recipes: Path | None = None
) -> StoredRun:
    """Find a run by name.

    The store is `store`, else the one that this home recorded, else the home's own. `recipes`: the
    folder of recipe files, by default the home.

    Raises: ConfigError if the run does not exist; ObjectCorrupt.
    """
    run_file = find_run(home, run)
    files = Files(store or (run_file.store if run_file else home / "store"))
    branch = require_run(files, run, where=run)
    same_store = run_file is not None and Files(run_file.store).root == files.root
    config = upgraded(RunConfig, run_file.config if run_file and same_store else branch.config)
    if store is not None or files.root != Files(home / "store").root:
        config = {**config, "store": {**config.get("store", {}), "root": files.root}}
    return StoredRun(run, files, config, write_recipe(recipes or home, run, config))


def write_recipe(home: Path, run: str, config: dict[str, Any]) -> Path:
    """Write a configuration as `{home}/{run}/configuration.yaml`; return the path."""
    recipe = home / run / "configuration.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    # A reader sees the old file or the new file, never half of one.
    unfinished = recipe.with_suffix(f".{uuid4().hex[:8]}")
    unfinished.write_text(dump(config), encoding="utf-8")
    return unfinished.replace(recipe)


def parse_commit(text: str, where: str) -> tuple[str, int | None]:
    """Return run and iteration of `RUN` or `RUN@K`. Raises: ConfigError."""
    run, at, iteration = text.partition("@")
    if not run or (at and not iteration.isdigit()):
        raise ConfigError(
            "not the name of a commit", where=where, found=text, expected="RUN or RUN@K"
        )
    return run, int(iteration) if at else None


class ForkedRun(NamedTuple):
    """A fork that can be started."""

    config: RunConfig
    recipe: Path
    """A recipe file with `config`."""


def fork_run(
    home: Path,
    of: str,
    run: str | None = None,
    overrides: Sequence[str] = (),
    store: str | None = None,
    *,
    recipes: Path | None = None,
) -> ForkedRun:
    """Return the fork of `RUN@K` or `RUN` under its parent's configuration, changed by `overrides`.

    The default name is `RUN-from-K`. Without K the fork starts at the newest commit; a fork that
    has begun keeps its commit. `recipes`: as for `stored_run`. Raises: ConfigError.
    """
    parent, iteration = parse_commit(of, "fork")
    source = stored_run(home, parent, store, recipes=recipes)
    branches = Branches(source.files)
    newest = require_commit(source.files, parent, iteration or 0, where="fork")
    begun = branches.find(run) if run and iteration is None else None
    if begun and begun.parent:
        # The parent may have trained on since: the fork stays at the commit that it began with.
        iteration = parse_commit_name(begun.parent)[1]
    elif iteration is None:
        iteration = newest.iteration
    start = json.dumps({"branch": parent, "iteration": iteration})
    # The fork gets its weights from its parent only.
    fixed = [f"fork_from={start}", "warm_start=null", "model.start_from=null"]
    config = load_run(source.recipe, [*overrides, *fixed], run or f"{parent}-from-{iteration}")
    if config.num_rollout <= iteration + 1:
        raise ConfigError(
            "the fork has no iteration to train",
            where="num_rollout",
            found=f"{config.num_rollout}, counted from iteration 0 of {parent}",
            expected=f"more than {iteration + 1}",
            do=f"set num_rollout={iteration + 1 + max(1, config.num_rollout // 2)}, "
            "or fork from an earlier iteration",
        )
    settings = config.model_dump(mode="json")
    return ForkedRun(config, write_recipe(recipes or home, config.run, settings))


EVALUATION_SETTINGS = (
    "num_rollout=0",
    "stop_when=null",
    "warm_start=null",
    "fork_from=null",
    "evaluation.skip_eval_before_train=false",
    "train.optimizer.lr_decay_style=constant",
    "resources.cluster=null",
    "resources.external_engines=[]",
    "engine.router_url=null",
    "gates.bounds=[]",
    "observe.prometheus_port=null",
    "observe.use_wandb=false",
)
"""Settings of every run that only evaluates: no iterations, a constant learning rate, own actors.

The constant schedule needs no length. Clusters, engines, ports and W&B of other runs are not used.
"""


def evaluation_config(
    home: Path,
    *,
    run: str | None,
    iteration: int | None = None,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
) -> RunConfig:
    """Return the configuration of a run that only evaluates the weights of a run or a recipe.

    Raises: ConfigError if neither is given, or if the configuration has no held-out sets.
    """
    if run is None and recipe is None:
        raise ConfigError("no weights to evaluate", where="evaluate", expected="a run or a recipe")
    if recipe is not None:
        source = Path(recipe)
    else:
        source = write_recipe(home, str(run), upgraded(RunConfig, get_run(home, str(run)).config))
        _refuse_reward_model(load_run(source, EVALUATION_SETTINGS, run))
    title = name or f"{default_name(source)}.eval"
    fixed = [*overrides, *EVALUATION_SETTINGS]
    if run is not None:
        base = load_run(source, fixed, run)
        files = Files(base.store.root or home / "store")
        start = saved_weights(files, run, iteration, adapters=base.train.lora is not None)
        title = name or f"{run}.eval-{start.iteration}"
        if base.sync.transport == "adapter":
            # Engines of a saved checkpoint need its frozen weights too.
            fixed += ["sync.transport=tensor"]
        # The weights of the run replace those of the recipe's model.
        fixed += [f"model.start_from={start.model_dump_json()}", "model.adapter=null"]
    config = load_run(source, fixed, title)
    if not config.evaluation.datasets:
        raise ConfigError(
            "no held-out set to evaluate",
            where="evaluation.datasets",
            found="none",
            do="name a recipe that has some with --recipe, or give one: --eval-prompt-data NAME "
            "FILE.jsonl --eval-input-key prompt --eval-label-key answer, or 'evaluation.datasets="
            "[{name: NAME, prompts: {type: file, paths: [FILE.jsonl], label_key: answer}}]'",
        )
    return config


def _refuse_reward_model(config: RunConfig) -> None:
    if config.train.loss.type == "reward_model":
        raise ConfigError(
            "a reward model generates no text that could be evaluated",
            where=f"run {config.run}",
            found="train.loss.type: reward_model",
            do="compare its rewards of held-out pairs with transformers, after `rlpipe convert "
            "dist2hf`: rlpipe/algorithms/README.md, Preferences",
        )


def saved_weights(
    files: Files, run: str, iteration: int | None, *, adapters: bool = False
) -> BranchModel:
    """Return the iteration with saved weights: `iteration`, else the newest with a checkpoint.

    `adapters`: stored adapters without a checkpoint are enough. Raises: ConfigError if the weights
    are not saved.
    """

    def is_saved(commit: Commit) -> bool:
        weights = weights_after(files, commit)
        return has_checkpoint(files, weights) or (
            adapters and adapters_of(Nodes(files), weights) is not None
        )

    where = run if iteration is None else f"{run}@{iteration}"
    require_commit(files, run, iteration or 0, where=where)
    saved = (commit for commit in Branches(files).walk(run) if is_saved(commit))
    if iteration is None:
        found = next(saved, None)
    else:
        commit = Branches(files).read(run, iteration)
        found = commit if is_saved(commit) else None
    if found is not None:
        return BranchModel(branch=found.branch, iteration=found.iteration)
    names = [f"{run}@{commit.iteration}" for commit in islice(saved, MOST_NAMES)]
    raise ConfigError(
        "these weights were not saved" if names else "the run has no saved weights",
        where=where,
        found=f"checkpoints of {', '.join(names)}" if names else "no checkpoint",
        expected="weights that were saved: at the end, and every checkpoint.save_interval "
        "iterations",
        do=f"name one of those, such as {names[0]}"
        if names
        else "let the run end, or start a run that saves more often: checkpoint.save_interval=10",
    )


def weights_after(files: Files, commit: Commit) -> str:
    """Return the digest of the node that made the weights after an iteration."""
    return current_state(
        Segments(files), commit.branch, commit.iteration + 1, commit.nodes[Stage.TRAIN]
    )


def has_checkpoint(files: Files, weights: str) -> bool:
    """True if these weights have a checkpoint."""
    return Nodes(files).find(Stage.CHECKPOINT, checkpoint_inputs(weights).digest) is not None


@dataclass(frozen=True)
class Reprocessing:
    """A branch that stored rollouts are reprocessed into."""

    source: StoredRun
    config: RunConfig
    """Configuration of the new branch."""
    iterations: list[int]
    parent: str | None
    """Commit before the first iteration; None for iteration 0 or without commits."""
    init: str
    """Digest of the init node."""


def reprocessing(
    home: Path,
    *,
    of: str,
    iterations: str | None = None,
    run: str | None = None,
    overrides: Sequence[str] = (),
    store: str | None = None,
) -> Reprocessing:
    """Return the branch `run` that iterations of the run `of` are reprocessed into.

    The branch has the whole configuration of the source, changed by `overrides`. If the range does
    not begin with the first iteration, the branch is a fork of the commit before. `iterations`:
    `A:B`; None: all. Raises: ConfigError.
    """
    source = stored_run(home, of, store)
    refuse_owned_keys(overrides)
    name = run or f"{of}.reprocessed"
    if name == of:
        raise ConfigError(
            "a reprocessed run needs a name of another branch",
            where="run",
            found=name,
            do="choose another name: --run NEW",
        )
    chosen = chosen_iterations(source, iterations)
    branches = Branches(source.files)
    trained = trained_run(branches, of)
    parent = None
    if branches.newest(trained) is not None:
        parent = branches.parent_name(trained, chosen[0])
    config = load_run(
        source.recipe, [*overrides, *branch_overrides(source, chosen, parent, loads=of)], name
    )
    return Reprocessing(source, config, chosen, parent, branches.get(of).init)


def training_recipe(
    home: Path, branch: Reprocessing, name: str, overrides: Sequence[str] = ()
) -> Path:
    """Return the recipe of a run that trains from a reprocessed branch. Raises: ConfigError."""
    refuse_owned_keys(overrides)
    if branch.parent is None and branch.iterations[0] != 0:
        raise ConfigError(
            "training must begin with iteration 0 or after a commit",
            where="iterations",
            found=f"first iteration {branch.iterations[0]}, no commit of {branch.source.run}",
            expected="0:B",
        )
    loads = branch.config.run
    fixed = branch_overrides(branch.source, branch.iterations, branch.parent, loads=loads)
    recipe = write_recipe(home, loads, branch.config.model_dump(mode="json"))
    config = load_run(recipe, [*overrides, *fixed], name)
    return write_recipe(home, name, config.model_dump(mode="json"))


def branch_overrides(
    source: StoredRun, iterations: Sequence[int], parent: str | None, *, loads: str
) -> list[str]:
    """Return overrides for a branch with the rollouts of `loads`, after the commit `parent`."""
    fork = parse_commit_name(parent) if parent else None
    return [
        f"num_rollout={iterations[-1] + 1}",
        f"fork_from={json.dumps({'branch': fork[0], 'iteration': fork[1]} if fork else None)}",
        "warm_start=null",
        f"model.start_from={json.dumps(None if fork else first_weights(source))}",
        f"debug={json.dumps({'load_debug_rollout_data': loads})}",
        "stop_when=null",
    ]


def first_weights(source: StoredRun) -> dict[str, Any] | None:
    """Return `model.start_from` for a run with the first weights of `source`.

    After a warm start these are the last weights of the warm start.
    """
    if source.config.get("warm_start"):
        return {"branch": f"{source.run}.warm_start", "iteration": None}
    return source.config["model"].get("start_from")


def trained_run(branches: Branches, run: str) -> str:
    """Return the run that trained on the rollouts of `run`.

    That is `run` itself, or the source of a reprocessed run.
    """
    branch = branches.get(run)
    seen = {run}
    while (
        # A branch without commits that loads rollouts was reprocessed, not trained.
        loads := branch.config.get("debug", {}).get("load_debug_rollout_data")
    ) and not _own_commits(branches, branch.branch):
        # The source was removed, or the branches refer to each other.
        if loads in seen or branches.find(loads) is None:
            break
        seen.add(loads)
        branch = branches.get(loads)
    return branch.branch


def _own_commits(branches: Branches, run: str) -> bool:
    newest = branches.newest(run)
    return newest is not None and newest.branch == run


def chosen_iterations(source: StoredRun, text: str | None) -> list[int]:
    """Return the stored iterations from A up to B, without gaps. Raises: ConfigError."""
    stored = stored_iterations(source.files, source.run)
    if not stored:
        raise ConfigError(
            "the run has no stored rollout", where=source.run, found=source.files.root
        )
    first, colon, end = (text or ":").partition(":")
    if not all(
        number.isdigit() or (colon and not number)
        for number in ((first, end) if colon else (first,))
    ):
        raise ConfigError(
            "not a range of iterations",
            where="iterations",
            found=text,
            expected="A:B, A:, :B, : or one number",
        )
    low = int(first or stored[0])
    high = (int(end) if end else stored[-1] + 1) if colon else low + 1
    chosen = [k for k in stored if low <= k < high]
    # A given bound is meant: less than it names would be a surprise.
    whole = low >= stored[0] and high <= stored[-1] + 1
    if chosen and whole and chosen == list(range(chosen[0], chosen[-1] + 1)):
        return chosen
    found = text or ":"
    if chosen:
        found += f", of which only {_listed(chosen)} are stored"
    raise ConfigError(
        "rollouts are not stored",
        where="iterations",
        found=found,
        expected=f"a range within {stored[0]}:{stored[-1] + 1}, without gaps",
        do=f"give {max(low, stored[0])}: for all from there on" if chosen else None,
    )


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers as text, a range without gaps as `A to B`."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def refuse_owned_keys(overrides: Sequence[str]) -> None:
    """Refuse overrides of keys that the branch sets itself. Raises: ConfigError."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if any(key == owned or key.startswith(f"{owned}.") for owned in REPROCESSED_KEYS):
            raise ConfigError(
                "a reprocessed run sets this key itself",
                where=key,
                found=override,
                do="leave it out",
            )
