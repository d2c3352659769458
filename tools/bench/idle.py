"""Where a run's time went, from its trace: by stage, in no stage, and with no stage that keeps a
GPU busy.

An iteration's time is from the end of the iteration before to its own end, so what happens between
two iterations counts for the later one; one during which the run evaluated is left out. Iterations
that overlap (`async_buffer_size` > 0) cannot be told apart like that: then all shares are of the
whole stretch that is looked at.

Not here: running anything (`iterations`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlpipe.errors import DataError
from rlpipe.observe.trace import Work

ON_GPUS = frozenset({"rollout", "advantage", "train", "sync", "eval"})
"""Stages that use the GPUs. A reward may too, but then GPUs of its own; a checkpoint mostly is the
commit of its iteration."""
Span = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """Of some iterations that follow each other."""

    iterations: tuple[int, ...]
    seconds: tuple[float, ...]
    """Of each of them; empty where they overlap."""
    by_stage: dict[str, tuple[float, ...]]
    """Stage → its seconds in each of them."""
    in_no_stage: float
    """Orchestration: of all the time, how much no stage was at work."""
    off_gpus: float
    """Of all the time, how much no stage of ON_GPUS was at work."""
    per_iteration_s: float
    """All the time / number of iterations."""
    span: Span
    """From the beginning of the first to the end of the last."""


def shares(found: Sequence[Work], *, skipped: int = 0) -> Shares:
    """Of the iterations that were committed (their checkpoint stage ended), without the first
    `skipped` of them, the very first (nothing says when it began), the last (it saves the run) and
    those with an evaluation. Raises: DataError if none is left."""
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
        expected = f"one beside the first {max(1, skipped)}, the last and those with an evaluation"
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
    """Seconds of `span` in which at least one interval is."""
    total = 0.0
    reached = span[0]
    for begin, end in sorted(intervals):
        begin = max(begin, reached)
        end = min(end, span[1])
        if end > begin:
            total = total + end - begin
            reached = end
    return total
