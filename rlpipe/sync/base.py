"""What every weight transport does, whatever moves the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PushReport:
    """A push that arrived somewhere."""

    stamp: str
    engines: tuple[str, ...]
    """Those that hold all of the new weights, and sample."""
    unknown: dict[str, str]
    """Address → why, of those that are left paused: keep them off the router until they are replaced or a push succeeds."""
    tensors: int
    size_bytes: int
    buckets: int
    seconds: float
    paused_s: float = 0.0
    """Of those, how long engines sampled nothing."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds by what was done: `tensors` is waiting for the next bucket to be gathered and packed, `bucket` engines loading."""


class Transport(Protocol):
    """Made and used by trainer rank 0, for one push at a time."""

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], engines: Sequence[str], stamp: str) -> PushReport:
        """Replace the weights of every engine (addresses) by `named_tensors` (Hugging Face names), known as `stamp` from then on.

        `named_tensors` is read to its end even if the push fails, because the other ranks take part in producing it.
        Raises: SyncError if it arrived nowhere.
        """
        ...
