"""The run that only evaluates: its configuration, and whose weights it starts with.

Not here: running it (`flows.evaluate`). Imports no Prefect, so that a command line can refuse what
is wrong before a server starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows.recorded import write_recipe
from rlpipe.config.introduced import upgraded
from rlpipe.config.load import load_run
from rlpipe.config.model import BranchModel
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import get_run
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import Stage

FIXED = (
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
"""Settings of every run that only evaluates: no iterations, actors, engines, ports and curves of
its own, and a schedule that needs no length."""


def configuration(
    home: Path,
    *,
    run: str | None,
    iteration: int | None = None,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
) -> RunConfig:
    """The run that only evaluates. Raises: ConfigError if there is nothing to evaluate, or nothing
    on what."""
    if run is None and recipe is None:
        raise ConfigError(
            "what shall be evaluated?", where="evaluate", expected="a run, or a recipe"
        )
    source = Path(recipe) if recipe is not None else _recorded(home, str(run))
    title = name or f"{source.stem}.eval"
    fixed = [*overrides, *FIXED]
    if run is not None:
        base = load_run(source, fixed, run)
        start = saved(Files(base.store.root or home / "store"), run, iteration)
        title = name or f"{run}.eval-{start.iteration}"
        fixed.append(f"model.start_from={start.model_dump_json()}")
    config = load_run(source, fixed, title)
    if not config.evaluation.datasets:
        do = "name held-out sets, or a recipe that has some"
        raise ConfigError(
            "there is nothing to evaluate on", where="evaluation.datasets", found="none", do=do
        )
    return config


def saved(files: Files, run: str, iteration: int | None) -> BranchModel:
    """Where a run's weights were saved: after this iteration, or after its newest that was. Raises:
    ConfigError."""
    branches = Branches(files)
    nodes = Nodes(files)
    found = [branches.read(run, iteration)] if iteration is not None else branches.walk(run)
    for commit in found:
        weights = current_state(
            Segments(files), commit.branch, commit.iteration + 1, commit.nodes[Stage.TRAIN]
        )
        if nodes.find(Stage.CHECKPOINT, checkpoint_inputs(weights).digest) is not None:
            return BranchModel(branch=commit.branch, iteration=commit.iteration)
    raise ConfigError(
        "no weights of that run are saved",
        where=f"run={run}",
        found="no checkpoint"
        if iteration is None
        else f"no checkpoint after iteration {iteration}",
        expected="an iteration whose weights were saved (checkpoint.save_interval)",
    )


def _recorded(home: Path, run: str) -> Path:
    """A recipe file with the configuration that a run was last started with, beside its record."""
    return write_recipe(home, run, upgraded(RunConfig, get_run(home, run).config))
