"""Samples and rewards to Parquet and back: identity, and every rule broken once, when written and
when read."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.errors import DataError, ObjectCorrupt
from rlpipe.store.parquet.arrays import from_ragged, ragged
from rlpipe.store.parquet.rows import (
    EXPERTS,
    rewards_to_table,
    samples_to_table,
    table_to_rewards,
    table_to_samples,
)
from rlpipe.store.parquet.schema import BATCH, SAMPLES, decode, encode, make_table
from rlpipe.store.routed_experts import NOT_ROUTED
from rlpipe.types import Sample, Status
from tests.store.lineage import Reward

INT32 = st.integers(0, 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
FLOAT64 = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | FLOAT64 | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tools"]), JSON, max_size=3), max_size=3
)


@st.composite
def a_sample(draw: st.DrawFn, group_id: str = "run:00000000", index: int = 0) -> Sample:
    """Any sample that keeps the rules."""
    response = draw(st.lists(INT32, max_size=8))
    size = len(response)
    cut = draw(st.integers(0, len(response)))
    runs = [(cut, draw(INT32)), (len(response) - cut, draw(INT32))]
    prompt = draw(st.lists(INT32, max_size=8))
    experts = (
        np.arange(draw(st.integers(0, max(len(prompt) + size - 1, 0))) * 3)
        .reshape(-1, 3)
        .astype(np.uint16)
    )
    return Sample(
        group_id=group_id,
        index=index,
        prompt=draw(st.text(max_size=12) | MESSAGES),
        prompt_ids=prompt,
        label=draw(st.none() | st.text(max_size=8)),
        metadata=draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        response=draw(st.text(max_size=12)),
        response_ids=response,
        rollout_log_probs=draw(st.none() | st.lists(FLOAT32, min_size=size, max_size=size)),
        rollout_routed_experts=draw(st.sampled_from([None, experts])),
        loss_mask=draw(st.none() | st.lists(st.integers(0, 1), min_size=size, max_size=size)),
        weight_versions=draw(st.sampled_from([[], runs])),
        status=draw(st.sampled_from(Status)),
        finish_reason=draw(st.text(max_size=5)),
        error=draw(st.none() | st.text(max_size=5)),
        reward=draw(st.none() | FLOAT64),
        reward_parts=draw(st.dictionaries(st.text(max_size=5), FLOAT64, max_size=3)),
        engine=draw(st.text(max_size=5)),
        t_start_s=draw(FLOAT64),
        t_end_s=draw(FLOAT64),
    )


@st.composite
def some_samples(draw: st.DrawFn) -> list[Sample]:
    keys = draw(
        st.lists(st.tuples(st.text(max_size=6), st.integers(0, 9)), max_size=5, unique=True)
    )
    return [draw(a_sample(group_id, index)) for group_id, index in keys]


@settings(max_examples=150, deadline=None)
@given(samples=some_samples(), iteration=st.integers(0, 2**40))
def test_samples_come_back_from_parquet_as_they_were(samples: list[Sample], iteration: int):
    table = samples_to_table(samples, iteration, {"": "filtered"})
    read = decode(encode(table), "memory")
    assert read.equals(table)
    back = table_to_samples(read)
    assert back == samples
    for sample, was in zip(back, samples, strict=True):
        experts = sample.rollout_routed_experts
        wrote = was.rollout_routed_experts
        assert (experts is None) == (wrote is None) and (
            wrote is None or experts.tolist() == wrote.tolist()
        )
    assert read["iteration"].to_pylist() == [iteration] * len(samples)
    assert read["drop_reason"].to_pylist() == [
        "filtered" if sample.group_id == "" else None for sample in samples
    ]


def test_samples_are_read_without_their_experts_and_those_of_older_files_have_none():
    table = samples_to_table(
        [replace(good(), rollout_routed_experts=np.ones((4, 6), np.uint16))], 0
    )
    names = [name for name in SAMPLES.names if name != EXPERTS]
    assert decode(encode(table), "x", [EXPERTS])[EXPERTS].to_pylist() == [
        [1] * 24 + [NOT_ROUTED] * 6
    ]
    for some in (table.select(names), decode(encode(table), "x", names)):
        assert table_to_samples(some)[0].rollout_routed_experts is None
    sink = pa.BufferOutputStream()
    pq.write_table(table.select(names), sink)
    assert (
        table_to_samples(decode(sink.getvalue().to_pybytes(), "x"))[0].rollout_routed_experts
        is None
    )


def test_equal_rows_give_equal_bytes():
    samples = [good(index) for index in range(4)]
    assert encode(samples_to_table(samples, 0)) == encode(
        samples_to_table([replace(sample) for sample in samples], 0)
    )


def test_a_log_prob_that_is_no_float32_is_rounded_to_the_nearest():
    table = samples_to_table([replace(good(), rollout_log_probs=[-0.1, -0.2, -0.3])], 0)
    assert table_to_samples(table)[0].rollout_log_probs == [
        float(np.float32(value)) for value in (-0.1, -0.2, -0.3)
    ]


def good(index: int = 0, group_id: str = "run:00000007") -> Sample:
    """A sample of three response tokens that keeps every rule."""
    return Sample(
        group_id=group_id,
        index=index,
        prompt="1+1=",
        prompt_ids=[5, 6],
        response="2",
        response_ids=[7, 8, 9],
        rollout_log_probs=[-0.5, -0.25, -1.0],
        loss_mask=[1, 0, 1],
        weight_versions=[(2, 3), (1, 4)],
        status=Status.COMPLETED,
        reward=1.0,
    )


BROKEN = [
    ({"rollout_log_probs": [-0.5]}, "rollout_log_probs has not one value per response token"),
    ({"loss_mask": [1, 1, 1, 1]}, "loss_mask has not one value per response token"),
    ({"loss_mask": [1, 2, 1]}, "neither 0 nor 1"),
    (
        {"rollout_log_probs": [-0.5, math.nan, -1.0]},
        "rollout_log_probs has a value that is not finite",
    ),
    (
        {"rollout_log_probs": [-0.5, -math.inf, -1.0]},
        "rollout_log_probs has a value that is not finite",
    ),
    ({"weight_versions": [(2, 3)]}, "weight_versions do not add up"),
    ({"weight_versions": [(4, 3), (0, 1)]}, "weight_versions do not add up"),
    ({"reward": math.nan}, "reward is not finite"),
    ({"reward": math.inf}, "reward is not finite"),
    ({"reward_parts": {"format": math.nan}}, "reward_parts has a value that is not finite"),
    ({"response_ids": [7, -8, 9]}, "response_ids has a negative token id"),
    ({"prompt_ids": [-1]}, "prompt_ids has a negative token id"),
    (
        {"rollout_routed_experts": np.zeros((6, 2), np.uint16)},
        "rollout_routed_experts are not equally many",
    ),
    ({"index": -1}, "index is negative"),
    ({"index": 0}, "two rows have the same group_id and index"),
    ({"status": "sleeping"}, "status is not one of ours"),
]


@pytest.mark.parametrize(("change", "problem"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_row_that_breaks_a_rule_is_named_when_written(change: dict, problem: str):
    rows = [good(0), good(1), replace(good(2), **change), good(3)]
    with pytest.raises(DataError, match=problem) as caught:
        samples_to_table(rows, 0, where="shard 5")
    assert caught.value.where == f"shard 5 row 2 (run:00000007/{rows[2].index})"


@pytest.mark.parametrize(("change", "problem"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_row_that_breaks_a_rule_is_named_when_read(
    change: dict, problem: str, monkeypatch: pytest.MonkeyPatch
):
    rows = [good(0), good(1), replace(good(2), **change), good(3)]
    with monkeypatch.context() as patch:
        patch.setattr("rlpipe.store.parquet.schema.check", lambda *arguments: None)
        data = encode(samples_to_table(rows, 0))
    with pytest.raises(ObjectCorrupt, match=problem) as caught:
        decode(data, "s3://b/x.parquet")
    assert caught.value.where == f"s3://b/x.parquet row 2 (run:00000007/{rows[2].index})"


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"seed": 2**63}, "seed"),
        ({"response_ids": [1, 2**31, 3]}, "response_ids"),
        ({"response_ids": [1, None, 3]}, "response_ids"),
        ({"response_ids": [1, 2.5, 3]}, "response_ids"),
        ({"loss_mask": [1, -1, 1]}, "loss_mask"),
        ({"response": "half a pair \ud800"}, "response"),
        ({"response": None}, "response"),
        ({"reward": "1"}, "reward"),
        ({"metadata": {"x": math.nan}}, "metadata"),
        ({"metadata": {"x": {1}}}, "metadata"),
        ({"weight_versions": [(3, 2**31)]}, "weight_versions"),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_its_column_is_named(change: dict, column: str):
    with pytest.raises(DataError) as caught:
        samples_to_table([good(0), replace(good(1), **change)], 0, where="shard 5")
    assert "row 1" in str(caught.value)
    assert column in str(caught.value)


def test_every_flipped_byte_of_a_file_is_found_or_harmless():
    table = samples_to_table([good(index) for index in range(3)], 0)
    data = encode(table)
    silent = 0
    for position in range(0, len(data), 7):
        flipped = data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]
        try:
            silent += not decode(flipped, "x").equals(table)
        except ObjectCorrupt:
            continue
    assert silent / len(data) < 0.02, (
        "page checksums must find nearly all; the file's sha256 finds the rest"
    )


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet" * 10])
def test_bytes_that_are_no_parquet_are_corrupt(data: bytes):
    with pytest.raises(ObjectCorrupt, match="not a readable Parquet file"):
        decode(data, "x")


def test_a_table_of_another_schema_is_refused_with_the_difference():
    table = samples_to_table([good()], 0)
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.set_column(2, "index", table["index"].cast(pa.int64())).replace_schema_metadata(
            SAMPLES.metadata
        ),
        sink,
    )
    with pytest.raises(ObjectCorrupt, match="index: int32 not null"):
        decode(sink.getvalue().to_pybytes(), "x")
    with pytest.raises(ValueError, match="not one of the store's tables"):
        encode(table.drop_columns(["reward"]))


def test_some_columns_are_read_alone_and_still_checked(monkeypatch: pytest.MonkeyPatch):
    table = samples_to_table([good(0), good(1)], 0)
    assert decode(encode(table), "x", ["reward", "loss_mask"]).equals(
        table.select(["reward", "loss_mask"])
    )
    monkeypatch.setattr("rlpipe.store.parquet.schema.check", lambda *arguments: None)
    data = encode(samples_to_table([replace(good(), loss_mask=[1])], 0))
    monkeypatch.undo()
    assert decode(data, "x", ["reward"]).num_rows == 1
    with pytest.raises(ObjectCorrupt, match="loss_mask has not one value"):
        decode(data, "x", ["loss_mask"])


def reward(index: int, value: float | None = 1.0, error: str | None = None) -> Reward:
    return Reward("run:00000001", index, value, {"exact": 1.0}, error)


def test_rewards_come_back_as_they_were():
    rows = [reward(0), reward(1, None, "timeout"), reward(2, 0.0, "scored as configured")]
    assert table_to_rewards(decode(encode(rewards_to_table(rows)), "x")) == [
        vars(row) for row in rows
    ]


def test_a_reward_is_never_missing_without_an_error():
    with pytest.raises(DataError, match="neither a reward nor an error"):
        rewards_to_table([reward(0), reward(1, None)])


def test_batch_columns_pass_through_as_flat_arrays():
    offsets = np.array([0, 3, 5])
    response = np.array([0, 2, 3])
    advantages = np.array([0.5, -0.5, 1.5], dtype=np.float32)
    columns = {
        "group_id": ["g", "g"],
        "index": [0, 1],
        "tokens": from_ragged(np.arange(5), offsets, pa.int32()),
        "prompt_len": [1, 1],
        "loss_mask": from_ragged(np.ones(3), response, pa.uint8()),
        "advantages": from_ragged(advantages, response, pa.float32()),
    }
    read = decode(encode(make_table(BATCH, columns, "batch")), "x")
    values, found = ragged(read["advantages"])
    np.testing.assert_array_equal(values, advantages)
    np.testing.assert_array_equal(found, response)
    assert read["reference_log_probs"].null_count == 2
    assert ragged(read["reference_log_probs"])[1].tolist() == [0, 0, 0]
    with pytest.raises(
        DataError, match=r"prompt_len is not within tokens|not one value per response token"
    ):
        make_table(BATCH, {**columns, "prompt_len": [1, 3]}, "batch")
    with pytest.raises(DataError, match="no such column"):
        make_table(BATCH, {**columns, "advantage": [1, 3]}, "batch")
    with pytest.raises(DataError, match="column loss_mask has not one value per row"):
        make_table(
            BATCH,
            {name: column for name, column in columns.items() if name != "loss_mask"},
            "batch",
        )


def test_ragged_is_right_for_slices_and_nulls():
    column = pa.array([[1, 2], None, [], [3]], pa.list_(pa.int32()))
    assert [array.tolist() for array in ragged(column)] == [[1, 2, 3], [0, 2, 2, 2, 3]]
    assert [array.tolist() for array in ragged(column.slice(1))] == [[3], [0, 0, 0, 1]]
    assert [array.tolist() for array in ragged(pa.chunked_array([column, column]).slice(3, 2))] == [
        [3, 1, 2],
        [0, 1, 3],
    ]
