"""Results of reward functions and their conversion to scores."""

import pytest

from rlpipe.config.data import (
    MathReward,
    NoReward,
    PythonReward,
    ReasoningGymPrompts,
    ReasoningGymReward,
    RowReward,
    RuleReward,
)
from rlpipe.data.prompts import load_prompts
from rlpipe.errors import ConfigError, RewardError
from rlpipe.rewards.answers import without_end
from rlpipe.rewards.scorer import Score, Scorer
from rlpipe.types import Sample

ONE = Sample("g", 0, "", [1])
TWO = Sample("g", 1, "", [1])


@pytest.fixture
def scorer(tmp_path):
    def make(body, signature="def reward(x)", **keys):
        path = tmp_path / "mine.py"
        path.write_text(f"import numpy, torch\n{signature}:\n    {body}\n")
        return Scorer(PythonReward(type="python", path=f"{path}:reward", **keys))

    return make


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("return 2", 2.0),
        ("return True", 1.0),
        ("return numpy.float32(0.5)", 0.5),
        ("return torch.tensor(-1)", -1.0),
    ],
)
def test_numbers_are_rewards(scorer, body, value):
    assert scorer(body).score([ONE]) == [Score(value)]
    assert type(scorer(body).score([ONE])[0].reward) is float


def test_a_dict_has_the_reward_under_its_key_and_the_rest_are_parts(scorer):
    loaded = scorer("return {'right': 1, 'short': 0.5}", reward_key="right")
    assert loaded.score([ONE]) == [Score(1.0, {"short": 0.5})]
    plain = scorer("return {'reward': 1, 'short': 0.5}")
    assert plain.score([ONE]) == [Score(1.0, {"short": 0.5})]


def test_reward_key_selects_the_reward_of_a_rule():
    wrong = Sample("g", 0, "", [1], label="5", response="Answer: 6")
    (score,) = Scorer(RowReward(type="by_row", default="dapo")).score([wrong])
    assert score == Score(-1.0, {"acc": 0.0, "format": 1.0})
    assert Scorer(RowReward(type="by_row", default="dapo", reward_key="score")).score([wrong]) == [
        score
    ]
    (score,) = Scorer(RowReward(type="by_row", default="dapo", reward_key="acc")).score([wrong])
    assert score == Score(0.0, {"reward": -1.0, "format": 1.0})
    with pytest.raises(RewardError, match="no entry 'acc'"):
        Scorer(RowReward(type="by_row", default="f1", reward_key="acc")).score([wrong])


def test_an_async_function_is_recognised(scorer):
    loaded = scorer("return 1", "async def reward(x)")
    assert loaded.is_async
    assert loaded.score([ONE]) == [Score(1.0)]
    assert not scorer("return 1").is_async


async def test_an_async_function_runs_on_the_event_loop(scorer):
    assert await scorer("return 3", "async def reward(x)").score_async([ONE]) == [Score(3.0)]
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        await scorer("return 1 / 0", "async def reward(x)").score_async([ONE])


def test_a_group_function_gets_all_samples(scorer):
    loaded = scorer("return [s.index for s in x]", group=True)
    assert loaded.score([ONE, TWO]) == [Score(0.0), Score(1.0)]


@pytest.mark.parametrize(
    ("body", "keys", "message"),
    [
        ("return 1 / 0", {}, "ZeroDivisionError: division by zero"),
        ("return None", {}, "not a finite number[\\s\\S]*None .does"),
        ("return float('nan')", {}, "not a finite number"),
        ("return '1'", {}, "not a finite number"),
        ("return numpy.ones(2)", {}, "not a finite number"),
        ("return {'right': 1}", {}, "no entry 'reward'[\\s\\S]*entries 'right'"),
        (
            "return {'right': 1}",
            {"reward_key": "wrong"},
            "entry 'wrong'[\\s\\S]*reward_key=right",
        ),
        ("return {'right': 1, 'why': [1]}", {"reward_key": "right"}, "reward part 'why' is not"),
        ("return 1", {"group": True}, "do not match its samples[\\s\\S]*int"),
        ("return [1]", {"group": True}, "do not match its samples[\\s\\S]*1 results"),
        ("return [1, None]", {"group": True}, "not a finite number"),
    ],
)
def test_another_result_is_an_error_and_never_0(scorer, body, keys, message):
    with pytest.raises(RewardError, match=message):
        scorer(body, **keys).score([ONE, TWO])


def test_a_missing_function_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError):
        Scorer(PythonReward(type="python", path=str(tmp_path / "none.py")))
    with pytest.raises(ConfigError, match="does not score samples"):
        Scorer(NoReward(type="none"))  # pyright: ignore[reportArgumentType]


END = "<|im_end|>"


@pytest.mark.parametrize(
    "end", [END, "<|eot_id|>\n", "<｜end▁of▁sentence｜>", "</s>", "<end_of_turn>", f"{END}{END}"]
)
@pytest.mark.parametrize(
    ("function", "response", "label", "metadata"),
    [
        (RuleReward(type="dapo"), "Answer: 42", "42", {}),
        (RuleReward(type="deepscaler"), "</think> \\boxed{42}", "42", {}),
        (RuleReward(type="f1"), "it is Paris", "it is paris", {}),
        (RuleReward(type="gpqa"), "I would take B", "B", {}),
        (MathReward(type="math"), "42", "42", {}),
        (MathReward(type="math", boxed=True), "\\boxed{42}", "42", {}),
        (RowReward(type="by_row"), "it is Paris", "it is paris", {"rm_type": "f1"}),
    ],
)
def test_built_in_rules_read_a_response_without_its_end_tokens(
    function, response, label, metadata, end
):
    sample = Sample(response=response + end, label=label, metadata=metadata)
    assert Scorer(function).score([sample])[0].reward == 1.0
    assert sample.response == response + end


def test_reasoning_gym_reads_a_response_without_its_end_tokens():
    source = ReasoningGymPrompts(type="reasoning_gym", task="chain_sum", size=1, seed=3)
    (row,) = load_prompts(source)
    sample = Sample(response=f"{row.label}{END}", metadata=row.metadata)
    assert Scorer(ReasoningGymReward(type="reasoning_gym")).score([sample])[0].reward == 1.0


def test_a_user_function_gets_the_response_unchanged(scorer):
    assert scorer("return len(x.response)").score([Sample(response="42" + END)])[0].reward == 12


def test_text_that_looks_like_a_special_token_stays_inside_a_response():
    assert without_end("a <|im_end|> b") == "a <|im_end|> b"
    assert without_end("x < 3 <|im_end|>\n") == "x < 3"
    assert without_end("a</sub>") == "a</sub>"
