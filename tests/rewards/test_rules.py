"""The rules that compare a response with its label, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rlpipe.config.data import MathReward, RowReward, RuleReward
from rlpipe.errors import DataError
from rlpipe.rewards.answers import boxed, plain, same
from rlpipe.rewards.rules import by_row, dapo, deepscaler, f1, gpqa, make_rule, of_kind
from rlpipe.types import Sample


def sample(response: str, label: str | None = None, *, seed: int = 0, **metadata: Any) -> Sample:
    return Sample("g", 0, "", [1], label=label, response=response, metadata=metadata, seed=seed)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{ 7 }", "7"),
        (r"\boxed{1} then \boxed{2", None),
        ("nothing", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box_is_the_answer(text: str, found: str | None):
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("answer", "bare"),
    [
        ("x = 5", "5"),
        ("$12$ dollars", "12"),
        (r"\frac12", r"\frac{1}{2}"),
        ("1,234,567", "1234567"),
        (r"3\text{ cm}", "3"),
        ("sideways 3", "sideways3"),
        (r"90^\circ", "90"),
        ("the number 4.", "number4"),
    ],
)
def test_an_answer_is_made_plain(answer: str, bare: str):
    assert plain(answer) == bare


def test_answers_are_the_same_as_text_or_as_numbers_but_never_as_nothing():
    assert same("2.0", "2")
    assert same("$ x+1 $", "x + 1")
    assert not same("", "")
    assert not same("2", "3")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("Answer: 34", 1.0),
        ("Answer: 3\nno, answer : $34$", 1.0),
        ("34", -1.0),
        ("Answer: 34" + " " * 300, -1.0),
        (r"**Answer:** 34", -1.0),
    ],
)
def test_dapo_reads_the_last_answer_in_the_last_300_characters(response: str, reward: float):
    assert dapo(sample(response, "34"))["reward"] == reward


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        (r"\boxed{4}</think> it is \boxed{\frac{1}{2}}", {"reward": 1.0, "format": 1.0}),
        (r"hm</think> \boxed{0.5}", {"reward": 1.0, "format": 1.0}),
        (r"###Response: \boxed{\frac12}", {"reward": 1.0, "format": 1.0}),
        (r"hm</think> \boxed{0.6}", {"reward": 0.0, "format": 1.0}),
        (r"\boxed{\frac{1}{2}}", {"reward": 0.0, "format": 0.0}),
        (r"hm</think> one half", {"reward": 0.0, "format": 0.0}),
    ],
)
def test_deepscaler_wants_a_box_after_thinking(response: str, parts: dict[str, float]):
    assert deepscaler(sample(response, r"\frac{1}{2}")) == parts


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("The cat sat", "a cat sat!", 1.0),
        ("cat", "cat sat", 2 / 3),
        ("dog", "cat", 0.0),
        ("yes", "yes it is", 0.0),
        ("yes", "Yes.", 1.0),
        ("", "cat", 0.0),
    ],
)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(response: str, label: str, reward: float):
    assert f1(sample(response, label))["reward"] == pytest.approx(reward)


@pytest.mark.parametrize(
    ("response", "told", "reward"),
    [
        ("The answer is B", "B", 1.0),
        ("The answer is a matter of taste. Final answer: (B)", "B", 1.0),
        ("answer: A. No, the answer is C.", "C", 1.0),
        (r"so \boxed{D}", "D", 1.0),
        ("C is the correct one", "C", 1.0),
        ("well\nB.", "B", 1.0),
        ("The answer is B", "C", 0.0),
        ("answer is A</think> the answer is B", "B", 1.0),
        ("I do not know", "A", 0.0),
    ],
)
def test_gpqa_takes_the_letter_that_a_response_settles_on(response: str, told: str, reward: float):
    assert gpqa(sample(response, told))["reward"] == reward


def test_gpqa_knows_the_right_choice_by_letter_number_or_text():
    choices = {"A": "the sun", "B": "the moon"}
    told: list[tuple[str, dict[str, Any]]] = [("b", {}), ("1", {}), ("The Moon!", {}), ("anything", {"correct_letter": "B"})]
    for label, metadata in told:
        assert gpqa(sample("answer: B", label, choices=choices, **metadata))["reward"] == 1.0
    assert gpqa(sample("it is the moon, surely", "B", choices=choices)) == {"reward": 1.0, "format": 0.0}
    with pytest.raises(DataError, match="which choice is right"):
        gpqa(sample("answer: B", "Mars", choices=choices))


def test_chance_is_the_same_every_time_and_fair():
    rule = make_rule(RuleReward(type="random"))
    rewards = [rule(sample("", seed=seed))["reward"] for seed in range(400)]
    assert rewards == [rule(sample("", seed=seed))["reward"] for seed in range(400)]
    assert 150 < sum(rewards) < 250


@pytest.mark.parametrize("rule", [dapo, deepscaler, f1])
def test_a_row_without_a_label_is_an_error(rule: Any):
    for label in (None, "", " "):
        with pytest.raises(DataError, match="no label"):
            rule(sample(r"</think>\boxed{1}", label))


def test_a_boxed_rule_looks_into_the_box_only():
    rule = of_kind("boxed_f1")
    assert rule(sample(r"a lot of words \boxed{cat}", "cat")) == {"reward": 1.0, "precision": 1.0, "recall": 1.0, "boxed": 1.0}
    assert rule(sample("cat", "cat"))["reward"] == 0.0
    assert make_rule(MathReward(type="math", boxed=True))(sample(r"3 \boxed{2}", "2"))["reward"] == 1.0


def test_each_row_may_say_its_own_rule():
    rule = by_row(RowReward(type="by_row", default="f1"))
    assert rule(sample("cat", "cat"))["reward"] == 1.0
    assert rule(sample("cat", "dog", rm_type="dapo"))["reward"] == -1.0
    assert rule(sample(r"\boxed{B}", "B", rm_type=" boxed_gpqa "))["reward"] == 1.0
    with pytest.raises(DataError, match="no such reward"):
        rule(sample("cat", "cat", rm_type="ifbench"))
    with pytest.raises(DataError, match="does not say how it is scored"):
        by_row(RowReward(type="by_row"))(sample("cat", "cat"))
