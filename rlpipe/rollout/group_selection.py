"""Decide which groups of a rollout make its batch.

A finished group is fit, or is rejected with a reason: `failed` or `aborted` from its samples,
`reward_error` from the run's reward, `filter_error` or the filter's reason from the dynamic
sampling filter. These rewards serve the filter only; the reward stage scores the rows again.

planned ──┬── fit ──────┬── accepted   the first `batch_size`, by time or `in_order` of the plan
          │             └── surplus    the others: they wait in the buffer
          ├── fallback (reason)        accepted if fit groups are too few, else rejected
          ├── rejected (reason)        dropped
          └── undecided                cut off when the batch is full: they wait in the buffer

A fallback is a group for which the filter set `keep_when_insufficient`. A fallback is accepted only
when every planned group is decided and the batch has room. So a fallback avoids another sampling
round and never displaces a fit group. With a pool, planned groups never run out: fallbacks are
accepted once a round of groups (`groups_per_round`) is decided. slime decides about each group at
once, by the number of groups that are still being sampled: it accepts as many groups, but not
always the same ones.

Entry points: `GroupJudge` (verdict about one group), `Selection` (the batch).
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from rlpipe.config.data import RewardConfig
from rlpipe.errors import RewardError
from rlpipe.rewards.reward_rows import RewardRow, StartWorker, score
from rlpipe.rewards.workers import ProcessWorker
from rlpipe.rollout.filters import Filter
from rlpipe.types import Sample, Status


class Verdict(NamedTuple):
    """Verdict about a group. It is fit if `reason` is None."""

    group_id: str
    reason: str | None
    error: str | None = None
    """Error text that belongs to the reason."""
    samples: tuple[Sample, ...] = ()
    """The group with its rewards, if it was scored."""
    fallback: bool = False
    """True if a rejected group may fill a batch for which too few groups are fit."""


class GroupJudge:
    """Score and filter finished groups."""

    def __init__(
        self,
        keep: Filter | None = None,
        reward: RewardConfig | None = None,
        args: Namespace | None = None,
        process: StartWorker = ProcessWorker,
    ) -> None:
        """`keep` None accepts every generated group; `reward` None scores none. `args` are for
        slime's rewards. `process`: as `score`."""
        self._keep = keep
        self._process = process
        self._args = args
        # A verifier's error rejects its group here and never fails the rollout.
        self._reward = reward.model_copy(update={"max_error_fraction": 1.0}) if reward else None

    def at_once(self, samples: Sequence[Sample]) -> Verdict | None:
        """Return the verdict if it needs neither reward nor filter, else None."""
        group_id = samples[0].group_id
        statuses = {sample.status for sample in samples}
        if Status.FAILED in statuses:
            error = next((sample.error for sample in samples if sample.error), None)
            return Verdict(group_id, "failed", error)
        if statuses & {Status.ABORTED, Status.PENDING}:
            return Verdict(group_id, "aborted")
        return Verdict(group_id, None) if self._keep is None and self._reward is None else None

    async def verdicts(self, groups: Sequence[list[Sample]]) -> list[Verdict]:
        """Score and filter the groups for which `at_once` has no verdict, in one batch.

        Raises: DeadlineExceeded of the scoring.
        """
        samples = [sample for group in groups for sample in group]
        if self._reward is not None:
            rows = await score(samples, self._reward, args=self._args, process=self._process)
        else:
            rows = [RewardRow(sample.group_id, sample.index) for sample in samples]
        row_of = {(row.group_id, row.index): row for row in rows}
        rows_of_groups = [
            [row_of[sample.group_id, sample.index] for sample in group] for group in groups
        ]

        def judge_all() -> list[Verdict]:
            pairs = zip(groups, rows_of_groups, strict=True)
            return [self._verdict(group, rows) for group, rows in pairs]

        # The filter is a user's function and may take long: not on the event loop.
        return await asyncio.to_thread(judge_all)

    def _verdict(self, group: list[Sample], rows: list[RewardRow]) -> Verdict:
        group_id = group[0].group_id
        unscored = next((row for row in rows if row.error is not None and row.reward is None), None)
        if unscored is not None:
            return Verdict(group_id, "reward_error", unscored.error)
        scored = [
            replace(sample, reward=row.reward, reward_parts=dict(row.parts))
            for sample, row in zip(group, rows, strict=True)
        ]
        try:
            rejection = self._keep(scored) if self._keep is not None else None
        except RewardError as error:
            return Verdict(group_id, "filter_error", str(error))
        samples = tuple(scored) if self._reward else ()
        if rejection is None:
            return Verdict(group_id, None, samples=samples)
        return Verdict(group_id, rejection.reason, samples=samples, fallback=rejection.fallback)


