"""Convert slime's reward flags: `--rm-type`, `--rm-url`, `--custom-rm-path`, `--group-rm`,
`--reward-key`.

A row's `metadata.rm_type` wins over `--rm-type`, as in slime. A custom function wins over both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from rlpipe.config.data import RuleReward
from rlpipe.config.similar_keys import nearest
from rlpipe.errors import ConfigError

RULES = ("math", *get_args(RuleReward.model_fields["type"].annotation), "reasoning_gym")
"""Values of a row's `rm_type`, with or without the prefix `boxed_`."""
FUNCTIONS = {"ifbench": "rlpipe.rewards.ifbench.score"}
"""Reward of slime with checks of a repository that is not a package → function."""
ALTERNATIVES = {
    "opencua_click": "vision models are not supported",
}
"""Reward of slime that is not supported → alternative."""


DISTILLATION = "slime.rollout.on_policy_distillation"
"""slime's module that asks a teacher by a reward function and its post-processing."""
NO_REWARD = "rlpipe.rewards.slime_distillation.no_task_reward"
"""Reward function of a run that only follows a teacher."""
COMPARING = ("math", "dapo", "deepscaler", "f1", "gpqa")
"""Rules that compare a response with its label."""


def reward_function(
    values: Mapping[str, Any], *, where: str = "--rm-type"
) -> dict[str, Any] | None:
    """Return `reward.function` of the flags, or of a held-out set's keys.

    None: no reward is given. Raises: ConfigError.
    """
    path = values.get("custom_rm_path")
    kind = values.get("rm_type")
    reward_key = values.get("reward_key")
    optional_key = {} if reward_key is None else {"reward_key": reward_key}
    if path == f"{DISTILLATION}.reward_func" or follows_teacher_only(values):
        # `teacher.url` asks the teacher; the task has no reward.
        return {"type": "python", "path": NO_REWARD}
    if path is not None:
        return {
            "type": "python",
            "path": path,
            "group": bool(values.get("group_rm")),
            "reward_key": reward_key,
        }
    if kind in FUNCTIONS:
        return {"type": "python", "path": FUNCTIONS[kind], "group": False, "reward_key": None}
    if kind == "remote_rm":
        if not values.get("rm_url"):
            raise ConfigError(
                "the address of the reward server is missing",
                where="--rm-url",
                do="--rm-url http://host:port/path",
            )
        return {"type": "remote", "url": values["rm_url"], "reward_key": reward_key}
    if kind is None:
        has_prompts = "prompt_data" in values or "data_source_path" in values
        if has_prompts and values.get("loss_type") != "sft_loss":
            return {"type": "by_row", **optional_key}
        return None
    check_rule(kind, where)
    return {"type": "by_row", "default": kind, **optional_key}


def follows_teacher_only(values: Mapping[str, Any]) -> bool:
    """True for distillation with a rule that has no labels to compare with, so that it gives 0."""
    rule = (values.get("rm_type") or "").removeprefix("boxed_")
    return bool(
        values.get("use_opd")
        and values.get("custom_rm_path") is None
        and values.get("label_key") is None
        and rule in COMPARING
    )


def check_rule(kind: str, where: str) -> None:
    """Check the name of a reward rule. Raises: ConfigError if it is unknown."""
    plain = kind.removeprefix("boxed_")
    if plain in RULES:
        return
    close = nearest(plain, RULES) or RULES
    raise ConfigError(
        "unknown reward",
        where=where,
        found=kind,
        expected=", ".join(close),
        do=ALTERNATIVES.get(plain),
    )
