"""User functions for a finished rollout, and filters in slime's form."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.user_source import CustomSource
from rlpipe.errors import ConfigError, HookError
from rlpipe.rollout.filters import Rejection, load_filter
from rlpipe.rollout.hooks.finished_rollout import FinishedRolloutHooks
from rlpipe.types import Sample

SCORED = {
    key: [Sample(group_id=key, index=n, reward=float(n)) for n in range(2)]
    for key in ("b:1", "b:2", "b:3")
}


def choose(args, groups):
    assert args.answer == 42
    for group in groups:
        group[0].remove_sample = group[0].group_id == "b:2"


class Source:
    def __init__(self, args):
        self.learned = []

    def get_samples(self, num_samples):
        return [[Sample(prompt="1", label="2")] for _ in range(num_samples)]


def learn(args, all_groups, data_source):
    data_source.learned.append(len(all_groups))


def look(args, all_groups, data_source):
    assert data_source is None
    args.seen.append([group[0].group_id for group in all_groups])


def fails(args, groups):
    raise RuntimeError("no")


def keep(args, samples):
    return SimpleNamespace(keep=samples[0].group_id == "b:1", reason=f"not_{args.answer}")


def _hooks(seen: list[list[str]] | None = None, **paths: str) -> FinishedRolloutHooks:
    functions: dict[str, Any] = {name: f"{__file__}:{function}" for name, function in paths.items()}
    return FinishedRolloutHooks(
        RolloutConfig(rollout_batch_size=2, **functions), Namespace(answer=42, seen=seen)
    )  # pyright: ignore[reportArgumentType]


def test_the_sample_filter_gets_the_batch_and_the_processing_gets_all_groups():
    seen: list[list[str]] = []
    both = _hooks(
        seen, rollout_sample_filter_path="choose", rollout_all_samples_process_path="look"
    )
    assert both.removed(SCORED, ("b:2", "b:3")) == [("b:2", 0)]
    assert seen == [["b:1", "b:2", "b:3"]]
    assert _hooks().removed(SCORED, ("b:2",)) == []


def test_the_processing_gets_the_users_data_source():
    args = Namespace()
    source = CustomSource(f"{__file__}:Source", args)
    config = RolloutConfig(
        rollout_batch_size=2, rollout_all_samples_process_path=f"{__file__}:learn"
    )
    FinishedRolloutHooks(config, args, source).removed(SCORED, ("b:1",))
    assert source.user.learned == [3]


def test_exceptions_and_wrong_signatures_of_the_hooks_are_named():
    with pytest.raises(HookError, match=r"(?s)fails: the sample filter failed.*RuntimeError: no"):
        _hooks(rollout_sample_filter_path="fails").removed(SCORED, ("b:1",))
    signatures = r"look\(args, all_groups, data_source\).*filter\(args, groups\)"
    with pytest.raises(ConfigError, match=f"(?s)rollout_sample_filter_path.*{signatures}"):
        _hooks(rollout_sample_filter_path="look")


def test_a_filter_in_slimes_form_gets_args_and_returns_an_object():
    judge = load_filter(f"{__file__}:keep", Namespace(answer=42))
    assert judge(SCORED["b:1"]) is None and judge(SCORED["b:2"]) == Rejection("not_42")
