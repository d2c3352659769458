"""`train`: the Megatron engine against a plain loop of transformers and torch, on the same samples.

    tokens/s     real tokens of the batch / seconds; padding is not counted
    MFU          model FLOPs of an optimizer step / seconds / the device's peak; `Shape.forward_flops` × 3 says which FLOPs
    peak memory  largest torch allocation of the step or of scoring, in GiB (without CUDA the process's largest resident size)

Each side is a process of its own, so that one's memory is not the other's. Where both fit on the
GPU they take turns step by step; else each runs its steps alone, one side after the other. `score`
is what the advantage stage asks for: log-probs of the batch without gradients. `step` is one
optimizer step over all of it; of ours the state digest, that every train stage ends with, is timed
and reported by itself.

Not here: the sides (`megatron_side`, `hf_side`).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlpipe.batch.packing import BatchColumns
from rlpipe.config.run import RunConfig
from rlpipe.errors import ResourceError
from tools.bench.bench import Bench
from tools.bench.measures import Row, alternate
from tools.bench.shapes import trained_batch

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16, by what the device's name holds."""
BASELINES = {
    "hf": {"recompute": True, "master": False},
    "hf-no-recompute": {"recompute": False, "master": False},
    "hf-fp32-weights": {"recompute": True, "master": True},
}
"""The plain loop's settings. `recompute`: gradient checkpointing. `master`: float32 weights under
bfloat16 autocast, as trainers for mixed precision have it; else weights, gradients and moments are
bfloat16."""
OURS = "rlpipe"
TIMEOUT_S = 900.0
ENDING_S = 20.0


@dataclass(frozen=True)
class Task:
    """What a side is to train. Picklable."""

    model_dir: str
    config: RunConfig
    batch: BatchColumns
    baseline: str | None = None
    """None: ours."""


@dataclass(frozen=True)
class Turn:
    """One scoring and one optimizer step."""

    score_s: float
    step_s: float
    digest_s: float
    score_gib: float
    step_gib: float
    grad_norm: float
    """Before clipping. The same number on both sides, turn by turn: they train alike."""


class Side:
    """The process of one side: `start`, `warm`, any number of `turn`, `stop`."""

    def __init__(self, name: str, task: Task) -> None:
        self.name = name
        self.task = task
        self._process: Any = None
        self._pipe: Any = None

    def turn(self) -> Turn:
        """Raises: ResourceError if the process ended, which running out of memory makes it do."""
        self._pipe.send("turn")
        return self._answer()

    def start(self) -> None:
        """Begin to load the model, and to take a turn that is not counted."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.task), daemon=True)
        self._process.start()
        theirs.close()

    def warm(self) -> None:
        """Wait until that is done. Raises: as `turn`."""
        self._answer()

    def stop(self) -> None:
        """End it. Twice is once."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(ENDING_S)
            self._process.kill()
            self._process = None

    def _answer(self) -> Any:
        try:
            if self._pipe.poll(TIMEOUT_S):
                return self._pipe.recv()
        except EOFError:
            pass
        self.stop()
        raise ResourceError(
            "a side of the comparison ended",
            where=f"bench train: {self.name}",
            do="read what it wrote above",
        )


def serve(pipe: Any, task: Task) -> None:
    """The process: a turn for every message, until nobody is there any more.

    On a GPU the other side gets the memory that is free between turns; so that none of it is asked
    for while the clock runs, each turn is taken twice and the second counts.
    """
    if task.baseline is None:
        from tools.bench.megatron_side import MegatronSide as Runner
    else:
        from tools.bench.hf_side import PlainLoop as Runner
    runner = Runner(task)
    runner.turn()
    pipe.send("ready")
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        if torch.cuda.is_available():
            runner.turn()
        pipe.send(runner.turn())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(bench: Bench, baselines: Sequence[str] = ("hf",), *, ragged: bool = False) -> list[Row]:
    """The rows of `train`."""
    bench.have_model()
    say = bench.says("train")
    batch = trained_batch(bench.shape, ragged=ragged)
    say(
        f"{len(batch)} samples, {len(batch.tokens)} tokens in micro-batches of {bench.config.train.max_tokens_per_gpu}"
    )
    tasks = {OURS: None, **{name: name for name in baselines}}
    sides = {
        name: Side(name, Task(str(bench.model_dir), bench.config, batch, other))
        for name, other in tasks.items()
    }
    try:
        found = (
            _together(bench, sides, say) if bench.shape.together else _one_by_one(bench, sides, say)
        )
    finally:
        for side in sides.values():
            side.stop()
    return [
        row
        for name in baselines
        for row in compared(bench, batch, found[OURS], found.get(name, []), name, ragged)
    ]


def _together(bench: Bench, sides: dict[str, Side], say) -> dict[str, list[Turn]]:
    for side in sides.values():
        side.start()
    for name, side in sides.items():
        side.warm()
        say(f"{name} is warm")
    return alternate(
        {name: side.turn for name, side in sides.items()},
        repeats=bench.repeats,
        until_s=bench.until_s(),
        say=say,
    )


def _one_by_one(bench: Bench, sides: dict[str, Side], say) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = {}
    for name, side in sides.items():
        try:
            side.start()
            side.warm()
            say(f"{name} is warm")
            found |= alternate(
                {name: side.turn}, repeats=bench.repeats, until_s=bench.until_s(), say=say
            )
        except ResourceError as error:
            if name == OURS:
                raise
            say(f"{name} is left out: {error}")
        side.stop()
    return found


def compared(
    bench: Bench,
    batch: BatchColumns,
    ours: Sequence[Turn],
    other: Sequence[Turn],
    name: str,
    ragged: bool,
) -> list[Row]:
    """Rows of two sides' turns."""
    tokens = len(batch.tokens)
    flops = bench.shape.forward_flops(batch.lengths, batch.response_lengths)
    note = f"{bench.name}, {len(batch)} samples of {'up to ' if ragged else ''}{batch.lengths.max()} tokens"
    peak = peak_flops()

    def row(what: str, unit: str, value, note: str = "") -> Row:
        return Row(
            "train", what, unit, tuple(map(value, ours)), tuple(map(value, other)), name, note
        )

    rows = [
        row("optimizer step", "tokens/s", lambda turn: tokens / turn.step_s, note),
        row("step memory", "GiB", lambda turn: turn.step_gib),
        row("scoring", "tokens/s", lambda turn: tokens / turn.score_s),
        row("scoring memory", "GiB", lambda turn: turn.score_gib),
    ]
    if peak:
        rows.insert(
            1,
            row(
                "optimizer step",
                "% MFU",
                lambda turn: 300 * flops / turn.step_s / peak,
                f"of {peak / 1e12:.0f} TFLOP/s",
            ),
        )
    digest = tuple(turn.digest_s for turn in ours)
    return [
        *rows,
        Row(
            "train", "state digest", "s", digest, note="of all weights and moments, after the steps"
        ),
    ]


def peak_flops() -> float | None:
    """Of this machine's GPU, where it is known."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
