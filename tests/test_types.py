"""Samples, records and weight versions (rlpipe.types)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlpipe.types import BufferedGroup, Commit, DataState, NodeRef, Plan, PlannedGroup, Sample, Stage, Status, WeightVersion

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
    first, second = sample(), sample()
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
    group = PlannedGroup(group_id="run:00000000", prompt=[{"role": "user", "content": "hi"}], prompt_ids=(1, 2), seeds=(7, 8))
    waiting = BufferedGroup(group_id="run:00000001", plan="p", rows="r", oldest=3)
    plan = Plan(branch="run", iteration=0, groups=(group,), before=DataState(), after=DataState(draws=1, buffer=(waiting,)))
    commit = Commit(branch="run", iteration=0, plans=("d",), nodes={Stage.TRAIN: "t"}, data=plan.after, config_digest="c")
    for record in (plan, commit, NodeRef(stage=Stage.EVAL, digest="e", outputs={"accuracy": 0.5})):
        assert type(record).model_validate_json(record.model_dump_json()) == record


@given(NAMES, st.integers(0, 10**9), DIGESTS)
def test_a_stamp_says_which_version_it_is_of(branch: str, version: int, digest: str):
    assert WeightVersion.version_of(WeightVersion(branch=branch, version=version, digest=digest).stamp()) == version


@given(NAMES, st.integers(0, 100), DIGESTS, NAMES, st.integers(0, 100), DIGESTS)
def test_other_weights_have_another_stamp(branch: str, version: int, digest: str, other: str, later: int, changed: str):
    weights = product((branch, other), (version, later), (digest, changed))
    stamps = {WeightVersion(branch=name, version=number, digest=state).stamp() for name, number, state in weights}
    assert len(stamps) == len({branch, other}) * len({version, later}) * len({digest[:16], changed[:16]})


@pytest.mark.parametrize("stamp", ["", "default", "run@1", "@1@abc", "run@1@", "run@one@abc"])
def test_what_is_no_stamp_of_ours_is_refused(stamp: str):
    with pytest.raises(ValueError):  # noqa: PT011 - which of the checks says it does not matter
        WeightVersion.version_of(stamp)
