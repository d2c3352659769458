"""Configuration, store, actors and progress line of an open run, shared by its tasks.

    ctx = await context(run)

A process opens a context once and finds it by the run's name afterwards, so task parameters stay
small. A process that did not start the run (an iteration as its own flow run, a retry) opens the
context from `{home}/{run}/run.json`. It then uses the epoch and the Ray of the run's driver, while
the driver exists.
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
from rlpipe.config.model import MadeModel
from rlpipe.config.run import RunConfig
from rlpipe.data.prompt_lengths import check_prompt_lengths, file_rows
from rlpipe.errors import ResourceError
from rlpipe.lineage.states import Lineages
from rlpipe.model_dir import (
    check_context_len,
    check_stop_ids,
    long_responses,
    model_directory,
    model_directory_if_present,
    model_fingerprint,
)
from rlpipe.observe.progress import Progress
from rlpipe.observe.terminal import waiting_for
from rlpipe.store.branches import Branches, parse_commit_name
from rlpipe.store.epochs import Epoch, Epochs
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import Plans
from rlpipe.store.run_file import RunFile, get_run, write_run
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import Commit, Stage
from tasks.engine_reports import EngineReports


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
    has_driver: bool = True
    """True while a process opens iterations and evaluates. False for a retry after the driver
    ended.
    """
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Stage → seconds of its work since the last iteration was observed."""
    iterations_with_errors: int = 0
    """Iterations whose reward function failed for some samples, in this process."""
    store_changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this process commits an iteration or records an evaluation."""

    @cached_property
    def nodes(self) -> Nodes:
        """Nodes of the store."""
        return Nodes(self.files)

    @cached_property
    def plans(self) -> Plans:
        """Plans of the store."""
        return Plans(self.files)

    @cached_property
    def branches(self) -> Branches:
        """Branches of the store."""
        return Branches(self.files)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the model directory."""
        return model_fingerprint(self.model_dir, self.home / "models" / "fingerprints.json")

    @cached_property
    def contracts(self) -> dict[Stage, int]:
        """Stage → version of its contract, fixed when the run's branch began."""
        return self.branches.contracts(self.config.run)

    @cached_property
    def init(self) -> str:
        """Digest of the branch's init node."""
        return self.branches.get(self.config.run).init

    @cached_property
    def lineages(self) -> Lineages:
        """Lineages of the states of the branch."""
        return Lineages(
            self.nodes,
            self.init,
            ref_update_interval=self.config.ref_update_interval,
            ref_update_offset=self.config.ref_update_offset,
        )

    @cached_property
    def engine_reports(self) -> EngineReports:
        """Lines in the terminal about the run's engines."""
        return EngineReports(self.config, self.directory, self.progress.say)

    @property
    def directory(self) -> Path:
        """`{home}/{run}`: reports, logs and local checkpoints."""
        return self.home / self.config.run

    @cached_property
    def first_iteration(self) -> int:
        """First iteration of the branch. A fork begins after the commit of its parent."""
        parent = self.branches.get(self.config.run).parent
        return parse_commit_name(parent)[1] + 1 if parent else 0

    def notify(self) -> None:
        """Wake the tasks of this process that wait for `store_changed`."""
        self.store_changed.set()
        self.store_changed = asyncio.Event()

    def commit_before(self, iteration: int) -> Commit | None:
        """Return the commit before an iteration, or None before the first one of all.

        Before a fork's first iteration that is its parent's commit.
        """
        return self.branches.before(self.config.run, iteration)

    def weights_before(self, iteration: int) -> str:
        """Return the digest of an iteration's initial weights: a train, init or segment node."""
        return current_state(
            Segments(self.files), self.config.run, iteration, self.recorded_before(iteration)
        )

    def recorded_before(self, iteration: int) -> str:
        """Return the digest that was recorded first, before any segment replaced it."""
        commit = self.commit_before(iteration)
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
"""Packages that decide a result."""


