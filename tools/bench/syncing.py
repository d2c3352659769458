"""`sync`: a push of weights by each transport, against a copy of the same bytes on the device.

A trainer rank and the engines are started as a run starts them, without Ray between: the rank takes
an optimizer step (learning rate 1e-6), then its weights are pushed; so it goes, push and copy in
turns, for one transport after another.

    push     seconds from asking the trainer to the last engine that samples again, export of the weights included
    paused   seconds between telling the engines to pause and all of them sampling again. No request is in flight: one that is
             costs about a second more, until the engine has aborted it. Its note says what the
             push's time went to, step by step: `tensors` is waiting for them to be gathered and
             packed, `bucket` engines receiving and loading
    GB/s     bytes of all weights / seconds of the push
    share    bytes that were sent / bytes of all weights (less than 1 for changes)
    export   seconds of gathering all weights under their names, which every push does, by itself

By default the engines lie on the trainer's GPU; or from the next one on: then `distributed` is
measured in the place of `ipc`, and the baseline copies from GPU to GPU. `ipc` is transport `tensor`
where GPUs are shared.
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
from tools.bench.sync_side import Duty, RankProcess

TRANSPORTS = ("ipc", "distributed", "tensor", "disk", "delta")
ENGINE = {"disable_cuda_graph": True}
SHARED_MEMORY = {"mem_fraction_static": 0.2}
"""Of a GPU that the trainer is on too."""
TRAINED_SAMPLES = 2
"""Between two pushes: few, so that the largest model's step has room beside the engines."""


@dataclass(frozen=True)
class Pushed:
    """One push."""

    seconds: float
    paused_s: float
    sent_bytes: int
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds, as `PushReport.steps`."""


class Pushes:
    """A trainer, engines, and pushes from one to the others."""

    def __init__(
        self, bench: Bench, up: Serving, trainer: RankProcess, folder: Path, gpu: int | None
    ) -> None:
        """`gpu`: of the first engine, if it is not the trainer's."""
        self.bench = bench
        self.up = up
        self.trainer = trainer
        self.folder = folder
        self.gpu = gpu
        self._version = 0

    def push(self, name: str) -> Pushed:
        """After an optimizer step."""
        held = self.trainer.ask("optimize")
        self._version += 1
        stamp = WeightVersion(branch="bench", version=self._version, digest=name).stamp()
        sync = SyncConfig.model_validate(
            {
                **self.bench.config.sync.model_dump(),
                "transport": "tensor" if name == "ipc" else name,
            }
        )
        begun_s = time.perf_counter()
        if sync.through_files:
            sent = asyncio.run(self._through_files(held, stamp, sync))
        else:
            sent = self._straight(held, stamp, sync, shared=name == "ipc")
        seconds = time.perf_counter() - begun_s
        if sent["unknown"]:
            raise SyncError(
                "not all engines took the weights",
                where=f"bench sync: {name}",
                found=sent["unknown"],
            )
        return Pushed(seconds, sent["paused_s"], sent["bytes"], sent["steps"])

    def copy(self, size_bytes: int) -> Pushed:
        """The baseline."""
        return Pushed(self.trainer.ask("copy", size_bytes=size_bytes, to=self.gpu), 0.0, size_bytes)

    def _straight(self, held: str, stamp: str, sync: SyncConfig, *, shared: bool) -> dict[str, Any]:
        urls = list(self.up.engines)
        places = {url: [0] for url in urls} if shared else None
        return self.trainer.ask(
            "push", held=held, engines=urls, stamp=stamp, sync=sync, places=places
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

        async def begin(urls: Sequence[str]) -> list[str]:
            return list(urls)

        async def end(unknown: Mapping[str, str]) -> None: ...

        to = Receivers(lambda: list(self.up.engines), begin, end, idle=True)
        sent = await FilesSync(spec, "bench").send(
            weights, to, engines, trainer=trainer, held=nullcontext
        )
        assert sent is not None
        return sent


@dataclass(frozen=True)
class _Named:
    """What is asked of `fleet.Weights`."""

    digest: str
    stamp: str


@dataclass(frozen=True)
class _Machine:
    """What is asked of `fleet.KeptEngine`: its machine is ours."""

    url: str

    async def bring(self, root: str, stamp: str, folder: str, deadline_s: float) -> str:
        return await asyncio.to_thread(
            EngineActor(0, str(Path.cwd())).bring, root, stamp, folder, deadline_s
        )


class _Group:
    """What is asked of `TrainerGroup`, of one rank."""

    def __init__(self, rank: RankProcess) -> None:
        self._rank = rank

    async def call(self, method: str, *, deadline_s: float, **keywords: Any) -> list[Any]:
        return [await asyncio.to_thread(self._rank.ask, method, **keywords)]


def measure(bench: Bench, *, separate: bool = False, only: Sequence[str] = ()) -> list[Row]:
    """The rows of `sync`. `separate`: the engines on GPUs of their own. `only`: these transports.
    Raises: ResourceError if there are too few GPUs."""
    bench.have_model()
    say = bench.says("sync")
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
    duty = Duty(str(bench.model_dir), str(folder), bench.config, batch)
    more = (
        SHARED_MEMORY if bench.on_gpus and gpu is None else {}
    )  # of what is free when engines start: they come first
    with ExitStack() as stack:
        early = None if more else stack.enter_context(RankProcess(duty))
        up = stack.enter_context(serving(bench, say, more=ENGINE, over=more, first_gpu=gpu or 0))
        trainer = early or stack.enter_context(RankProcess(duty))
        return _rows(bench, Pushes(bench, up, trainer, folder, gpu), only, say)


def transports(*, on_gpus: bool, shared: bool) -> list[str]:
    """Those that can be measured: NCCL joins no two processes on one GPU, and handles lead to no
    other. A CPU takes all."""
    some = ["ipc", "distributed"] if not on_gpus else ["ipc"] if shared else ["distributed"]
    return [*some, "tensor", "disk", "delta"]


def _rows(bench: Bench, pushes: Pushes, only: Sequence[str], say) -> list[Row]:
    rows: list[Row] = []
    for name in transports(on_gpus=bench.on_gpus, shared=pushes.gpu is None):
        if only and name not in only:
            continue
        first = pushes.push(name)
        say(
            f"{name}, the first push, not counted: {first.seconds:.2f} s, {first.sent_bytes / 1e9:.3g} GB"
        )
        sides = {name: partial(pushes.push, name), "copy": partial(pushes.copy, first.sent_bytes)}
        found = alternate(sides, repeats=bench.repeats, until_s=bench.until_s(), say=say)
        rows += of_transport(bench, name, found[name], found["copy"], gpu=pushes.gpu)
    exports = tuple(pushes.trainer.ask("export") for _ in range(bench.repeats))
    return [*rows, Row("sync", "export", "s", exports, note="of all weights, by itself")]


def of_transport(
    bench: Bench,
    name: str,
    found: Sequence[Pushed],
    copies: Sequence[Pushed],
    *,
    gpu: int | None = None,
) -> list[Row]:
    """Its rows. A copy is of all weights, to another `gpu` if one is given."""
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
    """Where the time of pushes goes: the median of each step that takes a millisecond or more, the
    longest first."""
    medians = {
        step: 1000 * statistics.median(one.steps.get(step, 0.0) for one in found)
        for step in found[0].steps
    }
    longest = sorted(medians.items(), key=lambda item: -item[1])
    return (
        f"ms by step: {', '.join(f'{step} {figure(spent)}' for step, spent in longest if spent >= 1)}"
        if longest
        else ""
    )
