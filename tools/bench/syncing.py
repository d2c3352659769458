"""`sync`: a push of weights by each transport, against a copy of the same bytes on the device.

A trainer rank and the engines start as in a run, without Ray between them. The rank takes an
optimizer step (learning rate 1e-6) and its weights are pushed; pushes and copies alternate, one
transport after another.

    push     seconds from the call of the trainer until every engine samples again, with the export
    paused   seconds between the pause of the engines and all of them sampling again. No request is
             in flight; one would cost about a second more, until the engine aborted it. The note
             has the push's steps: `tensors` waits for gathering and packing, `bucket` for the
             engines to receive and load
    GB/s     bytes of all weights / seconds of the push
    share    bytes sent / bytes of all weights (less than 1 for changes)
    export   seconds of gathering all weights under their names, measured alone

By default the engines share the trainer's GPU. With engines from the next GPU on, `distributed` is
measured in place of `ipc`, and the baseline copies from GPU to GPU. `ipc` is the transport `tensor`
on shared GPUs.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlpipe.actors.engines.engine import EngineActor
from rlpipe.actors.engines.files_sync import FilesSync
from rlpipe.actors.engines.fleet import Receivers
from rlpipe.actors.specs import ClusterSpec
from rlpipe.config.train import SyncConfig
from rlpipe.errors import ResourceError, SyncError
from rlpipe.types import WeightVersion
from tools.bench.bench import Bench
from tools.bench.measures import Row, alternate, figure
from tools.bench.serving import Serving, serving
from tools.bench.shapes import trained_batch
from tools.bench.sync_side import RankProcess, RankSetup
from tools.command.bench_options import TRANSPORTS

ENGINE = {"disable_cuda_graph": True}
SHARED_MEMORY = {"mem_fraction_static": 0.2}
"""Share of a GPU on which the trainer is, too."""
TRAINED_SAMPLES = 2
"""Samples trained between two pushes. Few, so the largest model fits next to the engines."""


@dataclass(frozen=True)
class Pushed:
    """Time, bytes and steps of one push."""

    seconds: float
    paused_s: float
    sent_bytes: int
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds of each step, as in `PushReport.steps`."""


class Pushes:
    """Pushes from a trainer to engines."""

    def __init__(
        self, bench: Bench, up: Serving, trainer: RankProcess, folder: Path, gpu: int | None
    ) -> None:
        """`gpu`: GPU of the first engine if it is not the trainer's; else None."""
        self.bench = bench
        self.up = up
        self.trainer = trainer
        self.folder = folder
        self.gpu = gpu
        self._version = 0

    def push(self, name: str) -> Pushed:
        """Take an optimizer step and push the weights."""
        held = self.trainer.ask("optimize")
        self._version += 1
        stamp = WeightVersion(branch="bench", version=self._version, digest=name).stamp()
        sync = SyncConfig.model_validate(
            {
                **self.bench.config.sync.model_dump(),
                "transport": "tensor" if name == "ipc" else name,
            }
        )
        started_s = time.perf_counter()
        if sync.through_files:
            sent = asyncio.run(self._through_files(held, stamp, sync))
        else:
            sent = self._straight(held, stamp, sync, shared=name == "ipc")
        seconds = time.perf_counter() - started_s
        if sent["unknown"]:
            raise SyncError(
                "not all engines took the weights",
                where=f"bench sync: {name}",
                found=sent["unknown"],
            )
        return Pushed(seconds, sent["paused_s"], sent["bytes"], sent["steps"])

    def copy(self, size_bytes: int) -> Pushed:
        """Copy as many bytes: the baseline."""
        return Pushed(self.trainer.ask("copy", size_bytes=size_bytes, to=self.gpu), 0.0, size_bytes)

    def _straight(self, held: str, stamp: str, sync: SyncConfig, *, shared: bool) -> dict[str, Any]:
        urls = list(self.up.engines)
        shared_ranks = {url: [0] for url in urls} if shared else None
        return self.trainer.ask(
            "push", held=held, engines=urls, stamp=stamp, sync=sync, shared_ranks=shared_ranks
        )

    async def _through_files(self, held: str, stamp: str, sync: SyncConfig) -> dict[str, Any]:
        config = self.bench.config.model_copy(update={"sync": sync})
        spec = ClusterSpec(
            config, str(self.folder), str(self.bench.model_dir), str(self.folder / "store")
        )
        weights: Any = _Named(held, stamp)
        engines: Any = [_Machine(url) for url in self.up.engines]

        @asynccontextmanager
        async def trainer() -> AsyncIterator[Any]:
            yield _Group(self.trainer)

        async def begin_push(urls: Sequence[str]) -> list[str]:
            return list(urls)

        async def end_push(unknown: Mapping[str, str]) -> None: ...

        to = Receivers(lambda: list(self.up.engines), begin_push, end_push, idle=True)
        sent = await FilesSync(spec, "bench").send(
            weights, to, engines, trainer=trainer, loading=nullcontext
        )
        assert sent is not None
        return sent


@dataclass(frozen=True)
class _Named:
    """The part of `fleet.Weights` that a push uses."""

    digest: str
    stamp: str


