"""Apply the user's post-processing of rewards: `reward.custom_reward_post_process_path`.

The signature is slime's: `post_process(args, samples) -> (raw_rewards, rewards)`, two lists in the
order of the samples. The samples are all scored samples of an iteration. Advantages are estimated
from `rewards`; `raw_rewards` become the reward part `raw_reward`.

In slime the function replaces the normalisation by group. A slime command line with this flag
therefore sets `advantage.rewards_normalization` to false. A recipe sets both keys explicitly.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from rlpipe.config.hooks import load_hook
from rlpipe.errors import RewardError
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.types import Sample

RAW_REWARD_PART = "raw_reward"


def post_process(
    path: str, args: Namespace, samples: Sequence[Sample], rows: Sequence[RewardRow]
) -> list[RewardRow]:
    """Return the rows with the rewards of the user's function.

    The function gets only samples that have a reward. Other rows are returned unchanged.

    Raises: RewardError if the function raises, or does not return two lists with one finite number
    per sample.
    """
    positions = [position for position, row in enumerate(rows) if row.reward is not None]
    # Copies: the function can change its samples without changing stored rows.
    scored = [
        replace(samples[at], reward=rows[at].reward, reward_parts=dict(rows[at].parts))
        for at in positions
    ]
    if not scored:
        return list(rows)
    function = load_hook(path)
    try:
        raw_rewards, rewards = (list(map(float, part)) for part in function(args, scored))
    except Exception as error:  # a hook can raise anything; the stage fails with it
        raise RewardError(
            "post-processing of rewards failed",
            where=path,
            found=f"{type(error).__name__}: {error}",
        ) from error
    _check_numbers(path, raw_rewards, rewards, len(scored))
    result = list(rows)
    for at, raw_reward, reward in zip(positions, raw_rewards, rewards, strict=True):
        parts = {**rows[at].parts, RAW_REWARD_PART: raw_reward}
        result[at] = replace(rows[at], reward=reward, parts=parts)
    return result


def _check_numbers(path: str, raw_rewards: list[float], rewards: list[float], count: int) -> None:
    num_infinite = sum(not math.isfinite(number) for number in (*raw_rewards, *rewards))
    if len(raw_rewards) != count or len(rewards) != count:
        found = f"{len(raw_rewards)} and {len(rewards)} numbers"
    elif num_infinite:
        found = f"{num_infinite} numbers that are not finite"
    else:
        return
    raise RewardError(
        "the post-processing function did not return (raw_rewards, rewards)",
        where=path,
        found=found,
        expected=f"two lists of {count} finite numbers",
    )
