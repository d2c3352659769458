"""What every task of a run needs: its configuration, its store, its actors, its progress line.

A context is opened once per process and run, and found by the run's name after that: task
parameters stay form-sized. A process that did not start the run (an iteration as a flow run of its
own, a retry) opens it from `{home}/{run}/run.json`: under the epoch and on the Ray of the process
that drives the run, while there is one.

Not here: anything that decides what happened; that is what the store says.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run as this_flow_run

from rlpipe.actors.client import Cluster, open_cluster
from rlpipe.actors.ray import local_ray, named
from rlpipe.actors.ray import watch as ray_watch
from rlpipe.actors.trainer.checkpoints import prune
from rlpipe.config.load import home as default_home
from rlpipe.config.load import validate_stored
from rlpipe.config.run import RunConfig
from rlpipe.errors import ResourceError
from rlpipe.lineage.states import Lineages
from rlpipe.model_dir import check_context_len, check_stop_ids, model_directory, model_fingerprint
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches, parse_commit_name
from rlpipe.store.epochs import Epoch, Epochs
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import Plans
from rlpipe.store.run_file import RunFile, get_run, write_run
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import Commit, Stage


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
    driven: bool = True
    """Is there a process that opens iterations and evaluates? Not for an iteration that somebody
    retries after that has ended."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the stages' own work since somebody asked."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this process next commits an iteration, or records an evaluation."""

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
    def contracts(self) -> dict[Stage, int]:
        """Version of each stage's contract: that with which the run's branch was begun, or begins
        now."""
        return self.branches.contracts(self.config.run)

    @cached_property
    def init(self) -> str:
        """Digest of the init node of the run's branch."""
        return self.branches.get(self.config.run).init

    @cached_property
    def lineages(self) -> Lineages:
        return Lineages(self.nodes, self.init, ref_update_interval=self.config.ref_update_interval)

    @property
    def directory(self) -> Path:
        """`{home}/{run}`: what people look at, and the local checkpoints."""
        return self.home / self.config.run

    @cached_property
    def first(self) -> int:
        """The first iteration of the run's branch: that after the commit it was forked from."""
        parent = self.branches.get(self.config.run).parent
        return parse_commit_name(parent)[1] + 1 if parent else 0

    def tell(self) -> None:
        """Wake who waits for news of the store in this process."""
        self.news.set()
        self.news = asyncio.Event()

    def before(self, iteration: int) -> Commit | None:
        """The commit that an iteration follows, of a fork's first its parent's; None for the first
        of all."""
        return self.branches.before(self.config.run, iteration)

    def weights_before(self, iteration: int) -> str:
        """Digest of the node that made the weights an iteration starts with: train, init, or a
        segment in their place."""
        return current_state(
            Segments(self.files), self.config.run, iteration, self.recorded_before(iteration)
        )

    def recorded_before(self, iteration: int) -> str:
        """The same as it was recorded first, whatever has taken its place since."""
        commit = self.before(iteration)
        return commit.nodes[Stage.TRAIN] if commit else self.init


NEXT_RAY_TIMEOUT_S = 60.0
NEXT_RAY_INTERVAL_S = 1.0
_OPEN: dict[str, RunContext] = {}
PACKAGES = (
    "rlpipe",
    "torch",
    "megatron-core",
    "mbridge",
    "sglang",
    "sglang-router",
    "transformers",
    "ray",
    "prefect",
    "pyarrow",
)


async def open_context(
    config: RunConfig, home: Path, progress: Progress, *, takeover: bool = False
) -> RunContext:
    """Open a run to drive it in this process: the right to, its model, its store, its actors.

    Raises: Fenced if another process drives it, unless `takeover`; whatever keeps one of them from
    coming up.
    """
    files = Files(config.store.root or home / "store")
    (home / config.run).mkdir(parents=True, exist_ok=True)
    epoch = Epochs(files).acquire(config.run, takeover=takeover)
    return await _open(config, home, progress, files, epoch)


async def join_context(run: str) -> RunContext:
    """Open a run that another process drives, from what `{home}/{run}/run.json` says. If none does
    any more, on our own, but only in a flow run that was put back and whose iteration is the next:
    one that was opened ahead is left to the next driver.

    Raises: ConfigError if there is no such run; Fenced without a driver; whatever keeps its actors
    from coming up.
    """
    home = default_home()
    record = get_run(home, run)
    config = validate_stored(record.config)
    files = Files(config.store.root or home / "store")
    put_back = (this_flow_run.run_count or 1) > 1
    epoch = Epochs(files).join(
        run, stand_in=put_back and _is_next(files, run, this_flow_run.parameters.get("k"))
    )
    if epoch.joined and config.resources.ray_address is None:
        await _join_ray(record, epoch, home, namespace=named.namespace(config.cluster))
    it = await _open(config, home, Progress(run, config.num_rollout), files, epoch)
    it.driven = epoch.joined and not epoch.stand_in
    return it


def _is_next(files: Files, run: str, k: int | None) -> bool:
    """Is the iteration before this one committed, so that it could go on without a driver?"""
    newest = Branches(files).newest(run)
    return k is None or k <= (newest.iteration + 1 if newest else 0)


