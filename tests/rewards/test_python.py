"""What a reward function may return, and what becomes of anything else."""

import pytest

from rlpipe.config.data import NoReward, PythonReward
from rlpipe.errors import ConfigError, RewardError
from rlpipe.rewards.python import Score, Scorer
from rlpipe.types import Sample

ONE, TWO = Sample("g", 0, "", [1]), Sample("g", 1, "", [1])


@pytest.fixture
def scorer(tmp_path):
    def make(body, signature="def reward(x)", **keys):
        path = tmp_path / "mine.py"
        path.write_text(f"import numpy, torch\n{signature}:\n    {body}\n")
        return Scorer(PythonReward(type="python", path=f"{path}:reward", **keys))

    return make


@pytest.mark.parametrize(
    ("body", "value"),
    [("return 2", 2.0), ("return True", 1.0), ("return numpy.float32(0.5)", 0.5), ("return torch.tensor(-1)", -1.0)],
)
def test_numbers_are_rewards(scorer, body, value):
    assert scorer(body).score([ONE]) == [Score(value)]
    assert type(scorer(body).score([ONE])[0].reward) is float


def test_a_dict_has_its_reward_under_the_key_and_parts_beside_it(scorer):
    made = scorer("return {'right': 1, 'short': 0.5}", reward_key="right")
    assert made.score([ONE]) == [Score(1.0, {"short": 0.5})]


def test_an_async_function_is_known_as_one(scorer):
    made = scorer("return 1", "async def reward(x)")
    assert made.is_async
    assert made.score([ONE]) == [Score(1.0)]
    assert not scorer("return 1").is_async


async def test_an_async_function_runs_on_the_loop(scorer):
    assert await scorer("return 3", "async def reward(x)").score_async([ONE]) == [Score(3.0)]
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        await scorer("return 1 / 0", "async def reward(x)").score_async([ONE])


def test_a_group_function_gets_all_samples(scorer):
    made = scorer("return [s.index for s in x]", group=True)
    assert made.score([ONE, TWO]) == [Score(0.0), Score(1.0)]


@pytest.mark.parametrize(
    ("body", "keys", "said"),
    [
        ("return 1 / 0", {}, "ZeroDivisionError: division by zero"),
        ("return None", {}, "not a finite number[\\s\\S]*NoneType"),
        ("return float('nan')", {}, "not a finite number"),
        ("return '1'", {}, "not a finite number"),
        ("return numpy.ones(2)", {}, "not a finite number"),
        ("return {'right': 1}", {}, "which entry of the dict[\\s\\S]*entries right"),
        ("return {'right': 1}", {"reward_key": "wrong"}, "which entry of the dict"),
        ("return {'right': 1, 'why': 'x'}", {"reward_key": "right"}, "reward part 'why' is not"),
        ("return 1", {"group": True}, "do not match its samples[\\s\\S]*int"),
        ("return [1]", {"group": True}, "do not match its samples[\\s\\S]*1 results"),
        ("return [1, None]", {"group": True}, "not a finite number"),
    ],
)
def test_anything_else_is_an_error_and_never_0(scorer, body, keys, said):
    with pytest.raises(RewardError, match=said):
        scorer(body, **keys).score([ONE, TWO])


def test_a_function_that_is_not_there_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError):
        Scorer(PythonReward(type="python", path=str(tmp_path / "none.py")))
    with pytest.raises(ConfigError, match="not a function that scores"):
        Scorer(NoReward(type="none"))  # pyright: ignore[reportArgumentType]
