"""Questions of reasoning_gym as prompts with a scoring record."""

import json

import pytest
from reasoning_gym.factory import DATASETS

from rlpipe.config.data import ReasoningGymPrompts
from rlpipe.data.prompts import load_prompts
from rlpipe.data.reasoning_gym_questions import make_questions
from rlpipe.errors import ConfigError, DataError
from rlpipe.rewards.reasoning_gym import score_answer, unpack

WORDS = {"min_word_len": 3, "max_word_len": 7}
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def source(task="spell_backward", arguments=WORDS, size=50, **keys):
    return ReasoningGymPrompts(
        type="reasoning_gym", task=task, arguments=arguments, size=size, **keys
    )


def test_the_same_source_makes_the_same_rows():
    rows = load_prompts(source(seed=7))
    assert rows == load_prompts(source(seed=7))
    assert len(rows) == 50
    assert str(rows[0].prompt).endswith(str(rows[0].label)[::-1])
    assert rows[3].where == "spell_backward(seed=7)[3]"


def test_held_out_questions_do_not_occur_in_training():
    held_out = source("chain_sum", SUMS, size=256, seed=0)
    train = source("chain_sum", SUMS, size=2000, seed=1_000_000)
    without = make_questions(train.model_copy(update={"exclude": (held_out,)}))
    excluded = {str(row.prompt) for row in make_questions(held_out)}
    assert not excluded & {str(row.prompt) for row in without}
    assert 0 < len(without) < len(make_questions(train))


def test_exclusion_compares_questions_and_not_formatted_prompts():
    held_out = source("chain_sum", SUMS, size=100, seed=0, prompt_format="Q: {question}")
    with pytest.raises(DataError, match="no question is left"):
        make_questions(source("chain_sum", SUMS, size=100, seed=0, exclude=(held_out,)))


def test_pattern_and_formats_determine_prompt_and_label():
    few_shot = "3 + 4 = 7\n{question}"
    row = make_questions(
        source(
            "chain_sum",
            SUMS,
            size=3,
            question_pattern=r": (.*)$",
            prompt_format=few_shot,
            answer_format=" {answer}\n",
        )
    )[0]
    head, last = str(row.prompt).split("\n")
    assert head == "3 + 4 = 7"
    expression = last.removesuffix(" =")
    assert row.label == f" {eval(expression)}\n"


MIXTURE = {
    "datasets": [
        {"name": "chain_sum", "weight": 3, "config": SUMS},
        {"name": "rearc", "weight": 1},
    ]
}


def test_a_mixture_has_questions_of_its_tasks_by_their_weights():
    rows = make_questions(source("composite", MIXTURE, size=40, seed=11))
    names = [
        unpack(row.metadata["reasoning_gym"]["entry"])["metadata"]["source_dataset"] for row in rows
    ]
    assert 20 <= names.count("chain_sum") < 40 and set(names) == {"chain_sum", "rearc"}
    for row in rows:
        assert score_answer(str(row.label), json.loads(json.dumps(row.metadata))) == 1.0
    assert rows == make_questions(source("composite", MIXTURE, size=40, seed=11))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        "chain_sum",
        ["chain_sum"],
        [{"name": "chain_sum"}],
        [{"name": "no_such_task", "weight": 1}],
        [{"name": "chain_sum", "weight": 0}],
        [{"name": "chain_sum", "weight": 1, "arguments": {}}],
        [{"name": "chain_sum", "weight": 1}, {"name": "chain_sum", "weight": 2}],
    ],
)
def test_a_mixture_with_wrong_tasks_is_refused(parts):
    with pytest.raises(ConfigError) as caught:
        make_questions(source("composite", {"datasets": parts}))
    assert caught.value.where == "data.prompts.arguments"


@pytest.mark.parametrize("task", sorted(DATASETS))
def test_every_tasks_answer_has_the_same_score_after_json(task):
    arguments = MIXTURE if task == "composite" else {}
    row = make_questions(source(task, arguments, size=1, seed=11))[0]
    assert row.label is None or isinstance(row.label, str)
    stored = json.loads(json.dumps(row.metadata))
    assert score_answer(row.label or "", stored) == score_answer(row.label or "", row.metadata)
    if row.label is not None:
        assert score_answer(row.label, stored) == 1.0


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"task": "spell_backwards"}, "data.prompts.task"),
        ({"arguments": {"min_word_length": 3}}, "data.prompts.arguments"),
        ({"arguments": {"min_word_len": 9, "max_word_len": 3}}, "data.prompts.arguments"),
        ({"arguments": {"seed": 3}}, "data.prompts.arguments"),
        ({"prompt_format": "{qestion}"}, "data.prompts.prompt_format"),
        ({"prompt_format": "{"}, "data.prompts.prompt_format"),
        ({"answer_format": "{}"}, "data.prompts.answer_format"),
        ({"question_pattern": "("}, "data.prompts.question_pattern"),
        ({"question_pattern": "word"}, "data.prompts.question_pattern"),
    ],
)
def test_a_wrong_setting_is_named(keys, where):
    with pytest.raises(ConfigError) as caught:
        make_questions(source(**keys))
    assert caught.value.where == where


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(ConfigError, match=r"expected: *spell_backward"):
        make_questions(source("spel_backward", {}))


def test_a_pattern_that_does_not_match_names_the_question():
    with pytest.raises(
        DataError,
        match=r"spell_backward\(seed=0\)\[0\]: data.prompts.question_pattern does not match",
    ):
        make_questions(source(question_pattern="=(.*)"))
