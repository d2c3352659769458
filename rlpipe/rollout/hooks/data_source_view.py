"""`DataSourceView`: the `data_source` of a rollout function, as slime's data source with a buffer.

    get_samples(n)          the next n groups: those of the run's buffer, those that the function
                            made and added, then groups of the plan
    add_samples(groups)     groups that are not for this batch, or that the function made
    get_buffer_length()     number of added groups that `get_samples` returns
    get_metadata(), update_metadata(values)     a dict for the function, kept in the process

A function makes groups itself if a service chooses its prompts, as slime's rollout buffer does.
Samples of such a group have no group id. The group takes the next draw of the plan: its id, its
seeds and its place in the record of draws, but not its prompt. So each draw still has one fate. The
rows have the service's prompt, and its name of the instance as `metadata["instance_id"]`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from rlpipe.errors import HookError
from rlpipe.rollout.hooks.generate_function import rollout_of, session_id
from rlpipe.rollout.planner import unsampled_group
from rlpipe.rollout.rollout_rows import Groups, PlanPart
from rlpipe.types import PlannedGroup, Sample


class DataSourceView:
    """The groups of a plan, part after part. Used from one thread at a time."""

    def __init__(
        self,
        parts: list[PlanPart],
        next_part: Callable[[PlanPart], PlanPart] | None,
        finished: Groups,
        earlier: Groups,
        metadata: dict[str, Any],
    ) -> None:
        """`finished` groups are not handed out; `earlier` groups continue from their tokens."""
        self.parts = parts
        self.handed_out: dict[str, tuple[PlanPart, PlannedGroup]] = {}
        self.added: list[Any] = []
        """Groups for a later rollout."""
        self.made: list[Any] = []
        """Groups that the function made and added, and did not get back yet."""
        self.claimed = False
        """True if the function made a group."""
        self._metadata = metadata
        self._next_part = next_part
        self._earlier = earlier
        self._lock = threading.Lock()
        self._waiting = [
            (part, group)
            for part in parts
            for group in part.plan.groups
            if group.group_id not in finished
        ]

    def get_samples(self, num_samples: int) -> list[Any]:
        """Return the next groups. Raises: HookError if the data source has fewer groups."""
        with self._lock:
            self._require(num_samples - len(self.made))
            return [self._next() for _ in range(num_samples)]

    def add_samples(self, samples: Sequence[Any]) -> None:
        """Keep groups: in the run's buffer, or for `get_samples` if the function made them.

        Raises: HookError if the data source has no draw for a group.
        """
        with self._lock:
            for group in samples:
                (self.made if self._claim(group) else self.added).append(group)

    def claim(self, groups: Sequence[Any]) -> None:
        """Give a draw to each group that the function made and returned. Raises: HookError."""
        with self._lock:
            for group in groups:
                self._claim(group)

    def get_buffer_length(self) -> int:
        """Return the number of added groups that `get_samples` returns."""
        return len(self.made)

    def get_metadata(self) -> dict[str, Any]:
        """Return the function's own values."""
        return self._metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Set values of the function."""
        self._metadata.update(metadata)

    def __len__(self) -> int:
        return len(self._waiting)

    def _next(self) -> Any:
        """Return the next group: a continued one first, as the oldest."""
        is_continued = bool(self._waiting) and self._waiting[0][1].group_id in self._earlier
        if self.made and not is_continued:
            return self.made.pop(0)
        return self._samples(self._draw(0))

    def _draw(self, position: int) -> PlannedGroup:
        part, group = self._waiting.pop(position)
        self.handed_out[group.group_id] = (part, group)
        return group

    def _require(self, number: int) -> None:
        """Plan further draws until this number waits. Raises: HookError."""
        while len(self._waiting) < number:
            if self._next_part is None:
                raise HookError(
                    "the data source has no more groups",
                    where="get_samples",
                    found=f"{number} groups requested",
                    expected=f"at most {len(self._waiting)} more",
                )
            part = self._next_part(self.parts[-1])
            self.parts.append(part)
            self._waiting += [(part, group) for group in part.plan.groups]

    def _claim(self, group: Any) -> bool:
        """Give the next draw to a group that the function made; False for any other group."""
        rollouts = [
            list(part) if isinstance(part, list | tuple) else [part]
            for part in (group if isinstance(group, list | tuple) else [group])
        ]
        samples = [sample for rollout in rollouts for sample in rollout]
        if not samples or any(not isinstance(one, Sample) or one.group_id for one in samples):
            return False
        fresh = self._first_fresh()
        while fresh is None:
            self._require(len(self._waiting) + 1)
            fresh = self._first_fresh()
        planned = self._draw(fresh)
        for number, rollout in enumerate(rollouts):
            for sample in rollout:
                sample.metadata = {"instance_id": sample.index, **(sample.metadata or {})}
                sample.group_id = planned.group_id
                sample.rollout_id = number
        self.claimed = True
        return True

    def _first_fresh(self) -> int | None:
        """Return the position of the first draw without tokens of an earlier rollout."""
        draws = enumerate(self._waiting)
        return next((at for at, (_, one) in draws if one.group_id not in self._earlier), None)

    def _samples(self, group: PlannedGroup) -> list[Sample]:
        samples = self._earlier.get(group.group_id) or unsampled_group(group)
        for sample in samples:
            sample.rollout_id = rollout_of(sample)
            sample.session_id = session_id(group, sample.rollout_id)
        return samples