@dataclass(frozen=True)
class _Machine:
    """The part of `SupervisedEngine` that a push uses; its machine is this one."""

    url: str

    async def fetch_weights(self, root: str, stamp: str, folder: str, deadline_s: float) -> str:
        return await asyncio.to_thread(
            EngineActor(0, str(Path.cwd())).fetch_weights, root, stamp, folder, deadline_s
        )


class _Group:
    """The part of `TrainerGroup` that a push uses, for one rank."""

    def __init__(self, rank: RankProcess) -> None:
        self._rank = rank

    async def call(self, method: str, *, deadline_s: float, **keywords: Any) -> list[Any]:
        return [await asyncio.to_thread(self._rank.ask, method, **keywords)]


def measure(bench: Bench, *, separate: bool = False, only: Sequence[str] = ()) -> list[Row]:
    """Return the rows of `sync`.

    `separate`: engines on other GPUs than the trainer. `only`: transports to measure.

    Raises: ResourceError if there are too few GPUs.
    """
    bench.ensure_model()
    say = bench.progress("sync")
    folder = bench.home / "sync"
    shutil.rmtree(folder, ignore_errors=True)
    gpu = 1 if separate and bench.on_gpus else None
    if gpu and torch.cuda.device_count() <= bench.config.resources.rollout_num_gpus:
        raise ResourceError(
            "too few GPUs for engines of their own",
            where="bench sync",
            found=torch.cuda.device_count(),
        )
    batch = trained_batch(bench.shape).select(range(TRAINED_SAMPLES))
    setup = RankSetup(str(bench.model_dir), str(folder), bench.config_of_shape, batch)
    # A share of the memory that is free when engines start, so engines start before the trainer.
    more = SHARED_MEMORY if bench.on_gpus and gpu is None else {}
    with ExitStack() as stack:
        early = None if more else stack.enter_context(RankProcess(setup))
        up = stack.enter_context(serving(bench, say, more=ENGINE, over=more, first_gpu=gpu or 0))
        trainer = early or stack.enter_context(RankProcess(setup))
        return _rows(bench, Pushes(bench, up, trainer, folder, gpu), only, say)


def transports(*, on_gpus: bool, shared: bool) -> list[str]:
    """Return the transports that can be measured.

    NCCL does not join two processes on one GPU, and memory handles do not reach another GPU. A CPU
    supports all of them.
    """
    left_out = ("distributed" if shared else "ipc") if on_gpus else None
    return [name for name in TRANSPORTS if name != left_out]


def _rows(bench: Bench, pushes: Pushes, only: Sequence[str], say) -> list[Row]:
    rows: list[Row] = []
    for name in transports(on_gpus=bench.on_gpus, shared=pushes.gpu is None):
        if only and name not in only:
            continue
        first = pushes.push(name)
        size = f"{first.sent_bytes / 1e9:.3g} GB"
        say(f"{name}, first push, not counted: {first.seconds:.2f} s, {size}")
        sides = {name: partial(pushes.push, name), "copy": partial(pushes.copy, first.sent_bytes)}
        found = alternate(sides, repeats=bench.repeats, until_s=bench.until_s(), say=say)
        rows += of_transport(bench, name, found[name], found["copy"], gpu=pushes.gpu)
    exports = tuple(pushes.trainer.ask("export") for _ in range(bench.repeats))
    return [*rows, Row("sync", "export", "s", exports, note="of all weights, measured alone")]


def of_transport(
    bench: Bench,
    name: str,
    found: Sequence[Pushed],
    copies: Sequence[Pushed],
    *,
    gpu: int | None = None,
) -> list[Row]:
    """Return the rows of one transport. A copy is of all weights, to another `gpu` if given."""
    whole = copies[0].sent_bytes
    against = "copy on the device" if gpu is None else f"copy to GPU {gpu}"
    rates, best = (tuple(whole / 1e9 / one.seconds for one in some) for some in (found, copies))
    shares = tuple(one.sent_bytes / whole for one in found)
    rows = [
        Row(
            "sync",
            f"{name}: push",
            "s",
            tuple(one.seconds for one in found),
            note=f"{bench.name}, {whole / 1e9:.3g} GB",
        ),
        Row(
            "sync",
            f"{name}: paused",
            "s",
            tuple(one.paused_s for one in found),
            note=by_step(found),
        ),
        Row("sync", f"{name}: rate", "GB/s", rates, best, against),
    ]
    sent = Row(
        "sync",
        f"{name}: share",
        "%",
        tuple(100 * share for share in shares),
        note="of all weights, after one step",
    )
    return [*rows, sent] if min(shares) < 1 else rows


def by_step(found: Sequence[Pushed]) -> str:
    """Return the median of each step that takes a millisecond or more, the longest first."""
    medians = {
        step: 1000 * statistics.median(one.steps.get(step, 0.0) for one in found)
        for step in found[0].steps
    }
    if not medians:
        return ""
    longest = sorted(medians.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{step} {figure(spent)}" for step, spent in longest if spent >= 1)
    return f"ms by step: {shown}"