class Selection:
    """The batch that the verdicts so far determine."""

    def __init__(self, batch_size: int, *, in_order: bool, round_size: int | None = None) -> None:
        """`round_size`: number of verdicts after which fallbacks may fill the batch. None: all
        planned groups need a verdict first."""
        self.batch_size = batch_size
        self.in_order = in_order
        self.round_size = round_size
        self.planned: list[str] = []
        self._rejected: dict[str, str] = {}
        self._fallbacks: dict[str, str] = {}
        self._fit: list[str] = []
        self._with_verdict: set[str] = set()

    def add(self, group_ids: Iterable[str]) -> None:
        """Add planned groups."""
        self.planned.extend(group_ids)

    def decide(self, group_id: str, reason: str | None, *, fallback: bool = False) -> None:
        """Record the verdict about a group. Only the first verdict counts.

        reason: None if the group is fit.
        fallback: the group is rejected only if the batch is full without it.
        """
        if group_id in self._with_verdict:
            return
        self._with_verdict.add(group_id)
        if reason is None:
            self._fit.append(group_id)
        elif fallback:
            self._fallbacks[group_id] = reason
        else:
            self._rejected[group_id] = reason

    @property
    def decided(self) -> bool:
        """True if further verdicts cannot change the batch."""
        undecided = len(self.planned) - len(self._with_verdict)
        # In order of the plan, every group must be finished: timing must not change the batch.
        if self.in_order or not undecided:
            return not undecided
        num_fit = len(self._fit)
        round_is_over = self.round_size is not None and len(self._with_verdict) >= self.round_size
        return num_fit + round_is_over * len(self._fallbacks) >= self.batch_size

    @property
    def full(self) -> bool:
        """True if the batch is decided and has `batch_size` groups."""
        return self.decided and len(self.accepted) >= self.batch_size

    @property
    def accepted(self) -> tuple[str, ...]:
        """Groups of the batch so far, in the order of the plan."""
        fit = self._ordered(self._fit) if self.in_order else self._fit
        return tuple(self._ordered([*fit[: self.batch_size], *self.fallbacks]))

    @property
    def fallbacks(self) -> dict[str, str]:
        """Accepted groups that the filter rejected, with its reason: the first decided ones, or
        with `in_order` the first planned ones."""
        free = self.batch_size - len(self._fit)
        if free <= 0 or not self.decided:
            return {}
        group_ids = self._ordered(self._fallbacks) if self.in_order else list(self._fallbacks)
        return {group_id: self._fallbacks[group_id] for group_id in group_ids[:free]}

    @property
    def rejected(self) -> dict[str, str]:
        """Reason by group id."""
        used = self.fallbacks
        unused = {key: reason for key, reason in self._fallbacks.items() if key not in used}
        return self._rejected | unused

    def reasons(self) -> str:
        """Return the number of groups per reason, as text."""
        counts = Counter([*self._rejected.values(), *self._fallbacks.values()])
        parts = [f"{number} {reason}" for reason, number in sorted(counts.items())]
        return ", ".join(parts) or "none"

    def _ordered(self, group_ids: Iterable[str]) -> list[str]:
        wanted = set(group_ids)
        return [group_id for group_id in self.planned if group_id in wanted]
