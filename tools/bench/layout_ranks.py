"""The ranks of `layouts`: processes with a GPU each, kept for all layouts, and their work."""

from __future__ import annotations

import multiprocessing
import shutil
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import plan
from rlpipe.config.run import RunConfig
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ResourceError
from rlpipe.system.ports import free_port
from tools.bench.stopwatch import timed

HOST = "127.0.0.1"
ENDING_S = 10.0
COLLECTIVE_S = 300.0
SCHEDULE_STEPS = 1000
BYTES = torch.uint8


@dataclass(frozen=True)
class Work:
    """A layout's work. Picklable."""

    model_dir: str
    config: RunConfig
    train: Mapping[str, Any]
    """Replaces keys of `config.train`."""
    batch: BatchColumns
    passes: int = 2
    """Scoring passes and optimizer steps. The first of them is not timed: kernels load."""
    load: str | None = None
    """Directory of a checkpoint that is loaded in place of the model directory."""
    save: str | None = None
    """Directory for a checkpoint after the steps."""


@dataclass(frozen=True)
class Outcome:
    """The measurements of one rank. Times and memory are of the last pass."""

    score_s: float
    score_gib: float
    step_s: float
    step_gib: float
    scores: np.ndarray
    """[R] log-probs of the response tokens, before the first step."""
    steps: list[dict[str, float]]
    """Metrics of each optimizer step."""
    digest: str
    """Digest of the state at the end, equal on all ranks of a layout."""
    weights: int | None = None
    """Checksum of the exported weights at the start of a load or the end of a save; None: none."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of opening the engine, loading and saving."""


def train_and_score(rank: int, world_size: int, port: int, work: Work) -> Outcome:
    """Load, score, train and save on one rank, together with the others."""
    from rlpipe.engines.megatron.engine import MegatronEngine

    train = TrainConfig.model_validate({**work.config.train.model_dump(), **work.train})
    parts: dict[str, float] = {}
    clock = time.perf_counter()
    engine = MegatronEngine(
        work.model_dir,
        work.config.model,
        train,
        rollout_temperature=work.config.rollout.rollout_temperature,
        total_optimizer_steps=SCHEDULE_STEPS,
        rank=rank,
        world_size=world_size,
        master=(HOST, port),
        threads=1,
        timeout_s=COLLECTIVE_S,
    )
    try:
        parts["open"] = time.perf_counter() - clock
        weights = None
        if work.load is None:
            parts["load"] = timed(engine.load_hf)[0]
        else:
            folder = work.load
            parts["load"] = timed(lambda: engine.load_checkpoint(folder))[0]
            weights = checksum(engine)
        score_s = step_s = score_gib = step_gib = 0.0
        scores = np.zeros(0, np.float32)
        steps: list[dict[str, float]] = []
        packing = plan(
            work.batch.lengths,
            global_batch_size=None,
            max_tokens=engine.max_tokens,
            data_parallel=engine.data_parallel,
        )
        for number in range(work.passes):
            score_s, score_gib, found = timed(lambda: engine.score(work.batch))
            scores = scores if number else found
            _, step_gib, result = timed(lambda: engine.train(work.batch, packing))
            step_s = result.seconds
            steps += result.steps
        digest = engine.state_digest()
        if work.save is not None:
            folder = work.save
            parts["save"] = timed(lambda: engine.save_checkpoint(folder, 1))[0]
            weights = checksum(engine)
        shown = scores if rank == 0 else np.zeros(0, np.float32)
        return Outcome(score_s, score_gib, step_s, step_gib, shown, steps, digest, weights, parts)
    finally:
        engine.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def checksum(engine: Any) -> int:
    """Return a checksum of all exported weights, in the order of their names."""
    sums = {}
    for name, tensor in engine.named_hf_tensors():
        sums[name] = zlib.crc32(tensor.detach().cpu().contiguous().view(BYTES).numpy())
    return zlib.crc32(repr(sorted(sums.items())).encode())


class RankPool:
    """A number of processes that run the same function together. A context manager.

    They end with a failed call, because others may wait for the failed one; the next call starts
    new ones.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> list[Any]:
        """Return function(rank, number, port, *arguments) of each rank.

        Raises: ResourceError with the first error, or if a rank ended or does not answer in time.
        """
        if not self._processes:
            self._start()
        port = free_port(HOST)
        for rank, pipe in enumerate(self._pipes):
            pipe.send((function, (rank, self.number, port, *arguments)))
        answers: dict[int, Any] = {}
        until_s = time.monotonic() + timeout_s
        try:
            while len(answers) < self.number:
                open_pipes = [p for r, p in enumerate(self._pipes) if r not in answers]
                ready = wait(open_pipes, timeout=max(0.0, until_s - time.monotonic()))
                if not ready:
                    raise ResourceError(
                        "ranks do not answer", where="bench layouts", found=f"{timeout_s:.0f} s"
                    )
                for pipe in ready:
                    rank = self._pipes.index(pipe)
                    answers[rank] = self._answer(rank)
        except BaseException:
            self.stop()
            raise
        return [answers[rank] for rank in range(self.number)]

    def stop(self) -> None:
        """End the processes; a second call does nothing."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(ENDING_S)
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(self.number):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _answer(self, rank: int) -> Any:
        try:
            result, error = self._pipes[rank].recv()
        except EOFError:
            result, error = None, "its process ended"
        if error is not None:
            raise ResourceError(
                "a rank failed", where=f"bench layouts, rank {rank}", found=error[-1500:]
            )
        return result


def serve(pipe: Any) -> None:
    """Run functions until the other end closes the pipe. Errors are sent as text."""
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*arguments), None))
        except Exception:  # noqa: BLE001 - the process that asked shows it
            pipe.send((None, traceback.format_exc()))


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def removed(folder: Path) -> Path:
    """Return a folder after its removal."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
