"""The trainer of `sync`: one rank, as the trainer actor has it, in a separate process."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlpipe.actors.trainer.rank_actors import TrainerRank
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import plan
from rlpipe.config.run import RunConfig
from rlpipe.errors import ResourceError, RlpipeError
from rlpipe.system.ports import free_port
from tools.bench.stopwatch import timed

HOST = "127.0.0.1"
TIMEOUT_S = 900.0
ENDING_S = 20.0


@dataclass(frozen=True)
class RankSetup:
    """Settings of the process. Picklable."""

    model_dir: str
    home: str
    config: RunConfig
    batch: BatchColumns


class Rank(TrainerRank):
    """The only rank of a trainer, with the operations of the benchmark."""

    def __init__(self, setup: RankSetup) -> None:
        super().__init__(0, 1, str(Path.cwd()))
        folder = Path(setup.home)
        spec = TrainerSpec.of(
            setup.config,
            model_dir=setup.model_dir,
            store_root=str(folder / "store"),
            work_dir=folder / "work",
        )
        self.setup(spec, (HOST, free_port(HOST)))
        self.initialise("weights 0", None)
        self._trained = setup.batch
        self._steps = 0

    def optimize(self) -> str:
        """Take an optimizer step; return the name of the new state."""
        engine, _ = self._ready()
        packing = plan(
            self._trained.lengths,
            global_batch_size=None,
            max_tokens=engine.max_tokens,
            data_parallel=1,
        )
        engine.train(self._trained, packing)
        self._steps += 1
        self._set_held(f"weights {self._steps}", {})
        return f"weights {self._steps}"

    def export(self) -> float:
        """Return the seconds of gathering every tensor by its Hugging Face name, on the device."""
        engine, _ = self._ready()
        return timed(lambda: sum(tensor.nbytes for _, tensor in engine.named_hf_tensors()))[0]

    def copy(self, size_bytes: int, to: int | None) -> float:
        """Return the seconds of a copy on the device, or to the GPU `to`: the fastest of four."""
        source = torch.empty(
            size_bytes, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu"
        )
        target = source.to(f"cuda:{to}", copy=True) if to is not None else torch.empty_like(source)
        return min(timed(lambda: (target.copy_(source), _settled(to)))[0] for _ in range(4))


def _settled(gpu: int | None) -> None:
    if gpu is not None:
        torch.cuda.synchronize(gpu)


class RankProcess:
    """Call a rank in a separate process, as `TrainerGroup` calls rank actors.

    A context manager, which ends the process.
    """

    def __init__(self, setup: RankSetup) -> None:
        """Start loading; the first call waits for the end of it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=serve, args=(child_pipe, setup), daemon=True)
        self._process.start()
        child_pipe.close()

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, method: str, **keywords: Any) -> Any:
        """Return the result of a method. Raises: its errors; ResourceError if the process ended."""
        try:
            self._pipe.send((method, keywords))
            answer = self._pipe.recv() if self._pipe.poll(TIMEOUT_S) else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            raise ResourceError(
                "the trainer's process ended or hangs",
                where="bench sync",
                do="read its output above",
            )
        if isinstance(answer[0], RlpipeError):
            raise answer[0]
        return answer[0]

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(ENDING_S)
        self._process.kill()


def serve(pipe: Any, setup: RankSetup) -> None:
    """Run methods until the other end closes the pipe. A result is sent as a tuple of one."""
    rank = Rank(setup)
    while True:
        try:
            method, keywords = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(rank, method)(**keywords),))
        except RlpipeError as error:
            pipe.send((error,))