async def open_context(
    config: RunConfig, home: Path, progress: Progress, *, takeover: bool = False
) -> RunContext:
    """Open a run to drive it in this process: acquire the epoch, find the model, start the actors.

    Raises: Fenced if another process drives the run, unless `takeover`; errors of the starting
    actors.
    """
    files = Files(config.store.root or home / "store")
    (home / config.run).mkdir(parents=True, exist_ok=True)
    epoch = Epochs(files).acquire(config.run, takeover=takeover)
    return await _open_run(config, home, progress, files, epoch)


async def join_context(run: str) -> RunContext:
    """Open a run that another process drives, from `{home}/{run}/run.json`.

    Without a driver, the run is opened under a new epoch only by a rescheduled flow run of the next
    iteration. An iteration that was opened ahead waits for the next driver.
    Raises: ConfigError if the run does not exist; Fenced without a driver; errors of the actors.
    """
    home = default_home()
    record = get_run(home, run)
    config = validate_stored(record.config)
    files = Files(config.store.root or home / "store")
    # A first attempt whose driver is gone was opened ahead; the next driver opens it again.
    rescheduled = (this_flow_run.run_count or 1) > 1
    epoch = Epochs(files).join(
        run, stand_in=rescheduled and _is_next(files, run, this_flow_run.parameters.get("k"))
    )
    if epoch.joined and config.resources.ray_address is None:
        # With `ray_address` all processes use the same cluster anyway.
        await _join_ray(record, epoch, home, namespace=named.namespace(config.cluster))
    ctx = await _open_run(config, home, Progress(run, config.num_rollout), files, epoch)
    ctx.has_driver = epoch.joined and not epoch.stand_in
    return ctx


def _is_next(files: Files, run: str, k: int | None) -> bool:
    """True if the iteration before k is committed, so that k can run without a driver."""
    newest = Branches(files).newest(run)
    return k is None or k <= (newest.iteration + 1 if newest else 0)


async def _join_ray(record: RunFile, epoch: Epoch, home: Path, *, namespace: str) -> None:
    """Join the driver's Ray. Raises: ResourceError."""
    # On another Ray a second trainer would start under the driver's epoch.
    address: str | None = record.ray if record.epoch == epoch.number else None
    if address is None or not await asyncio.to_thread(
        local_ray.join, address, home, namespace=namespace
    ):
        raise ResourceError(
            "joining the Ray of the driver failed",
            where="run.json",
            found=f"{record.ray} of epoch {record.epoch}",
            expected=f"a Ray of epoch {epoch.number} that answers",
            do="the driver may still be starting and reschedules this flow run; else press Retry",
        )


async def _open_run(
    config: RunConfig, home: Path, progress: Progress, files: Files, epoch: Epoch
) -> RunContext:
    """Open the context of a run under an epoch.

    A driver writes `run.json` before and after the actors start; the second time with their Ray.
    """
    # Renew the lease in the background from here on.
    epoch.keep()
    try:
        if not epoch.joined:
            write_run(home, config.run, _run_file(home, config, epoch))
        with waiting_for("model"):
            # In threads: making a model directory may take minutes.
            present = await asyncio.to_thread(
                model_directory_if_present, config.model, home, seed=config.seed
            )
            model_dir = await asyncio.to_thread(
                model_directory, config.model, home, seed=config.seed
            )
        check_stop_ids(config.rollout, config.evaluation.datasets, model_dir)
        check_context_len(config.engine, config.rollout, config.evaluation.datasets, model_dir)
        # `rlpipe train` warned already if the model was here.
        if present is None and config.needs_engines and not epoch.joined:
            for text in long_responses(config.rollout, config.evaluation.datasets, model_dir):
                progress.say(f"{config.run}: warning: {text}")
        # The preflight had no directory of a model that is made here.
        if isinstance(config.model.source, MadeModel) and not epoch.joined:
            rows = await asyncio.to_thread(file_rows, config)
            await asyncio.to_thread(check_prompt_lengths, config, rows, Path(model_dir))
        cluster = await open_cluster(
            config, epoch=epoch, home=home, model_dir=model_dir, store_root=files.root
        )
        if cluster.memory is not None and not epoch.joined:
            progress.say(f"{config.run}: {cluster.memory}")
        if not epoch.joined:
            ray = local_ray.address()
            write_run(home, config.run, _run_file(home, config, epoch, ray=ray))
    # A cancelled start must release the epoch too.
    except BaseException:
        epoch.release()
        raise
    _OPEN[config.run] = RunContext(config, home, model_dir, files, cluster, progress, epoch)
    return _OPEN[config.run]


