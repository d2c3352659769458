"""The forms of user reward functions and classes, including slime's."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.data import PythonReward, RewardConfig
from rlpipe.errors import ConfigError, RewardError
from rlpipe.rewards.reward_rows import score
from rlpipe.rewards.scorer import Score, Scorer
from rlpipe.types import Sample, Status

SAMPLES = [
    Sample("g", index, f"p{index}", [1], response=f"r{index}", status=Status.COMPLETED)
    for index in range(2)
]
ARGS = Namespace(scale=2.0, reward_model="m")


@pytest.fixture
def scorer(tmp_path: Path):
    def make(source: str, name: str, **keys: Any) -> Scorer:
        (tmp_path / "mine.py").write_text(source)
        args = keys.pop("args", ARGS)
        return Scorer(PythonReward(type="python", path=f"{tmp_path}/mine.py:{name}", **keys), args)

    return make


def test_slimes_signature_gets_args_and_a_sample(scorer):
    loaded = scorer(
        "async def custom_rm(args, sample, **kwargs):\n"
        "    return args.scale * len(sample.response)\n",
        "custom_rm",
    )
    assert loaded.is_async
    assert loaded.score(SAMPLES[:1]) == asyncio.run(loaded.score_async(SAMPLES[:1])) == [Score(4.0)]


def test_slimes_group_signature_gets_args_and_the_samples(scorer):
    loaded = scorer(
        "def custom_rm(args, samples):\n    return [args.scale * s.index for s in samples]\n",
        "custom_rm",
        group=True,
    )
    assert loaded.score(SAMPLES) == [Score(0.0), Score(2.0)]


CLASS = """
class CustomRewardModel:
    def __init__(self, model_path):
        self.model_path = model_path
    def compute_reward(self, prompts, responses):
        return [float(p[1:] == r[1:]) * len(self.model_path) for p, r in zip(prompts, responses)]
"""


@pytest.mark.parametrize("group", [False, True])
def test_a_class_gets_prompts_and_responses(scorer, group: bool):
    loaded = scorer(CLASS, "CustomRewardModel", group=group, arguments={"model_path": "/m"})
    assert loaded.score(SAMPLES if group else SAMPLES[:1]) == [Score(2.0)] * (2 if group else 1)


def test_a_class_can_be_async_or_callable(scorer):
    source = (
        CLASS.replace("    def compute", "    async def compute")
        + "class Called:\n    def __call__(self, sample):\n        return 3\n"
    )
    assert scorer(source, "CustomRewardModel", arguments={"model_path": "/m"}).score(
        SAMPLES[:1]
    ) == [Score(2.0)]
    assert scorer(source, "Called").score(SAMPLES[:1]) == [Score(3.0)]


@pytest.mark.parametrize(
    ("source", "name", "keys", "problem"),
    [
        (CLASS, "CustomRewardModel", {}, "does not accept these arguments"),
        ("class R:\n    def compute_reward(self, texts): ...\n", "R", {}, "not a reward class"),
        ("class R: ...\n", "R", {}, "no method to call"),
        ("def reward(a, b, c): ...\n", "reward", {}, "cannot be called as a reward"),
        ("def reward(): ...\n", "reward", {}, "cannot be called as a reward"),
        ("def reward(args, sample): ...\n", "reward", {"args": None}, "needs args"),
        ("def reward(sample): ...\n", "reward", {"arguments": {"a": 1}}, "are for classes"),
    ],
)
def test_a_function_of_another_form_is_refused_before_the_first_sample(
    scorer, source: str, name: str, keys: dict, problem: str
):
    with pytest.raises(ConfigError, match=problem):
        scorer(source, name, **keys)


def test_too_many_rewards_of_a_class_are_an_error_of_the_row(scorer):
    loaded = scorer(
        "class R:\n    def compute_reward(self, prompts, responses):\n        return [1, 2]\n", "R"
    )
    with pytest.raises(RewardError, match="2 rewards for one response"):
        loaded.score(SAMPLES[:1])


@pytest.mark.integration
def test_args_reach_a_process(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def custom_rm(args, sample):\n    return args.scale\n")
    config = RewardConfig(
        function=PythonReward(type="python", path=f"{tmp_path}/mine.py:custom_rm"), workers=1
    )
    rows = asyncio.run(score(SAMPLES, config, args=ARGS))
    assert [row.reward for row in rows] == [2.0, 2.0]