async def _join_ray(record: RunFile, epoch: Epoch, home: Path, *, namespace: str) -> None:
    """Use the driver's Ray: with another one there would be a second trainer under its epoch.
    Raises: ResourceError."""
    address: str | None = record.ray if record.epoch == epoch.number else None
    if address is None or not await asyncio.to_thread(
        local_ray.join, address, home, namespace=namespace
    ):
        raise ResourceError(
            "the Ray of the process that drives the run cannot be joined",
            where="run.json",
            found=f"{record.ray} of epoch {record.epoch}",
            expected=f"a Ray of epoch {epoch.number} that answers",
            do="it may still be starting: the driver puts this flow run back, or press Retry",
        )


async def _open(
    config: RunConfig, home: Path, progress: Progress, files: Files, epoch: Epoch
) -> RunContext:
    """The context of a run under this epoch. Unless it was joined, `run.json` says so, and then on
    which Ray the actors are."""
    epoch.keep()
    try:
        if not epoch.joined:
            write_run(home, config.run, _record(home, config, epoch))
        model_dir = await asyncio.to_thread(model_directory, config.model, home, seed=config.seed)
        check_stop_ids(config.rollout, config.evaluation.datasets, model_dir)
        check_context_len(config.engine, config.rollout, config.evaluation.datasets, model_dir)
        cluster = await open_cluster(
            config, epoch=epoch.number, home=home, model_dir=model_dir, store_root=files.root
        )
        if not epoch.joined:
            write_run(home, config.run, _record(home, config, epoch, ray=local_ray.address()))
    except BaseException:
        epoch.release()
        raise
    _OPEN[config.run] = RunContext(config, home, model_dir, files, cluster, progress, epoch)
    return _OPEN[config.run]


def _record(home: Path, config: RunConfig, epoch: Epoch, *, ray: str | None = None) -> RunFile:
    """Where the run of this name is, for who joins it; under which epoch, and once it is up, on
    which Ray."""
    store = config.store.root or str(home / "store")
    return RunFile(store=store, config=config.model_dump(mode="json"), epoch=epoch.number, ray=ray)


async def context(run: str) -> RunContext:
    """The open run of this name; joined if this process has not opened it.

    Raises: ConfigError; Fenced if another driver has taken it over, or has it.
    """
    it = _OPEN[run] if run in _OPEN else await join_context(run)
    if it.epoch.lost:
        raise it.epoch.lost
    return it


def ray_has_died() -> bool:
    """True if the Ray that this process uses has died, and no other has been started or joined
    since."""
    watch = ray_watch.current()
    return watch is not None and watch.lost is not None


async def recover(run: str) -> None:
    """Start again what died of a run's actors, and their Ray. Their state is restored by whoever
    needs it next.

    Raises: as `open_context`; ResourceError if the Ray of another process has died, and that
    process starts no other in time.
    """
    it = await context(run)
    await asyncio.to_thread(it.epoch.check)
    it.progress.stage("recover", note="looking for dead actors and servers")
    watch = ray_watch.current()
    if watch is not None and (lost := watch.lost) is not None:
        it.progress.say(
            f"{run}: {lost.where} has died ({lost.found}); starting or joining it again"
        )
        if it.epoch.joined and it.config.resources.ray_address is None:
            await _join_next_ray(it)
    it.cluster = await open_cluster(
        it.config,
        epoch=it.epoch.number,
        home=it.home,
        model_dir=it.model_dir,
        store_root=it.files.root,
    )
    if not it.epoch.joined:
        write_run(it.home, run, _record(it.home, it.config, it.epoch, ray=local_ray.address()))


async def _join_next_ray(it: RunContext) -> None:
    """Join the Ray that the process which drives the run starts in place of one that has died.
    Raises: ResourceError."""
    until = time.monotonic() + NEXT_RAY_TIMEOUT_S
    while True:
        try:
            return await _join_ray(
                get_run(it.home, it.config.run),
                it.epoch,
                it.home,
                namespace=named.namespace(it.config.cluster),
            )
        except ResourceError:
            if time.monotonic() > until:
                raise
        await asyncio.sleep(NEXT_RAY_INTERVAL_S)


async def close_context(run: str, *, end_actors: bool) -> None:
    """Let go of a run: another driver may have it. Its actors stay for the next one, or end and
    give their places back."""
    it = _OPEN.pop(run)
    try:
        if end_actors:
            await it.cluster.close()
            await asyncio.to_thread(
                prune, it.directory / "checkpoints", it.config.checkpoint.keep_local
            )
    finally:
        await asyncio.to_thread(it.epoch.release)


class Stopwatch:
    """Adds the seconds of its block to the context's stage."""

    def __init__(self, run: RunContext, stage: str) -> None:
        self._run = run
        self._stage = stage

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._start
        spent = self._run.stage_seconds
        spent[self._stage] = spent.get(self._stage, 0.0) + self.seconds


def packages() -> dict[str, str]:
    """Versions of what computes the result; a package that is not installed is left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
