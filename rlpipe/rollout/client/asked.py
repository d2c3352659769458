"""What one caller asks of the engines, and which of them may share a request.

Not here: the requests (`client`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlpipe.rollout.client.streaming import Watch
from rlpipe.rollout.generation import Generation
from rlpipe.store.routed_experts import num_rows

Together = tuple[str, str | None, int | None]
"""Sampling parameters as JSON, routing key, first token whose experts are wanted: what is equal in
all may share a request."""


class Key(NamedTuple):
    """How a response is sampled."""

    sampling: dict[str, Any]
    routing: str | None
    routed_from: int | None

    def after(self, begun: Generation) -> Key:
        """What to ask with once there is that much of a response."""
        rest = {
            **self.sampling,
            "max_new_tokens": self.sampling["max_new_tokens"] - len(begun.response_ids),
        }
        known = (
            None if self.routed_from is None else self.routed_from + num_rows(begun.routed_experts)
        )
        return Key(rest, self.routing, known)


@dataclass(slots=True)
class Asked:
    """`n` responses to one prompt, and who waits for them. `watch`: the one response is told of
    while it is sampled."""

    prompt_ids: list[int]
    n: int
    where: str
    stop: asyncio.Event | None
    answer: asyncio.Future[list[Generation]]
    watch: Watch | None = None

    @property
    def stopped(self) -> bool:
        """Does nobody want more of it?"""
        return self.stop is not None and self.stop.is_set()


def fail(batch: Sequence[Asked], error: Exception) -> None:
    """Tell all who still wait."""
    for asked in batch:
        if not asked.answer.done():
            asked.answer.set_exception(error)
