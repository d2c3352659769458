"""`sync`: a push of weights by each transport, against a copy of the same bytes on the device.

A trainer rank and the engines are started as a run starts them, without Ray between: the rank takes an optimizer step (learning
rate 1e-6), then its weights are pushed, transport after transport, round after round.

    push     seconds from asking the trainer to the last engine that samples again, export of the weights included
    paused   seconds in which an engine sampled nothing, by `pauses`
    GB/s     bytes of all weights / seconds of the push
    share    bytes that were sent / bytes of all weights (less than 1 for changes)
    export   seconds of gathering all weights under their names, which every push does, by itself

By default the engines lie on the trainer's GPU. `engine.sglang.base_gpu_id=1` puts them on the next one: then `distributed` is
measured too, and the baseline copies from GPU to GPU.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlpipe.config.train import SyncConfig
from rlpipe.types import WeightVersion
from tools.bench.bench import Bench
from tools.bench.measures import Row, alternate
from tools.bench.pauses import witnessed
from tools.bench.serving import Serving, serving
from tools.bench.shapes import trained_batch
from tools.bench.sync_side import Duty, RankProcess

ENGINE = {"disable_cuda_graph": True}
SHARED_MEMORY = {"mem_fraction_static": 0.2}
"""Of a GPU that the trainer is on too."""


@dataclass(frozen=True)
class Pushed:
    """One push."""

    seconds: float
    paused_s: float
    sent_bytes: int


class Pushes:
    """A trainer, engines, and pushes from one to the others."""

    def __init__(self, bench: Bench, up: Serving, trainer: RankProcess) -> None:
        self.bench, self.up, self.trainer = bench, up, trainer
        self.held, self._version = "weights 0", 0

    @property
    def gpu(self) -> int | None:
        """Of the engines, if it is not the trainer's."""
        first = int(self.bench.config.engine.sglang.get("base_gpu_id", 0))
        return first or None

    def push(self, name: str) -> Pushed:
        """After an optimizer step."""
        self.held = self.trainer.ask("optimize")
        self._version += 1
        stamp = WeightVersion(branch="bench", version=self._version, digest=name).stamp()
        with witnessed(self.up.engines[0]) as witness:
            begun_s = time.perf_counter()
            sent = self._send(name, stamp)
            seconds = time.perf_counter() - begun_s
        return Pushed(seconds, witness.paused_s, sent["bytes"])

    def _send(self, name: str, stamp: str) -> dict[str, Any]:
        transport = "tensor" if name == "ipc" else name
        sync = SyncConfig.model_validate({**self.bench.config.sync.model_dump(), "transport": transport})
        urls = list(self.up.engines)
        places: dict[str, Any] = {"places": {url: [0] for url in urls}} if name == "ipc" else {}
        return self.trainer.ask("push", held=self.held, engines=urls, stamp=stamp, sync=sync, **places)


def measure(bench: Bench) -> list[Row]:
    """The rows of `sync`."""
    bench.have_model()
    say = bench.says("sync")
    folder = bench.home / "sync"
    shutil.rmtree(folder, ignore_errors=True)
    gpu = int(bench.config.engine.sglang.get("base_gpu_id", 0)) or None
    with serving(bench, say, more=ENGINE, over=SHARED_MEMORY if gpu is None else {}) as up:
        trainer = RankProcess(Duty(str(bench.model_dir), str(folder), bench.config, trained_batch(bench.shape)))
        try:
            return _rows(bench, Pushes(bench, up, trainer), say)
        finally:
            trainer.stop()


def transports(*, on_gpus: bool, shared: bool) -> list[str]:
    """Those that can be measured: NCCL joins no two processes on one GPU."""
    if not on_gpus:
        return ["tensor"]
    return ["ipc", "tensor"] if shared else ["tensor"]


def _rows(bench: Bench, pushes: Pushes, say) -> list[Row]:
    names = transports(on_gpus=bench.on_gpus, shared=pushes.gpu is None)
    for name in names:
        say(f"{name}, the first push, not counted: {pushes.push(name).seconds:.2f} s")
    sides = {name: partial(pushes.push, name) for name in names}
    found = alternate(sides, repeats=bench.repeats, until_s=bench.until_s(), say=say)
    exports = tuple(pushes.trainer.ask("export") for _ in range(bench.repeats))
    whole = max(push.sent_bytes for all_of in found.values() for push in all_of)
    copies = tuple(pushes.trainer.ask("copy", size_bytes=whole, to=pushes.gpu) for _ in range(bench.repeats))
    rows = [row for name in names for row in _of_transport(bench, name, found[name], whole, copies, gpu=pushes.gpu)]
    return [*rows, Row("sync", "export", "s", exports, note="of all weights, by itself")]


def _of_transport(
    bench: Bench, name: str, found: list[Pushed], whole: int, copies: tuple[float, ...], *, gpu: int | None
) -> list[Row]:
    against = "copy on the device" if gpu is None else f"copy to GPU {gpu}"
    rates, best = (tuple(whole / 1e9 / seconds for seconds in some) for some in ([push.seconds for push in found], copies))
    shares = tuple(push.sent_bytes / whole for push in found)
    return [
        Row("sync", f"{name}: push", "s", tuple(push.seconds for push in found), note=f"{bench.name}, {whole / 1e9:.3g} GB"),
        Row("sync", f"{name}: paused", "s", tuple(push.paused_s for push in found)),
        Row("sync", f"{name}: rate", "GB/s", rates, best, against),
        *([Row("sync", f"{name}: share", "%", tuple(100 * share for share in shares))] if min(shares) < 1 else []),
    ]
