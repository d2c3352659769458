"""Scoring with reasoning_gym tasks, and their items in JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.data import ReasoningGymReward
from rlpipe.errors import ConfigError, DataError
from rlpipe.rewards.reasoning_gym import make_reward, make_task, pack, scoring_record, unpack
from rlpipe.types import Sample

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
NUMBER_ON_THE_FIRST_LINE = r"\A\s*(-?\d+)\s*(?:\n|\Z)"


def sample(response, task="spell_backward", arguments=None, metadata=None):
    arguments = arguments or {}
    entry = make_task(task, arguments, seed=5, size=1)[0]
    record = json.loads(json.dumps(scoring_record(task, arguments, entry)))
    response = response.format(answer=entry["answer"])
    return Sample(
        "g",
        0,
        entry["question"],
        [1],
        metadata=record if metadata is None else metadata,
        response=response,
    )


def reward(**keys):
    return make_reward(ReasoningGymReward(type="reasoning_gym", **keys))


def test_the_correct_answer_has_reward_1_and_others_0():
    assert reward()(sample("{answer}")) == {"reward": 1.0, "score": 1.0}
    assert reward()(sample(" {answer}\n"))["reward"] == 1.0
    wrong = reward()(sample("{answer}x"))
    assert wrong["reward"] == 0.0
    assert 0 < wrong["score"] < 1


def test_without_a_threshold_partial_credit_is_the_reward():
    scored = reward(threshold=None)(sample("{answer}x"))
    assert scored["reward"] == scored["score"] > 0


def test_a_pattern_extracts_the_answer_and_a_missing_match_is_a_part():
    scored = reward(answer_pattern=NUMBER_ON_THE_FIRST_LINE)
    assert scored(sample(" {answer}\n\nThe", "chain_sum", SUMS)) == {
        "reward": 1.0,
        "score": 1.0,
        "format": 1.0,
    }
    assert scored(sample("{answer} apples", "chain_sum", SUMS)) == {
        "reward": 0.0,
        "score": 0.0,
        "format": 0.0,
    }


def test_scorers_that_compare_tuples_get_tuples():
    entry = make_task("rearc", {}, seed=5, size=1)[0]
    record = json.loads(json.dumps(scoring_record("rearc", {}, entry)))
    right = Sample("g", 0, "", [1], metadata=record, response=entry["answer"])
    assert reward()(right)["reward"] == 1.0


@pytest.mark.parametrize(
    "metadata", [{}, {"reasoning_gym": 1}, {"reasoning_gym": {"task": "spell_backward"}}]
)
def test_a_sample_of_another_source_is_refused(metadata):
    with pytest.raises(DataError, match="not made by reasoning_gym"):
        reward()(sample("x", metadata=metadata))


@pytest.mark.parametrize("pattern", ["(", "word"])
def test_an_invalid_pattern_is_refused(pattern):
    with pytest.raises(ConfigError) as caught:
        reward(answer_pattern=pattern)
    assert caught.value.where == "reward.function.answer_pattern"


def test_an_item_of_an_unknown_task_is_refused():
    record = {"reasoning_gym": {"task": "no_such_task", "arguments": {}, "entry": {}}}
    with pytest.raises(ConfigError, match="no such task"):
        reward()(sample("x", metadata=record))


plain = st.none() | st.booleans() | st.integers() | st.text()
keys = (
    st.text().filter(lambda key: key not in ("__tuple__", "__items__"))
    | st.integers()
    | st.tuples(st.integers(), st.text())
)
values = st.recursive(
    plain,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


@given(values)
def test_packed_values_survive_json(value):
    again = unpack(json.loads(json.dumps(pack(value))))
    assert again == value
    assert repr(again) == repr(value)
