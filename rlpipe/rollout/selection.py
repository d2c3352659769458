"""Which groups of a rollout make its batch: the first that are fit. Counting only; nothing runs here.

planned ──┬── fit ──────┬── accepted   the first `batch_size`: as they became fit, or `in_order` of the plan
          │             └── surplus    the others: they wait in the buffer
          ├── rejected (reason)        dropped
          └── undecided                when it is over: cut off, they wait in the buffer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Selection:
    """The verdicts so far."""

    def __init__(self, batch_size: int, *, in_order: bool) -> None:
        self.batch_size, self.in_order = batch_size, in_order
        self.planned: list[str] = []
        self.rejected: dict[str, str] = {}
        self._fit: list[str] = []
        self._decided: set[str] = set()

    def add(self, group_ids: Iterable[str]) -> None:
        """Groups that are sampled too now."""
        self.planned.extend(group_ids)

    def decide(self, group_id: str, reason: str | None) -> None:
        """The verdict about a group: why it is rejected, or None. The first one counts."""
        if group_id in self._decided:
            return
        self._decided.add(group_id)
        if reason is None:
            self._fit.append(group_id)
        else:
            self.rejected[group_id] = reason

    @property
    def over(self) -> bool:
        """Is there nothing to wait for? In order of the plan, every group is waited for: who came first must not matter."""
        undecided = len(self.planned) - len(self._decided)
        return not undecided or (not self.in_order and len(self._fit) >= self.batch_size)

    @property
    def full(self) -> bool:
        return self.over and len(self._fit) >= self.batch_size

    @property
    def num_fit(self) -> int:
        """Accepted so far."""
        return min(len(self._fit), self.batch_size)

    @property
    def accepted(self) -> tuple[str, ...]:
        """In the order of the plan."""
        fit = self._ordered(self._fit) if self.in_order else self._fit
        return tuple(self._ordered(fit[: self.batch_size]))

    def reasons(self) -> str:
        """How often which reason was given."""
        counts = Counter(self.rejected.values())
        return ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items())) or "none"

    def _ordered(self, group_ids: Iterable[str]) -> list[str]:
        wanted = set(group_ids)
        return [group_id for group_id in self.planned if group_id in wanted]
