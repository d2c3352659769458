"""slime's own functions in flags, which are rlpipe's default behaviour or another key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpipe.config.rollout import SLIME_FILTERS

SLIME_FUNCTIONS = {
    "slime.rollout.sglang_rollout.generate_rollout": None,
    "slime.rollout.data_source.RolloutDataSourceWithBuffer": None,
    "slime.rollout.data_source.RolloutDataSource": None,
    "slime.rollout.sglang_streaming_rollout.generate_streaming": None,
    **SLIME_FILTERS,
}
"""Dotted path of a slime function → rlpipe's function; None: rlpipe's default behaviour."""
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def is_default_function(value: Any) -> bool:
    """True for the path of a slime function that rlpipe's default behaviour replaces."""
    return isinstance(value, str) and SLIME_FUNCTIONS.get(value, value) is None


def has_rollout_function(values: Mapping[str, Any]) -> bool:
    """True if a function of the user replaces the rollout."""
    path = values.get("rollout_function_path")
    return path not in (None, SFT_ROLLOUT, FULLY_ASYNC) and not is_default_function(path)
