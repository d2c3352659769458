"""The reward that slime's flags describe: `--rm-type`, `--rm-url`, `--custom-rm-path`,
`--group-rm`, `--reward-key`.

A row's own `metadata.rm_type` wins over `--rm-type`, as in slime; a custom function wins over both.

Not here: what each reward computes (`rlpipe.rewards`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from rlpipe.config.data import RuleReward
from rlpipe.config.problems import nearest
from rlpipe.errors import ConfigError

RULES = ("math", *get_args(RuleReward.model_fields["type"].annotation), "reasoning_gym")
"""What a row's `rm_type` may say, with `boxed_` before it or not."""
ELSEWHERE = {
    "ifbench": "its checks are a package of their own; give them as --custom-rm-path",
    "opencua_click": "vision models are not supported",
}


def reward_function(
    values: Mapping[str, Any], *, where: str = "--rm-type"
) -> dict[str, Any] | None:
    """`reward.function` of the flags (or of a held-out set's keys); None if they say nothing of it.
    Raises: ConfigError."""
    path = values.get("custom_rm_path")
    kind = values.get("rm_type")
    key = values.get("reward_key")
    entry = {} if key is None else {"reward_key": key}
    if path is not None:
        return {
            "type": "python",
            "path": path,
            "group": bool(values.get("group_rm")),
            "reward_key": key,
        }
    if kind == "remote_rm":
        if not values.get("rm_url"):
            raise ConfigError(
                "the server's address is missing",
                where="--rm-url",
                do="--rm-url http://host:port/path",
            )
        return {"type": "remote", "url": values["rm_url"], "reward_key": key}
    if kind is None:
        prompts = "prompt_data" in values or "data_source_path" in values
        return (
            {"type": "by_row", **entry}
            if prompts and values.get("loss_type") != "sft_loss"
            else None
        )
    check_rule(kind, where)
    return {"type": "by_row", "default": kind, **entry}


def check_rule(kind: str, where: str) -> None:
    """Raises: ConfigError if there is no such rule."""
    plain = kind.removeprefix("boxed_")
    if plain in RULES:
        return
    near = nearest(plain, RULES) or RULES
    raise ConfigError(
        "no such reward", where=where, found=kind, expected=", ".join(near), do=ELSEWHERE.get(plain)
    )
