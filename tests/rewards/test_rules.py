"""Rules that compare a response with its label, against values by hand."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlpipe.config.data import MathReward, RowReward, RuleReward
from rlpipe.errors import DataError
from rlpipe.rewards.answers import boxed, plain, same
from rlpipe.rewards.rules import RULES, by_row, dapo, deepscaler, f1, gpqa, make_rule, named_rule
from rlpipe.slime import reward_flags
from rlpipe.types import Sample


def sample(response: str, label: str | None = None, *, seed: int = 0, **metadata: Any) -> Sample:
    return Sample("g", 0, "", [1], label=label, response=response, metadata=metadata, seed=seed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{ 7 }", "7"),
        (r"\boxed{1} then \boxed{2", None),
        ("nothing", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box_is_the_answer(text: str, expected: str | None):
    assert boxed(text) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
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
def test_plain_normalises_an_answer(answer: str, expected: str):
    assert plain(answer) == expected


def test_answers_are_compared_as_text_and_numbers_and_empty_ones_differ():
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
def test_deepscaler_reads_the_box_after_the_reasoning(response: str, parts: dict[str, float]):
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
        ("U.S.A.", "USA", 1.0),
        ("1,000", "1000", 1.0),
        ("don't", "dont", 1.0),
        ("twenty-one", "twentyone", 1.0),
        ("twenty-one", "twenty one", 0.0),
        ("theory", "ory", 0.0),
    ],
)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(response: str, label: str, reward: float):
    assert f1(sample(response, label))["reward"] == pytest.approx(reward)


def squad_normalised(text: str) -> str:
    """`normalize_answer` of SQuAD's published evaluate-v1.1.py."""
    exclude = set(string.punctuation)
    without = "".join(ch for ch in text.lower() if ch not in exclude)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", without).split())


def squad_f1(prediction: str, truth: str) -> float:
    """`f1_score` of the same script, with HotpotQA's three special words."""
    left = squad_normalised(prediction)
    right = squad_normalised(truth)
    if left != right and {left, right} & {"yes", "no", "noanswer"}:
        return 0.0
    common = sum((Counter(left.split()) & Counter(right.split())).values())
    if common == 0:
        return 0.0
    precision = common / len(left.split())
    recall = common / len(right.split())
    return 2 * precision * recall / (precision + recall)


ANSWERS = st.lists(
    st.sampled_from(
        [
            "the",
            "a",
            "an",
            "cat",
            "U.S.A.",
            "don't",
            "yes",
            "no",
            "noanswer",
            "1,000",
            "-",
            "x's",
            "É",
            "’s",
            "\n",
        ]
    ),
    min_size=1,
    max_size=5,
).map(" ".join)


@given(ANSWERS | st.text(min_size=1, max_size=20), ANSWERS)
def test_f1_equals_the_published_script(response: str, label: str):
    assume(plain(label))
    assert f1(sample(response, label))["reward"] == pytest.approx(squad_f1(response, label))


@pytest.mark.parametrize(
    ("response", "letter", "reward"),
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
        ("answer: b", "B", 1.0),
        ("Answer: (b)", "B", 1.0),
        ("the answer is b because it is heavier", "B", 1.0),
        ("The answer is a.", "A", 1.0),
        ("The answer is a\nbecause it is light", "A", 1.0),
        ("The answer is a matter of taste", "A", 0.0),
        ("The answer is i", "I", 1.0),
        (r"so \boxed{d}", "D", 1.0),
        (r"so \boxed{\text{(B)}}", "B", 1.0),
        (r"so \boxed{\textbf{B. the moon}}", "B", 1.0),
        (r"so \boxed{\mathrm{c}}", "C", 1.0),
        (r"so $\boxed{\text{Option D}}$.", "D", 1.0),
        ("**Answer**: B, which is the moon", "B", 1.0),
        ("**Final answer: b**", "B", 1.0),
        ("Answer: `C`", "C", 1.0),
        (r"The correct option is \(B\).", "B", 1.0),
        ("the correct choice would be (c)", "C", 1.0),
        ("<answer>d</answer>", "D", 1.0),
        ("Answer: Ｂ", "B", 1.0),
        ("The answer is B. Option C is too heavy.", "B", 1.0),
        ("The answer is B. Option C is too heavy.", "C", 0.0),
        ("Option A is wrong, so I take option B", "B", 1.0),
        ("(c) is correct", "C", 1.0),
        ("c)", "C", 1.0),
        ("answer: D-glucose", "D", 0.0),
        ("answer: B's mass", "B", 0.0),
        ("a long day, i think", "A", 0.0),
        ("a long day, i think", "I", 0.0),
        ("answer: b", "C", 0.0),
        (r"\boxed{b}, not (c)", "C", 0.0),
    ],
)
def test_gpqa_takes_the_letter_that_a_response_states(response: str, letter: str, reward: float):
    assert gpqa(sample(response, letter))["reward"] == reward


def test_gpqa_identifies_the_correct_choice_by_letter_number_or_text():
    choices = {"A": "the sun", "B": "the moon"}
    letter: list[tuple[str, dict[str, Any]]] = [
        ("b", {}),
        ("1", {}),
        ("The Moon!", {}),
        ("anything", {"correct_letter": "B"}),
    ]
    for label, metadata in letter:
        assert gpqa(sample("answer: B", label, choices=choices, **metadata))["reward"] == 1.0
    assert gpqa(sample("it is the moon, surely", "B", choices=choices)) == {
        "reward": 1.0,
        "format": 0.0,
    }
    with pytest.raises(DataError, match="does not identify the correct choice"):
        gpqa(sample("answer: B", "Mars", choices=choices))


def test_random_rewards_are_reproducible_and_fair():
    rule = make_rule(RuleReward(type="random"))
    rewards = [rule(sample("", seed=seed))["reward"] for seed in range(400)]
    assert rewards == [rule(sample("", seed=seed))["reward"] for seed in range(400)]
    assert 150 < sum(rewards) < 250


@pytest.mark.parametrize("rule", [dapo, deepscaler, f1])
def test_a_row_without_a_label_is_an_error(rule: Any):
    for label in (None, "", " "):
        with pytest.raises(DataError, match="no label"):
            rule(sample(r"</think>\boxed{1}", label))


def test_a_boxed_rule_reads_only_the_box():
    rule = named_rule("boxed_f1")
    assert rule(sample(r"a lot of words \boxed{cat}", "cat")) == {
        "reward": 1.0,
        "precision": 1.0,
        "recall": 1.0,
        "boxed": 1.0,
    }
    assert rule(sample("cat", "cat"))["reward"] == 0.0
    assert (
        make_rule(MathReward(type="math", boxed=True))(sample(r"3 \boxed{2}", "2"))["reward"] == 1.0
    )


def test_the_configuration_and_slimes_flags_know_every_rule():
    assert set(get_args(RuleReward.model_fields["type"].annotation)) == set(RULES)
    assert set(reward_flags.RULES) == {*RULES, "math", "reasoning_gym"}


def test_each_row_can_name_its_rule():
    rule = by_row(RowReward(type="by_row", default="f1"))
    assert rule(sample("cat", "cat"))["reward"] == 1.0
    assert rule(sample("cat", "dog", rm_type="dapo"))["reward"] == -1.0
    assert rule(sample(r"\boxed{B}", "B", rm_type=" boxed_gpqa "))["reward"] == 1.0
    with pytest.raises(DataError, match="no such reward"):
        rule(sample("cat", "cat", rm_type="ifbench"))
    with pytest.raises(DataError, match="names no reward rule"):
        by_row(RowReward(type="by_row"))(sample("cat", "cat"))
