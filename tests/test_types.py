"""Samples, records and weight versions (rlpipe.types)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlpipe.types import (
    BufferedGroup,
    Commit,
    DataState,
    NodeRef,
    Plan,
    PlannedGroup,
    Sample,
    Stage,
    Status,
    WeightVersion,
)

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", fullmatch=True)
DIGESTS = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)


def sample(**given: Any) -> Sample:
    return Sample(group_id="run:00000000", index=0, prompt="p", prompt_ids=[1], **given)


def test_the_stages_are_in_the_order_of_the_dag():
    dag = ["init", "rollout", "reward", "advantage", "train", "sync", "checkpoint"]
    assert [str(stage) for stage in Stage] == [*dag, "eval", "segment"]


@pytest.mark.parametrize("status", Status)
def test_a_sample_s_flags_are_those_of_its_status(status: Status):
    assert sample(status=status).truncated == (status is Status.TRUNCATED)
    assert sample(status=status).aborted == (status is Status.ABORTED)


def test_a_sample_is_as_old_as_its_oldest_token():
    assert sample(weight_versions=[(3, 7), (2, 5), (1, 8)]).oldest_weight_version == 5
    assert sample().oldest_weight_version is None


def test_samples_do_not_share_what_hooks_write_into():
    first = sample()
    second = sample()
    first.metadata["seen"] = True
    first.reward_parts["format"] = 1.0
    first.response_ids.append(3)
    assert (second.metadata, second.reward_parts, second.response_ids) == ({}, {}, [])


def test_a_record_cannot_be_changed_and_refuses_keys_it_does_not_know():
    state = DataState(draws=3)
    with pytest.raises(ValidationError, match="frozen"):
        state.draws = 4
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        DataState.model_validate({"draws": 3, "drawn": 4})


def test_records_come_back_from_json_as_they_were():
    group = PlannedGroup(
        group_id="run:00000000",
        prompt=[{"role": "user", "content": "hi"}],
        prompt_ids=(1, 2),
        seeds=(7, 8),
    )
    waiting = BufferedGroup(group_id="run:00000001", plan="p", rows="r", oldest=3)
    plan = Plan(
        branch="run",
        iteration=0,
        groups=(group,),
        before=DataState(),
        after=DataState(draws=1, buffer=(waiting,)),
    )
    commit = Commit(
        branch="run",
        iteration=0,
        plans=("d",),
        nodes={Stage.TRAIN: "t"},
        data=plan.after,
        config_digest="c",
    )
    for record in (plan, commit, NodeRef(stage=Stage.EVAL, digest="e", outputs={"accuracy": 0.5})):
        assert type(record).model_validate_json(record.model_dump_json()) == record


@given(NAMES, st.integers(0, 10**9), DIGESTS)
def test_a_stamp_says_which_version_it_is_of(branch: str, version: int, digest: str):
    assert (
        WeightVersion.version_of(
            WeightVersion(branch=branch, version=version, digest=digest).stamp()
        )
        == version
    )


@given(NAMES, st.integers(0, 100), DIGESTS, NAMES, st.integers(0, 100), DIGESTS)
def test_other_weights_have_another_stamp(
    branch: str, version: int, digest: str, other: str, later: int, changed: str
):
    weights = product((branch, other), (version, later), (digest, changed))
    stamps = {
        WeightVersion(branch=name, version=number, digest=state).stamp()
        for name, number, state in weights
    }
    assert len(stamps) == len({branch, other}) * len({version, later}) * len(
        {digest[:16], changed[:16]}
    )


@pytest.mark.parametrize("stamp", ["", "default", "run@1", "@1@abc", "run@1@", "run@one@abc"])
def test_what_is_no_stamp_of_ours_is_refused(stamp: str):
    with pytest.raises(ValueError):  # noqa: PT011 - which of the checks says it does not matter
        WeightVersion.version_of(stamp)


def test_slime_s_names_say_where_the_response_begins_in_any_order():
    first = sample()
    second = sample()
    third = sample()
    first.tokens = [*first.tokens, 7, 8]
    assert (first.response_length, first.response_ids) == (0, [7, 8]), (
        "as in slime, the length is what was last message"
    )
    first.response_length += 2
    second.response_length = 2
    second.tokens = [1, 7, 8]
    third.tokens.extend([7])
    third.tokens += [8]
    third.settle_lengths()
    for one in (first, second, third):
        assert (one.prompt_ids, one.response_ids, one.tokens, one.response_length) == (
            [1],
            [7, 8],
            [1, 7, 8],
            2,
        )
    other = sample()
    other.tokens = [4, 5, 7]
    other.response_length = 1
    assert (other.prompt_ids, other.response_ids) == ([4, 5], [7]), "a prompt of the function's own"


def test_truncated_and_aborted_set_the_status():
    one = sample()
    one.truncated = False
    one.aborted = False
    assert one.status is Sample.Status.COMPLETED
    one.truncated = True
    assert one.status == Sample.Status.TRUNCATED and not one.aborted
    one.aborted = True
    assert one.status == Sample.Status("aborted")


def test_a_mask_that_a_function_keeps_grows_with_the_sample():
    sample = Sample()
    mask = sample.loss_mask = []
    sample.tokens = [1, 2]
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-0.5, -0.5])
    sample.append_response_tokens(tokens=[5], trainable=False)
    assert mask == [1, 1, 0] and sample.loss_mask is mask
    assert (sample.prompt_ids, sample.response_ids) == ([1, 2], [3, 4, 5])


def test_what_is_appended_carries_masks_and_log_probs():
    one = sample()
    one.append_response_tokens(
        None,
        tokens=[7],
        log_probs=[-1.0],
        meta_info={"finish_reason": {"type": "length"}},
        text="a",
    )
    one.append_response_tokens(None, tokens=[8, 9], trainable=False, text="b")
    assert (one.loss_mask, one.rollout_log_probs, one.response) == (
        [1, 0, 0],
        [-1.0, 0.0, 0.0],
        "ab",
    )
    assert (one.effective_response_length, one.response_length, one.status) == (
        1,
        3,
        Status.TRUNCATED,
    )
    with pytest.raises(ValueError, match="0 log-probs, expected one per trainable token"):
        one.append_response_tokens(None, tokens=[7])


def test_a_sample_survives_slime_s_dictionaries():
    one = sample(reward=0.5, metadata={"a": 1})
    one.tokens += [7, 8]
    one.settle_lengths()
    one.mine = 3  # pyright: ignore[reportAttributeAccessIssue] - attributes of a hook's own
    other = Sample.from_dict(one.to_dict())
    assert other == one and vars(other)["mine"] == 3
    theirs = Sample.from_dict(
        {
            "tokens": [1, 7],
            "response_length": 1,
            "status": "truncated",
            "group_index": 4,
            "index": 2,
        }
    )
    assert (theirs.prompt_ids, theirs.response_ids, theirs.status, theirs.index) == (
        [1],
        [7],
        Status.TRUNCATED,
        2,
    )
    assert one.group_index == 0 and Sample(group_id="eval/x").group_index is None
