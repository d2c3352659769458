"""What every task of a run needs: its configuration, its store, its actors, its progress line.

A context is opened once per process and run, and found by the run's name after that: task parameters stay form-sized. A
process that did not start the run (a child flow of its own, a retry) opens it from `{home}/{run}/run.json`.

Not here: anything that decides what happened; that is what the store says.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlpipe.actors.cluster import Cluster, open_cluster
from rlpipe.config.load import home as default_home
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.inputs import Inputs
from rlpipe.model_dir import model_directory, model_fingerprint
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epoch, Epochs
from rlpipe.store.files import Files
from rlpipe.store.nodes import Nodes
from rlpipe.store.plans import Plans
from rlpipe.types import Commit, Stage


@dataclass(frozen=True)
class Upload:
    """A checkpoint that is on local disk and on its way to the store."""

    prefix: str
    """Where it goes: names the attempt."""
    inputs: Inputs
    outputs: dict[str, Any]


@dataclass
class RunContext:
    """One open run in this process."""

    config: RunConfig
    home: Path
    model_dir: str
    files: Files
    cluster: Cluster
    progress: Progress
    epoch: Epoch
    """The right to commit to the run's branch."""
    upload: Upload | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the stages' own work in the iteration that runs."""

    @cached_property
    def nodes(self) -> Nodes:
        return Nodes(self.files)

    @cached_property
    def plans(self) -> Plans:
        return Plans(self.files)

    @cached_property
    def branches(self) -> Branches:
        return Branches(self.files)

    @cached_property
    def fingerprint(self) -> str:
        return model_fingerprint(self.model_dir, self.home / "models" / "fingerprints.json")

    @cached_property
    def init(self) -> str:
        """Digest of the init node of the run's branch."""
        return self.branches.get(self.config.run).init

    @property
    def directory(self) -> Path:
        """`{home}/{run}`: what people look at, and the local checkpoints."""
        return self.home / self.config.run

    def before(self, iteration: int) -> Commit | None:
        """The commit that an iteration follows; None for the first."""
        return self.branches.read(self.config.run, iteration - 1) if iteration else None

    def weights_before(self, iteration: int) -> str:
        """Digest of the node that made the weights an iteration starts with."""
        commit = self.before(iteration)
        return commit.nodes[Stage.TRAIN] if commit else self.init


_OPEN: dict[str, RunContext] = {}


async def open_context(config: RunConfig, home: Path, progress: Progress, *, takeover: bool = False) -> RunContext:
    """Open a run in this process: the right to drive it, its model, its store, its actors.

    Raises: Fenced if another process drives it, unless `takeover`; whatever keeps one of them from coming up.
    """
    files = Files(config.store.root or home / "store")
    (home / config.run).mkdir(parents=True, exist_ok=True)
    epoch = Epochs(files).acquire(config.run, takeover=takeover)
    epoch.keep()
    try:
        record = {"store": files.root, "config": config.model_dump(mode="json")}
        (home / config.run / "run.json").write_text(json.dumps(record, indent=1))
        model_dir = await asyncio.to_thread(model_directory, config.model, home, seed=config.seed)
        cluster = await open_cluster(config, home=home, model_dir=model_dir, store_root=files.root)
    except BaseException:
        epoch.release()
        raise
    _OPEN[config.run] = RunContext(config, home, model_dir, files, cluster, progress, epoch)
    return _OPEN[config.run]


async def context(run: str) -> RunContext:
    """The open run of this name; opened from what `{home}/{run}/run.json` says if this process did not.

    Raises: ConfigError; Fenced if another driver has taken it over, or has it.
    """
    if run not in _OPEN:
        home = default_home()
        path = home / run / "run.json"
        if not path.is_file():
            raise ConfigError("there is no such run", where=f"run={run}", found=f"no {path}", do="start it with the train flow")
        config = validate(json.loads(path.read_text())["config"])
        await open_context(config, home, Progress(run, config.num_rollout))
    if lost := _OPEN[run].epoch.lost:
        raise lost
    return _OPEN[run]


async def recover(run: str) -> None:
    """Start again what died of a run's actors. Their state is restored by whoever needs it next."""
    it = await context(run)
    it.progress.stage("recover", note="looking for dead actors and servers")
    it.cluster = await open_cluster(it.config, home=it.home, model_dir=it.model_dir, store_root=it.files.root)


def close_context(run: str, *, end_actors: bool) -> None:
    """Let go of a run: another driver may have it. Its actors stay for the next one, or end and give their places back."""
    it = _OPEN.pop(run)
    try:
        if end_actors:
            it.cluster.kill()
    finally:
        it.epoch.release()


class Stopwatch:
    """Adds the seconds of its block to the context's stage."""

    def __init__(self, run: RunContext, stage: str) -> None:
        self._run, self._stage = run, stage

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._start
        spent = self._run.stage_seconds
        spent[self._stage] = spent.get(self._stage, 0.0) + self.seconds
