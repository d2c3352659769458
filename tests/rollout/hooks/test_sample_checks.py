"""Returned samples of a user function become rows: attribution, checks, names."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.errors import HookError
from rlpipe.rollout.generate import planned_sample
from rlpipe.rollout.hooks.journal import Answer, Journal
from rlpipe.rollout.hooks.sample_checks import Limits, checked_rows
from rlpipe.types import PlannedGroup, Sample, Status

GROUP = PlannedGroup(
    group_id="b:00000001", prompt="p", prompt_ids=(5, 6), label="l", seeds=(10, 11, 12)
)
LIMITS = Limits(vocab_size=100, context_len=40)


def _sample(**values) -> Sample:
    sample = planned_sample(GROUP, 1)
    for name, value in {"status": Status.COMPLETED, **values}.items():
        setattr(sample, name, value)
    return sample


def _rows(answer, journal=None, before=None, limits=LIMITS) -> list[Sample]:
    return checked_rows(answer, GROUP, 1, journal or Journal(), limits, before=before, where="h")


def test_a_sample_with_slimes_fields_becomes_a_row():
    sample = planned_sample(GROUP, 0)
    sample.tokens = [5, 6, 7, 8, 9]
    sample.response_length = 3
    sample.truncated = True
    (row,) = _rows(sample)
    assert (row.prompt_ids, row.response_ids, row.status) == ([5, 6], [7, 8, 9], Status.TRUNCATED)
    assert (row.index, row.rollout_id, row.seed, row.finish_reason) == (1, 1, 11, "length")


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.data(),
)
def test_sampled_tokens_get_log_probs_and_versions_and_tool_tokens_get_none(stretches, data):
    journal = Journal()
    ids = [5, 6]
    log_probs = []
    versions = []
    mask = []
    for number, (tokens, sampled) in enumerate(stretches):
        if sampled:
            values = [-0.5 - number - place / 10 for place in range(len(tokens))]
            journal.add(ids, Answer(tuple(tokens), tuple(values), ((len(tokens), number),)))
            log_probs += values
        else:
            log_probs += [0.0] * len(tokens)
        versions += [number if sampled else None] * len(tokens)
        mask += [int(sampled)] * len(tokens)
        ids += tokens
    (row,) = _rows(_sample(tokens=ids, response_length=len(ids) - 2, loss_mask=mask), journal)
    assert row.rollout_log_probs == log_probs
    got = [version for tokens, version in row.weight_versions for _ in range(tokens)]
    assert all(have == want for have, want in zip(got, versions, strict=False) if want is not None)
    assert len(got) == (len(mask) if any(mask) else 0)


def test_tokens_without_an_answer_have_the_oldest_version_and_no_log_probs():
    journal = Journal()
    journal.add([5, 6], Answer((7,), (-1.0,), ((1, 3),)))
    journal.add([1, 2], Answer((9,), (-1.0,), ((1, 2),)))
    (row,) = _rows(_sample(tokens=[5, 6, 7, 8], response_length=2), journal)
    assert row.rollout_log_probs is None and row.weight_versions == [(1, 3), (1, 2)]
    (row,) = _rows(
        _sample(tokens=[5, 6, 8], response_length=1, weight_versions=["b@7@d", "b@8@d"]), journal
    )
    assert row.weight_versions == [(1, 7)], "the function's own stamps say more than the journal"


def test_tokens_of_an_earlier_iteration_keep_their_versions():
    before = _sample(
        response_ids=[7, 8],
        rollout_log_probs=[-1.0, -2.0],
        weight_versions=[(2, 4)],
        status=Status.ABORTED,
    )
    journal = Journal()
    journal.add([5, 6, 7, 8], Answer((9,), (-3.0,), ((1, 6),)))
    later = copy.deepcopy(before)
    later.tokens += [9]
    later.status = Status.COMPLETED
    later.weight_versions = []
    later.rollout_log_probs = None
    (row,) = _rows(later, journal, before)
    assert (row.rollout_log_probs, row.weight_versions) == ([-1.0, -2.0, -3.0], [(2, 4), (1, 6)])


def test_samples_of_one_rollout_have_different_indices_and_one_rollout_id():
    rows = _rows(
        [
            _sample(tokens=[5, 6, 7], response_length=1),
            _sample(tokens=[5, 8, 9, 9], response_length=2),
        ]
    )
    assert [(row.index, row.rollout_id, row.prompt_ids) for row in rows] == [
        (1, 1, [5, 6]),
        (4, 1, [5, 8]),
    ]


def test_a_dict_of_rewards_becomes_reward_and_parts():
    sample = _sample(tokens=[5, 6, 7], response_length=1, reward={"score": 1, "format": 0.5})
    (row,) = _rows(sample, limits=Limits(100, 40, "score"))
    assert (row.reward, row.reward_parts) == (1.0, {"format": 0.5})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "another type[\\s\\S]*NoneType"),
        ([], "no sample"),
        ("text", "another type[\\s\\S]*str"),
        (
            _sample(status=Status.PENDING, response="hello"),
            "no response tokens[\\s\\S]*5 characters",
        ),
        (
            _sample(tokens=[5, 6], status=Status.COMPLETED, response="hello"),
            "no response tokens[\\s\\S]*status completed, [\\s\\S]*append the ids",
        ),
        (_sample(tokens=[5, 6, 7], response_length=5), "longer than the tokens"),
        (_sample(tokens=[5, 6], response_length=1), "the prompt without a response"),
        (_sample(tokens=[7], response_length=1), "no prompt tokens"),
        (_sample(tokens=[5, 6, 100], response_length=1), "vocabulary[\\s\\S]*100"),
        (_sample(tokens=[5, 6, "a"], response_length=1), "vocabulary[\\s\\S]*'a'"),
        (_sample(tokens=[5, 6, *range(39)], response_length=39), "too long[\\s\\S]*41 tokens"),
        (
            _sample(tokens=[5, 6, 7], response_length=1, loss_mask=[1, 1]),
            "loss_mask does not have one value",
        ),
        (_sample(tokens=[5, 6, 7], response_length=1, loss_mask=[2]), "neither 0 nor 1"),
        (
            _sample(tokens=[5, 6, 7], response_length=1, rollout_log_probs=[float("nan")]),
            "not a finite number",
        ),
        (_sample(tokens=[5, 6, 7], response_length=1, metadata={"a": {1, 2}}), "JSON"),
        (
            _sample(tokens=[5, 6, 7], response_length=1, reward="good"),
            "reward is not a finite number",
        ),
        (
            _sample(tokens=[5, 6, 7], response_length=1, reward={"a": 1}),
            "lacks the entry of the reward",
        ),
    ],
)
def test_an_invalid_sample_is_an_error_with_the_reason(answer, message):
    with pytest.raises(HookError, match=message):
        _rows(copy.deepcopy(answer))


def test_a_response_of_text_without_tokens_is_a_row_of_an_evaluation():
    sample = _sample(tokens=[5, 6], status=Status.COMPLETED, response="hello")
    (row,) = _rows(sample, limits=Limits(100, 40, trained=False))
    assert (row.response, row.response_ids) == ("hello", [])


def test_returning_one_sample_twice_is_an_error():
    sample = _sample(tokens=[5, 6, 7], response_length=1)
    with pytest.raises(HookError, match="one sample twice"):
        _rows([sample, sample])