def _run_file(home: Path, config: RunConfig, epoch: Epoch, *, ray: str | None = None) -> RunFile:
    """Return the record by which other processes join the run: store, configuration, epoch, Ray."""
    store = config.store.root or str(home / "store")
    return RunFile(store=store, config=config.model_dump(mode="json"), epoch=epoch.number, ray=ray)


async def context(run: str) -> RunContext:
    """Return the open run of this name, or join it if this process has not opened it.

    Raises: ConfigError; Fenced if another driver has the run.
    """
    ctx = _OPEN[run] if run in _OPEN else await join_context(run)
    if ctx.epoch.lost:
        raise ctx.epoch.lost
    return ctx


def ray_has_died() -> bool:
    """True if the Ray that this process uses has died, and no other was started or joined since."""
    watch = ray_watch.current()
    return watch is not None and watch.lost is not None


async def recover(run: str) -> None:
    """Restart dead actors of a run, and their Ray. Stages restore the state of actors.

    Raises: as `open_context`; ResourceError if the Ray of another process has died and that process
    starts no other in time.
    """
    ctx = await context(run)
    await asyncio.to_thread(ctx.epoch.check)
    with ctx.progress.running("recover", note="checking actors and servers"):
        await _recover(ctx)


async def _recover(ctx: RunContext) -> None:
    run = ctx.config.run
    watch = ray_watch.current()
    if watch is not None and (lost := watch.lost) is not None:
        ctx.progress.say(
            f"{run}: {lost.where} has died ({lost.found}); starting or joining another"
        )
        # Only the driver starts a local Ray; other processes wait for it.
        if ctx.epoch.joined and ctx.config.resources.ray_address is None:
            await _join_next_ray(ctx)
    ctx.cluster = await open_cluster(
        ctx.config,
        epoch=ctx.epoch,
        home=ctx.home,
        model_dir=ctx.model_dir,
        store_root=ctx.files.root,
    )
    if not ctx.epoch.joined:
        ray = local_ray.address()
        write_run(ctx.home, run, _run_file(ctx.home, ctx.config, ctx.epoch, ray=ray))


async def _join_next_ray(ctx: RunContext) -> None:
    """Join the Ray that the driver starts in place of a dead one. Raises: ResourceError."""
    deadline_s = time.monotonic() + NEXT_RAY_TIMEOUT_S
    while True:
        try:
            return await _join_ray(
                get_run(ctx.home, ctx.config.run),
                ctx.epoch,
                ctx.home,
                namespace=named.namespace(ctx.config.cluster),
            )
        except ResourceError:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(NEXT_RAY_INTERVAL_S)


async def close_context(run: str, *, end_actors: bool) -> None:
    """Release the epoch of a run. The actors stay for the next driver, or end with `end_actors`."""
    # Popped first: a failing `close` must not leave a context that looks open.
    ctx = _OPEN.pop(run)
    try:
        if end_actors:
            await ctx.cluster.close()
            await asyncio.to_thread(
                prune, ctx.directory / "checkpoints", ctx.config.checkpoint.keep_local
            )
    finally:
        await asyncio.to_thread(ctx.epoch.release)


class Stopwatch:
    """Adds the seconds of its block to a stage of the context."""

    def __init__(self, run: RunContext, stage: str) -> None:
        self._run = run
        self._stage = stage

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._start
        seconds = self._run.stage_seconds
        seconds[self._stage] = seconds.get(self._stage, 0.0) + self.seconds


def packages() -> dict[str, str]:
    """Return the versions of PACKAGES. Packages that are not installed are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
