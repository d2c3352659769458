"""`reward.custom_reward_post_process_path`: a function of yours that sees all scored samples of an
iteration at once.

It is slime's: `post_process(args, samples) -> (raw_rewards, rewards)`, two lists in the order of
the samples. `rewards` are what the advantages are estimated from, `raw_rewards` become the reward
part `raw_reward`. In slime it stands in the place of the normalisation by group, so a command line
in slime's style turns `advantage.rewards_normalization` off with it; in a recipe both are what you
set them to.

Not here: scoring (`base`).
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlpipe.config.hooks import load_hook
from rlpipe.errors import RewardError
from rlpipe.rewards.base import RewardRow
from rlpipe.types import Sample

RAW = "raw_reward"


def post_process(
    path: str, args: Namespace, samples: Sequence[Sample], rows: Sequence[RewardRow]
) -> list[RewardRow]:
    """The rows with the rewards that the function makes of them. Rows without a reward are not
    shown to it, and stay.

    Raises: RewardError if it raises, or returns anything but two lists of finite numbers, one for
    each sample it was given.
    """
    scored = [position for position, row in enumerate(rows) if row.reward is not None]
    shown = [
        replace(samples[at], reward=rows[at].reward, reward_parts=dict(rows[at].parts))
        for at in scored
    ]
    if not shown:
        return list(rows)
    function = load_hook(path)
    try:
        raw, rewards = (list(map(float, part)) for part in function(args, shown))
    except Exception as error:  # a hook may raise anything; it is the error of the stage
        raise RewardError(
            "the post-processing of rewards failed",
            where=path,
            found=f"{type(error).__name__}: {error}",
        ) from error
    _check(path, raw, rewards, len(shown))
    made = list(rows)
    for at, before, after in zip(scored, raw, rewards, strict=True):
        made[at] = replace(rows[at], reward=after, parts={**rows[at].parts, RAW: before})
    return made


def _check(path: str, raw: list[float], rewards: list[float], count: int) -> None:
    found: Any = None
    if len(raw) != count or len(rewards) != count:
        found = f"{len(raw)} and {len(rewards)} numbers"
    elif bad := [number for number in (*raw, *rewards) if not math.isfinite(number)]:
        found = f"{len(bad)} that are not finite"
    if found:
        raise RewardError(
            "not (raw_rewards, rewards)",
            where=path,
            found=found,
            expected=f"two lists of {count} finite numbers",
        )
