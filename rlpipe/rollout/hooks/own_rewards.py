"""Score samples that name a reward function of their own: `sample.custom_rm_path`, as in slime.

A generate function, a sample hook or a rollout function may set it to `path/to/file.py:function` or
`module.function`. The function has any of the forms of `rlpipe.rewards.custom`. It is called while
the rollout runs, under the deadline, the attempts and the workers of `reward`, and its reward
stands: the reward stage scores only samples without one. The path is kept in the row's metadata.
What the function raises makes its sample a failed row, unless `reward.on_error` is a number.

The path is not known before the rollout, so the function's source is no part of a stage's digest.
It is loaded when the first sample names it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from rlpipe.config.data import PythonReward, RewardConfig
from rlpipe.errors import RlpipeError
from rlpipe.rewards.base import SCORED, RewardRow, score
from rlpipe.types import Sample, Status

KEPT_AS = "custom_rm_path"
"""Entry of a row's metadata that names the function that scored it."""


async def score_by_own_functions(
    samples: Sequence[Sample], reward: RewardConfig, args: Namespace
) -> None:
    """Set the rewards of finished samples that name a function and have no reward yet. `args` is
    for slime's form of one."""
    paths = {sample.custom_rm_path for sample in samples if sample.custom_rm_path}
    for path in sorted(paths):
        own = [
            s
            for s in samples
            if s.custom_rm_path == path and s.reward is None and s.status in SCORED
        ]
        rows = await _scored(own, path, reward, args)
        for sample, row in zip(own, rows, strict=True):
            _take(sample, row, path)


async def _scored(
    samples: Sequence[Sample], path: str, reward: RewardConfig, args: Namespace
) -> list[RewardRow]:
    function = PythonReward(
        type="python", path=path, reward_key=getattr(reward.function, "reward_key", None)
    )
    config = reward.model_copy(update={"function": function, "max_error_fraction": 1.0})
    try:
        return await score(samples, config, args=args)
    except RlpipeError as error:
        return [RewardRow(sample.group_id, sample.index, error=str(error)) for sample in samples]


def _take(sample: Sample, row: RewardRow, path: str) -> None:
    sample.metadata = {**sample.metadata, KEPT_AS: path}
    if row.reward is None:
        sample.status = Status.FAILED
        sample.error = f"{path} on {sample.group_id}/{sample.index}: {row.error}"
        return
    sample.reward, sample.reward_parts = row.reward, dict(row.parts)
    if row.error is not None:
        sample.metadata["custom_rm_error"] = row.error
