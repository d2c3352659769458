"""The verdict about a finished group: is it fit for the batch, or why not?

`failed` and `aborted` are seen on its samples. With a dynamic sampling filter it is scored first,
by the run's own reward: a verifier's error is the reason `reward_error`, the filter's
`filter_error`. These rewards only serve the filter; the reward stage scores the rows again.

Not here: how many fit groups make a batch (`selection`).
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rlpipe.config.data import RewardConfig
from rlpipe.errors import RewardError
from rlpipe.rewards.base import RewardRow, score
from rlpipe.rollout.filters import Filter
from rlpipe.types import Sample, Status


class Verdict(NamedTuple):
    """Reason None: fit. `error` is the text behind a reason, if it has one."""

    group_id: str
    reason: str | None
    error: str | None = None
    samples: tuple[Sample, ...] = ()
    """The group with its rewards, where it was scored."""
    fallback: bool = False
    """With a reason: the group fills the batch if too few others are fit."""


class Judge:
    """`keep` None accepts every group that was generated; without `reward` nothing is scored.
    `args` are for slime's rewards."""

    def __init__(
        self,
        keep: Filter | None = None,
        reward: RewardConfig | None = None,
        args: Namespace | None = None,
    ) -> None:
        self._keep = keep
        self._args = args
        self._reward = reward.model_copy(update={"max_error_fraction": 1.0}) if reward else None

    def at_once(self, samples: Sequence[Sample]) -> Verdict | None:
        """The verdict that needs no reward, or None."""
        group_id = samples[0].group_id
        statuses = {sample.status for sample in samples}
        if Status.FAILED in statuses:
            return Verdict(
                group_id, "failed", next((sample.error for sample in samples if sample.error), None)
            )
        if statuses & {Status.ABORTED, Status.PENDING}:
            return Verdict(group_id, "aborted")
        return Verdict(group_id, None) if self._keep is None and self._reward is None else None

    async def verdicts(self, groups: Sequence[list[Sample]]) -> list[Verdict]:
        """Score and filter groups that `at_once` could not decide, all in one go. Raises:
        DeadlineExceeded of the scoring."""
        samples = [sample for group in groups for sample in group]
        reward = self._reward
        rows = (
            await score(samples, reward, args=self._args)
            if reward
            else [RewardRow(s.group_id, s.index) for s in samples]
        )
        row_of = {(row.group_id, row.index): row for row in rows}
        of_group = [[row_of[sample.group_id, sample.index] for sample in group] for group in groups]
        return await asyncio.to_thread(
            lambda: [
                self._verdict(group, rows) for group, rows in zip(groups, of_group, strict=True)
            ]
        )

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
