"""`train`: the Megatron engine against a plain loop of transformers and torch, on the same samples.

    tokens/s     real tokens of the batch / seconds; padding does not count
    MFU          model FLOPs of an optimizer step (`Shape.forward_flops` × 3) / seconds / peak FLOPs
    peak memory  largest torch allocation of a step or of scoring, GiB (CPU: largest resident size)

Each side is a separate process, so their memory is separate. Where both fit on the GPU they
alternate step by step; else one side runs all its steps before the other. `score` computes the
log-probs of the batch without gradients, as the advantage stage does. `step` is one optimizer step
over all of it. The state digest, with which every train stage ends, is timed separately. The sides
are `megatron_side` and `hf_side`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlpipe.batch.columns import BatchColumns
from rlpipe.config.run import RunConfig
from rlpipe.errors import ResourceError
from rlpipe.observe.flops import peak_flops
from tools.bench.bench import Bench
from tools.bench.measures import Row, alternate
from tools.bench.shapes import trained_batch

BASELINES = {
    "hf": {"recompute": True, "master": False},
    "hf-no-recompute": {"recompute": False, "master": False},
    "hf-fp32-weights": {"recompute": True, "master": True},
}
"""Settings of the plain loop. `recompute`: gradient checkpointing. `master`: float32 weights under
bfloat16 autocast, as mixed-precision trainers have; else weights, gradients and moments are
bfloat16."""
OURS = "rlpipe"
TIMEOUT_S = 900.0
ENDING_S = 20.0


@dataclass(frozen=True)
class Task:
    """Work of a side. Picklable."""

    model_dir: str
    config: RunConfig
    batch: BatchColumns
    baseline: str | None = None
    """Name of the baseline; None: ours."""


@dataclass(frozen=True)
class Measurement:
    """Times and memory of one scoring pass and one optimizer step."""

    score_s: float
    step_s: float
    digest_s: float
    score_gib: float
    step_gib: float
    grad_norm: float
    """Norm before clipping. It is equal on both sides, which shows that they train alike."""


class Side:
    """Process of one side: `start`, `warm`, any number of `measure`, `stop`."""

    def __init__(self, name: str, task: Task) -> None:
        self.name = name
        self.task = task
        self._process: Any = None
        self._pipe: Any = None

    def measure(self) -> Measurement:
        """Measure once. Raises: ResourceError if the process ended, for example out of memory."""
        self._pipe.send("measure")
        return self._answer()

    def start(self) -> None:
        """Start loading the model and a first measurement that does not count."""
        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=serve, args=(child_pipe, self.task), daemon=True)
        self._process.start()
        child_pipe.close()

    def warm(self) -> None:
        """Wait for the end of `start`. Raises: as `measure`."""
        self._answer()

    def stop(self) -> None:
        """End the process; a second call does nothing."""
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
            do="read its output above",
        )


def serve(pipe: Any, task: Task) -> None:
    """Measure once for every message until the other end closes the pipe.

    On a GPU the other side uses the memory that is free between measurements. Each measurement runs
    twice and the second counts, so no memory is allocated while the clock runs.
    """
    if task.baseline is None:
        from tools.bench.megatron_side import MegatronSide as Runner
    else:
        from tools.bench.hf_side import PlainLoop as Runner
    runner = Runner(task)
    runner.measure()
    pipe.send("ready")
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        if torch.cuda.is_available():
            runner.measure()
        pipe.send(runner.measure())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(bench: Bench, baselines: Sequence[str] = ("hf",), *, ragged: bool = False) -> list[Row]:
    """Return the rows of `train`."""
    bench.ensure_model()
    say = bench.progress("train")
    batch = trained_batch(bench.shape, ragged=ragged)
    own = bench.trainer_config
    limit = own.train.micro_batch_tokens
    say(f"{len(batch)} samples, {len(batch.tokens)} tokens in micro-batches of {limit}")
    directory = str(bench.model_dir)
    sides = {OURS: Side(OURS, Task(directory, own, batch))}
    for name in baselines:
        sides[name] = Side(name, Task(directory, bench.config_of_shape, batch, name))
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


def _together(bench: Bench, sides: dict[str, Side], say) -> dict[str, list[Measurement]]:
    for side in sides.values():
        side.start()
    for name, side in sides.items():
        side.warm()
        say(f"{name} is warm")
    return alternate(
        {name: side.measure for name, side in sides.items()},
        repeats=bench.repeats,
        until_s=bench.until_s(),
        say=say,
    )


def _one_by_one(bench: Bench, sides: dict[str, Side], say) -> dict[str, list[Measurement]]:
    found: dict[str, list[Measurement]] = {}
    for name, side in sides.items():
        try:
            side.start()
            side.warm()
            say(f"{name} is warm")
            found |= alternate(
                {name: side.measure}, repeats=bench.repeats, until_s=bench.until_s(), say=say
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
    ours: Sequence[Measurement],
    other: Sequence[Measurement],
    name: str,
    ragged: bool,
) -> list[Row]:
    """Return the rows that compare two sides."""
    tokens = len(batch.tokens)
    flops = bench.shape.forward_flops(batch.lengths, batch.response_lengths)
    length = f"{'up to ' if ragged else ''}{batch.lengths.max()} tokens"
    note = f"{bench.name}, {len(batch)} samples of {length}"
    peak = peak_flops(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None

    def row(what: str, unit: str, value, note: str = "") -> Row:
        return Row(
            "train", what, unit, tuple(map(value, ours)), tuple(map(value, other)), name, note
        )

    rows = [
        row("optimizer step", "tokens/s", lambda one: tokens / one.step_s, note),
        row("step memory", "GiB", lambda one: one.step_gib),
        row("scoring", "tokens/s", lambda one: tokens / one.score_s),
        row("scoring memory", "GiB", lambda one: one.score_gib),
    ]
    if peak:
        rows.insert(
            1,
            row(
                "optimizer step",
                "% MFU",
                lambda one: 300 * flops / one.step_s / peak,
                f"of {peak / 1e12:.0f} TFLOP/s",
            ),
        )
    digest = tuple(one.digest_s for one in ours)
    return [
        *rows,
        Row(
            "train", "state digest", "s", digest, note="of all weights and moments, after the steps"
        ),
    ]
