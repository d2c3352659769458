"""Score samples that name a reward function: `sample.custom_rm_path`, as in slime.

A generate function, a sample hook or a rollout function may set `custom_rm_path` to
`path/to/file.py:function` or `module.function`. The function has any of the forms of
`rlpipe.rewards.user_rewards`. It is called during the rollout, with the deadline, attempts and
workers of `reward`. The reward stage scores only samples without a reward, so this reward stands.
An exception makes the sample a failed row, unless `reward.on_error` is a number. The row's metadata
keep the path.

The path is unknown before the rollout. So the function's source is not part of a stage's digest,
and the function is loaded when the first sample names it.

Entry point: `score_with_sample_functions`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from rlpipe.config.data import PythonReward, RewardConfig
from rlpipe.errors import RlpipeError
from rlpipe.rewards.reward_rows import SCORED, RewardRow, score
from rlpipe.types import Sample, Status

PATH_KEY = "custom_rm_path"
"""Entry of a row's metadata with the path of the function that scored the row."""


async def score_with_sample_functions(
    samples: Sequence[Sample], reward: RewardConfig, args: Namespace
) -> None:
    """Set the rewards of finished samples that name a function and have no reward. `args` are for
    functions in slime's form."""
    paths = {sample.custom_rm_path for sample in samples if sample.custom_rm_path}
    for path in sorted(paths):
        unscored = [
            sample
            for sample in samples
            if sample.custom_rm_path == path and sample.reward is None and sample.status in SCORED
        ]
        rows = await _score(unscored, path, reward, args)
        for sample, row in zip(unscored, rows, strict=True):
            _set_reward(sample, row, path)


async def _score(
    samples: Sequence[Sample], path: str, reward: RewardConfig, args: Namespace
) -> list[RewardRow]:
    reward_key = getattr(reward.function, "reward_key", None)
    function = PythonReward(type="python", path=path, reward_key=reward_key)
    config = reward.model_copy(update={"function": function, "max_error_fraction": 1.0})
    try:
        return await score(samples, config, args=args)
    except RlpipeError as error:
        return [RewardRow(sample.group_id, sample.index, error=str(error)) for sample in samples]


def _set_reward(sample: Sample, row: RewardRow, path: str) -> None:
    sample.metadata = {**sample.metadata, PATH_KEY: path}
    if row.reward is None:
        sample.status = Status.FAILED
        sample.error = f"{path} on {sample.group_id}/{sample.index}: {row.error}"
        return
    sample.reward = row.reward
    sample.reward_parts = dict(row.parts)
    if row.error is not None:
        # `reward.on_error` replaced the reward: keep the reason.
        sample.metadata["custom_rm_error"] = row.error
