"""The trainer's side of `sync`: one rank as the actor holds it, in a process of its own, that does
what it is asked by name."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlpipe.actors.trainer.spec import TrainerSpec
from rlpipe.actors.trainer.trainer import TrainerRank
from rlpipe.batch.packing import BatchColumns, plan
from rlpipe.config.run import RunConfig
from rlpipe.errors import ResourceError, RlpipeError
from rlpipe.system.ports import free_port
from tools.bench.stopwatch import timed

HOST = "127.0.0.1"
TIMEOUT_S = 900.0
ENDING_S = 20.0


@dataclass(frozen=True)
class Duty:
    """What the process is made of. Picklable."""

    model_dir: str
    home: str
    config: RunConfig
    batch: BatchColumns


class Rank(TrainerRank):
    """The only rank of a trainer, with what a benchmark asks beside."""

    def __init__(self, duty: Duty) -> None:
        super().__init__(0, 1, str(Path.cwd()))
        folder = Path(duty.home)
        spec = TrainerSpec.of(
            duty.config,
            model_dir=duty.model_dir,
            store_root=str(folder / "store"),
            work_dir=folder / "work",
        )
        self.setup(spec, (HOST, free_port(HOST)))
        self.initialise("weights 0", None)
        self._trained = duty.batch
        self._steps = 0

    def optimize(self) -> str:
        """One optimizer step; the name of the state that is held now."""
        engine, _ = self._ready()
        packing = plan(
            self._trained.lengths,
            global_batch_size=None,
            max_tokens=engine.max_tokens,
            data_parallel=1,
        )
        engine.train(self._trained, packing)
        self._steps += 1
        self._now_holds(f"weights {self._steps}", {})
        return f"weights {self._steps}"

    def export(self) -> float:
        """Seconds until every tensor is there under its Hugging Face name, full and on the
        device."""
        engine, _ = self._ready()
        return timed(lambda: sum(tensor.nbytes for _, tensor in engine.named_hf_tensors()))[0]

    def copy(self, size_bytes: int, to: int | None) -> float:
        """Seconds of a copy of so many bytes on the device, or to another GPU. The fastest of
        three."""
        source = torch.empty(
            size_bytes, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu"
        )
        target = source.to(f"cuda:{to}", copy=True) if to is not None else torch.empty_like(source)
        return min(timed(lambda: (target.copy_(source), _settled(to)))[0] for _ in range(4))


def _settled(gpu: int | None) -> None:
    if gpu is not None:
        torch.cuda.synchronize(gpu)


class RankProcess:
    """Calls a rank in its own process, as `TrainerGroup` calls those in actors. A context manager,
    which ends it."""

    def __init__(self, duty: Duty) -> None:
        """Begins to load; the first call waits for it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, duty), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, method: str, **keywords: Any) -> Any:
        """The answer of a method. Raises: what it raises; ResourceError if the process ended."""
        try:
            self._pipe.send((method, keywords))
            answer = self._pipe.recv() if self._pipe.poll(TIMEOUT_S) else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            raise ResourceError(
                "the trainer's process ended or hangs",
                where="bench sync",
                do="read what it wrote above",
            )
        if isinstance(answer[0], RlpipeError):
            raise answer[0]
        return answer[0]

    def stop(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(ENDING_S)
        self._process.kill()


def serve(pipe: Any, duty: Duty) -> None:
    """The process: method after method, until nobody is there any more. An answer is a tuple of
    one."""
    rank = Rank(duty)
    while True:
        try:
            method, keywords = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(rank, method)(**keywords),))
        except RlpipeError as error:
            pipe.send((error,))
