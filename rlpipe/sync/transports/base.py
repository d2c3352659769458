"""The report of a push, which every weight transport gives."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PushReport:
    """A push that arrived somewhere."""

    stamp: str
    engines: tuple[str, ...]
    """Those that hold all of the new weights, and sample."""
    unknown: dict[str, str]
    """Address → why, of those that are left paused: keep them off the router until they are
    replaced or a push succeeds."""
    tensors: int
    size_bytes: int
    buckets: int
    seconds: float
    paused_s: float = 0.0
    """Of those, how long engines sampled nothing."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds by what was done: `tensors` is waiting for the next bucket to be gathered and packed,
    `bucket` engines loading."""
