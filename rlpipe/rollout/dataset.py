"""Supervised rows: the response is given, nothing is sampled and no engine is asked. A generate
function like `SingleTurn`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlpipe.errors import DataError
from rlpipe.rollout.generate import Decode, planned_sample
from rlpipe.types import PlannedGroup, Sample, Status


class Given:
    """The generate function of `rollout.type: dataset`. `decode` turns response ids into text."""

    def __init__(self, *, decode: Decode) -> None:
        self.decode = decode

    async def __call__(self, group: PlannedGroup, so_far: Sequence[Sample] = ()) -> list[Sample]:
        """One completed sample per seed, with the planned response and loss mask, and no
        log-probabilities.

        Raises: DataError if the plan gives no response, or a loss mask of another length.
        """
        if not group.response_ids or len(group.loss_mask) not in (0, len(group.response_ids)):
            raise DataError(
                "a supervised row needs a response, and a loss mask of its length",
                where=f"group {group.group_id}",
                found=f"{len(group.response_ids)} response tokens, loss mask of {len(group.loss_mask)}",
            )
        return [self._sample(group, index) for index in range(len(group.seeds))]

    def _sample(self, group: PlannedGroup, index: int) -> Sample:
        sample = planned_sample(group, index)
        sample.response_ids, sample.response = (
            list(group.response_ids),
            self.decode(group.response_ids),
        )
        sample.loss_mask = list(group.loss_mask) or [1] * len(group.response_ids)
        sample.status = Status.COMPLETED
        sample.finish_reason = "stop"
        sample.t_start_s = sample.t_end_s = time.time()
        return sample
