"""Compute from a run's trace which share of the time each stage took, and which share none.

The time of an iteration runs from the end of the previous iteration to its own end, so the time
between two iterations counts for the later one. Iterations with an evaluation are left out. For
overlapping iterations (`async_buffer_size` > 0) the shares cover the whole stretch of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlpipe.errors import DataError
from rlpipe.observe.trace import Work

ON_GPUS = frozenset({"rollout", "advantage", "train", "sync", "eval"})
"""Stages that use the GPUs. A reward model has its own GPUs; a checkpoint is mostly a commit."""
Span = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """Times of consecutive iterations."""

    iterations: tuple[int, ...]
    seconds: tuple[float, ...]
    """Seconds of each iteration; empty if they overlap."""
    by_stage: dict[str, tuple[float, ...]]
    """Stage → seconds in each iteration."""
    in_no_stage: float
    """Orchestration: share of the time in which no stage ran."""
    off_gpus: float
    """Share of the time in which no stage of ON_GPUS ran."""
    per_iteration_s: float
    """Total time divided by the number of iterations."""
    span: Span
    """Start of the first iteration and end of the last."""


def shares(found: Sequence[Work], *, skipped: int = 0) -> Shares:
    """Return the shares of the committed iterations.

    An iteration is committed once its checkpoint stage has ended. Left out are the first `skipped`
    iterations, the very first (its start is unknown), the last (it saves the run) and those with an
    evaluation. Raises: DataError if no iteration is left.
    """
    ends = {
        work.iteration: work.end
        for work in found
        if work.iteration is not None and work.stage == "checkpoint"
    }
    order = sorted(ends)
    span_of = {k: (ends[before], ends[k]) for before, k in pairwise(order)}
    evaluations = [(work.begin, work.end) for work in found if work.stage == "eval"]
    chosen = tuple(k for k in order[max(1, skipped) : -1] if not covered(evaluations, span_of[k]))
    if not chosen:
        expected = f"one besides the first {max(1, skipped)}, the last and those with an evaluation"
        raise DataError(
            "too few iterations",
            where="trace.jsonl",
            found=f"{len(order)} that were committed",
            expected=expected,
        )
    stages = [work for work in found if work.iteration in chosen and work.stage != "eval"]
    by_stage = {
        stage: tuple(
            sum(w.end - w.begin for w in stages if (w.stage, w.iteration) == (stage, k))
            for k in chosen
        )
        for stage in dict.fromkeys(work.stage for work in stages)
    }
    overlapping = any(
        a.end > b.begin for a in stages for b in stages if (a.iteration or 0) < (b.iteration or 0)
    )
    spans = (
        [(span_of[chosen[0]][0], ends[chosen[-1]])] if overlapping else [span_of[k] for k in chosen]
    )
    total = sum(end - begin for begin, end in spans)
    busy = [
        [(work.begin, work.end) for work in found if some(work.stage)]
        for some in (lambda _: True, ON_GPUS.__contains__)
    ]
    at_work = [sum(covered(intervals, span) for span in spans) for intervals in busy]
    return Shares(
        chosen,
        () if overlapping else tuple(end - begin for begin, end in spans),
        by_stage,
        1 - at_work[0] / total,
        1 - at_work[1] / total,
        total / (chosen[-1] - chosen[0] + 1 if overlapping else len(chosen)),
        (span_of[chosen[0]][0], ends[chosen[-1]]),
    )


def covered(intervals: Iterable[Span], span: Span) -> float:
    """Return the seconds of `span` that at least one interval covers."""
    total = 0.0
    reached = span[0]
    for begin, end in sorted(intervals):
        begin = max(begin, reached)
        end = min(end, span[1])
        if end > begin:
            total = total + end - begin
            reached = end
    return total
