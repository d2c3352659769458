"""Which groups of a rollout make its batch: the first that are fit. Counting only; nothing runs
here.

planned ──┬── fit ──────┬── accepted   the first `batch_size`: as they became fit, or `in_order` of the plan
          │             └── surplus    the others: they wait in the buffer
          ├── fallback (reason)        accepted where fit groups are too few for a batch, else rejected
          ├── rejected (reason)        dropped
          └── undecided                when it is over: cut off, they wait in the buffer

A fallback is a group whose filter set `keep_when_insufficient`. It takes a place in the batch only
when every planned group is decided and fit groups leave places free. So it spares a sampling round
and never displaces a fit group. slime decides about each group at once, by how many are still being
sampled; as many groups are accepted there, but not always the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Selection:
    """The verdicts so far."""

    def __init__(self, batch_size: int, *, in_order: bool) -> None:
        self.batch_size = batch_size
        self.in_order = in_order
        self.planned: list[str] = []
        self._rejected: dict[str, str] = {}
        self._fallbacks: dict[str, str] = {}
        self._fit: list[str] = []
        self._decided: set[str] = set()

    def add(self, group_ids: Iterable[str]) -> None:
        """Groups that are sampled too now."""
        self.planned.extend(group_ids)

    def decide(self, group_id: str, reason: str | None, *, fallback: bool = False) -> None:
        """The verdict about a group: why it is rejected, or None. The first one counts.

        `fallback`: the group is rejected only if the batch is full without it.
        """
        if group_id in self._decided:
            return
        self._decided.add(group_id)
        if reason is None:
            self._fit.append(group_id)
        elif fallback:
            self._fallbacks[group_id] = reason
        else:
            self._rejected[group_id] = reason

    @property
    def over(self) -> bool:
        """Is there nothing to wait for? In order of the plan, every group is waited for: who came
        first must not matter."""
        undecided = len(self.planned) - len(self._decided)
        return not undecided or (not self.in_order and len(self._fit) >= self.batch_size)

    @property
    def full(self) -> bool:
        """Is it over, with as many groups as the batch needs?"""
        return self.over and len(self.accepted) >= self.batch_size

    @property
    def accepted(self) -> tuple[str, ...]:
        """The groups of the batch so far, in the order of the plan."""
        fit = self._ordered(self._fit) if self.in_order else self._fit
        return tuple(self._ordered([*fit[: self.batch_size], *self.fallbacks]))

    @property
    def fallbacks(self) -> dict[str, str]:
        """Accepted groups that the filter did not keep, with its reason: the first decided, with
        `in_order` the first planned."""
        free = self.batch_size - len(self._fit)
        if free <= 0 or not self.over:
            return {}
        names = self._ordered(self._fallbacks) if self.in_order else list(self._fallbacks)
        return {group_id: self._fallbacks[group_id] for group_id in names[:free]}

    @property
    def rejected(self) -> dict[str, str]:
        """Group id → reason."""
        used = self.fallbacks
        return self._rejected | {
            key: reason for key, reason in self._fallbacks.items() if key not in used
        }

    def reasons(self) -> str:
        """How often which reason was given."""
        counts = Counter([*self._rejected.values(), *self._fallbacks.values()])
        return (
            ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items())) or "none"
        )

    def _ordered(self, group_ids: Iterable[str]) -> list[str]:
        wanted = set(group_ids)
        return [group_id for group_id in self.planned if group_id in wanted]
