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
from rlpipe.rewards.user_rewards import needed_columns, reads_messages
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
        (
            "def reward(response, label): ...\n",
            "reward",
            {},
            "(?s)(.*reward\\(){4}.*compute_reward",
        ),
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


QUESTION = [{"role": "user", "content": "1 + 1 ="}]
ROWS = [
    Sample(
        "g",
        index,
        f"p{index}",
        [1],
        label=str(index),
        metadata={"level": index},
        response=f"r{index}<|im_end|>",
        response_ids=[7, 8],
        status=Status.COMPLETED,
    )
    for index in range(2)
]
LABELLED = Namespace(label_key="answer")


@pytest.mark.parametrize("group", [False, True])
def test_a_function_of_trls_form_gets_columns_as_lists(scorer, group: bool):
    loaded = scorer(
        "def reward(prompts, completions, answer, **columns):\n"
        "    assert columns['completion_ids'] == [[7, 8]] * len(prompts)\n"
        "    return [level + 10 * (f'{p}:{c}' == f'p{a}:r{a}') for p, c, a, level in\n"
        "            zip(prompts, completions, answer, columns['level'], strict=True)]\n",
        "reward",
        args=LABELLED,
        group=group,
    )
    scores = loaded.score(ROWS) if group else [*loaded.score(ROWS[:1]), *loaded.score(ROWS[1:])]
    assert scores == [Score(10.0), Score(11.0)]


def test_a_misspelt_parameter_of_trls_form_is_named(scorer):
    with pytest.raises(ConfigError, match="rename the parameter completion to completions"):
        scorer("def reward(completion, answer, **kwargs): ...\n", "reward")


def test_a_function_of_trls_form_gets_only_the_columns_that_it_names(scorer):
    loaded = scorer(
        "async def reward(completions, answer):\n    return [len(completions[0])]\n",
        "reward",
        args=LABELLED,
    )
    assert loaded.is_async
    assert asyncio.run(loaded.score_async(ROWS[:1])) == [Score(2.0)]


def test_a_class_can_have_trls_form(scorer):
    source = (
        "class Length:\n"
        "    def __call__(self, completions, **kwargs):\n"
        "        return [len(text) for text in completions]\n"
    )
    assert scorer(source, "Length", group=True).score(ROWS) == [Score(2.0)] * 2


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": QUESTION},
        {"prompt": "<user>1 + 1 =", "metadata": {"messages": QUESTION}},
    ],
)
def test_a_completion_of_messages_is_a_message(scorer, prompt: dict):
    loaded = scorer(
        "def reward(prompts, completions, **kwargs):\n"
        "    assert prompts[0][-1]['content'] == '1 + 1 ='\n"
        "    return [c[0]['role'] == 'assistant' and int(c[0]['content']) for c in completions]\n",
        "reward",
    )
    sample = Sample("g", 0, **prompt, response="2<|im_end|>", status=Status.COMPLETED)
    assert loaded.score([sample]) == [Score(2.0)]


@pytest.mark.parametrize(
    ("source", "columns"),
    [
        ("def reward(completions, answer, *, level, weight=1, **kwargs): ...\n", "answer level"),
        ("def reward(prompts, completions, completion_ids, **kwargs): ...\n", ""),
        ("def reward(sample, answer=None): ...\n", ""),
        ("class reward:\n    def __call__(self, completions, answer): ...\n", "answer"),
    ],
)
def test_columns_without_a_default_are_needed(tmp_path: Path, source: str, columns: str):
    (tmp_path / "mine.py").write_text(source)
    reward = PythonReward(type="python", path=f"{tmp_path}/mine.py:reward")
    assert needed_columns(reward) == columns.split()
    assert reads_messages(RewardConfig(function=reward)) == ("completions" in source)


@pytest.mark.parametrize(
    "parameters", ["args, sample", "_args, sample_or_samples", "_, sample", "args, sample, **rest"]
)
def test_slimes_form_is_known_by_the_names_of_its_parameters(scorer, parameters: str):
    second = parameters.split(", ")[1]
    source = f"def reward({parameters}):\n    return {second}.index\n"
    assert scorer(source, "reward").score(SAMPLES[1:]) == [Score(1.0)]


def test_an_error_names_the_line_of_the_users_file(scorer, tmp_path: Path):
    loaded = scorer(
        "import json\n\n\ndef reward(sample):\n    return json.loads(sample.response)\n", "reward"
    )
    with pytest.raises(RewardError) as caught:
        loaded.score(SAMPLES[:1])
    assert "JSONDecodeError" in str(caught.value)
    assert f"{tmp_path}/mine.py:5: return json.loads(sample.response)" in str(caught.value)


def test_the_error_of_a_failed_stage_has_one_failing_sample(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def reward(sample):\n    return int(sample.label)\n")
    config = RewardConfig(function=PythonReward(type="python", path=f"{tmp_path}/mine.py:reward"))
    sample = Sample("g", 3, "Say it." * 99, [1], response="It.", status=Status.COMPLETED)
    with pytest.raises(RewardError) as caught:
        asyncio.run(score([sample], config))
    message = str(caught.value)
    for part in ("sample 3 of group g", "1 of 1", "TypeError", "mine.py:2", "'It.'", "None", "50%"):
        assert part in message
    assert len(message) < 1200


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
