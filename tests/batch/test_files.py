"""The stages' data files: what is written is what is read (rlpipe.batch.files)."""

from __future__ import annotations

import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.batch.build import Batch
from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.files import (
    FLOAT_COLUMNS,
    read_batch,
    read_packing,
    read_rewards,
    read_samples,
    write_batch,
    write_evaluation,
    write_packing,
    write_rewards,
)
from rlpipe.batch.packing import plan
from rlpipe.errors import DataError, ObjectCorrupt, ObjectMissing
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.nodes import input_digest
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import TOKEN_COLUMNS, samples_to_table
from rlpipe.store.parquet.schema import BATCH, decode, make_table
from rlpipe.store.parquet.shards import write_data, write_table
from rlpipe.types import FileRecord, Node, Sample, Stage, Status

DIGEST = "d" * 64
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
TOKEN = st.integers(0, 2**31 - 1)
PACKING = plan([3, 5, 2, 8, 1], global_batch_size=2, max_tokens=8, data_parallel=2)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "store")


def node(stage: Stage, *records: FileRecord) -> Node:
    return Node(stage=stage, digest=input_digest(stage, {}, {}, {}), files=records)


def sample(group: int = 0, index: int = 0, **given_fields: Any) -> Sample:
    ids = [10 * group + index, 4, 5]
    made = Sample(
        group_id=f"run:{group:08d}",
        index=index,
        prompt="p",
        prompt_ids=[1],
        response="abc",
        response_ids=ids,
    )
    return replace(made, status=Status.COMPLETED, **given_fields)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, BatchColumns]:
    """Any batch, with any of the columns that are added later there or not."""
    prompts = draw(st.lists(st.lists(TOKEN, min_size=1, max_size=5), min_size=1, max_size=6))
    responses = [draw(st.lists(TOKEN, max_size=5)) for _ in prompts]

    def ragged(values: st.SearchStrategy[Any]) -> list[Any]:
        return [
            draw(st.lists(values, min_size=len(response), max_size=len(response)))
            for response in responses
        ]

    names = draw(st.sets(st.sampled_from(FLOAT_COLUMNS)))
    columns = {
        "loss_mask": ragged(st.integers(0, 1)),
        **{name: ragged(FLOAT32) for name in sorted(names)},
    }
    made = BatchColumns.from_lists(prompts, responses, **columns)
    if width := draw(st.integers(0, 3)):
        experts = draw(st.lists(st.integers(0, 2**16 - 1), min_size=width, max_size=width))
        made = made.with_columns(
            routed_experts=np.outer(made.tokens % 2, experts).astype(np.uint16)
        )
    ids = tuple(f"run:{number // 2:08d}" for number in range(len(prompts)))
    indices = tuple(number % 2 for number in range(len(prompts)))
    return Batch(made, ids, indices, np.zeros(len(prompts)), {}, None), made


@settings(max_examples=30)
@given(batches())
def test_a_batch_is_read_as_it_was_written(made: tuple[Batch, BatchColumns]):
    batch, columns = made
    with tempfile.TemporaryDirectory() as folder:
        files = Files(folder)
        back = read_batch(
            files, node(Stage.ADVANTAGE, *write_batch(files, DIGEST, batch, columns).files)
        )
    for column in fields(BatchColumns):
        wrote = getattr(columns, column.name)
        read = getattr(back, column.name)
        assert (wrote is None) == (read is None), column.name
        if wrote is not None:
            assert wrote.dtype == read.dtype, column.name
            assert np.array_equal(wrote, read), column.name


@st.composite
def reward_rows(draw: st.DrawFn) -> list[RewardRow]:
    finite = st.floats(allow_nan=False, allow_infinity=False)
    rows = []
    for number in range(draw(st.integers(0, 6))):
        parts = draw(st.dictionaries(st.text(max_size=5), finite, max_size=2))
        rows.append(
            RewardRow(
                f"run:{number // 2:08d}",
                number % 2,
                draw(st.none() | finite),
                parts,
                draw(st.none() | st.text()),
            )
        )
    return rows


@settings(max_examples=30)
@given(reward_rows())
def test_rewards_are_read_as_they_were_written_less_the_rows_that_had_nothing_to_score(
    rows: list[RewardRow],
):
    with tempfile.TemporaryDirectory() as folder:
        files = Files(folder)
        back = read_rewards(files, node(Stage.REWARD, write_rewards(files, DIGEST, rows)))
    assert back == [row for row in rows if row.reward is not None or row.error is not None]


def test_a_packing_plan_is_read_as_it_was_written(files: Files):
    assert read_packing(files, node(Stage.TRAIN, write_packing(files, DIGEST, PACKING))) == PACKING


def test_a_critic_has_a_packing_plan_of_its_own_or_the_policy_s(files: Files):
    policy = write_packing(files, DIGEST, PACKING)
    assert read_packing(files, node(Stage.TRAIN, policy), critic=True) == PACKING
    other = PACKING.model_copy(update={"max_tokens": PACKING.max_tokens + 1})
    both = node(Stage.TRAIN, policy, write_packing(files, DIGEST, other, critic=True))
    assert [read_packing(files, both, critic=critic) for critic in (False, True)] == [
        PACKING,
        other,
    ]


def test_an_evaluation_has_its_samples_in_order_with_their_rewards(files: Files):
    samples = [sample(1, 0), sample(0, 1, error="cut off"), sample(0, 0)]
    rewards = [
        RewardRow("run:00000000", 0, 0.5, {"format": 1.0}),
        RewardRow("run:00000000", 1, None, {}, "no answer"),
        RewardRow("run:00000001", 0, None, {}, "the verifier raised"),
    ]
    read = read_samples(
        files, node(Stage.EVAL, write_evaluation(files, DIGEST, 3, samples, rewards))
    )
    assert [(of.group_id, of.index) for of in read] == [
        ("run:00000000", 0),
        ("run:00000000", 1),
        ("run:00000001", 0),
    ]
    assert [of.reward for of in read] == [0.5, None, None]
    assert [of.error for of in read] == [None, "cut off", "the verifier raised"]
    assert read[0].reward_parts == {"format": 1.0}
    assert [of.response_ids for of in read] == [[0, 4, 5], [1, 4, 5], [10, 4, 5]]
    assert all(of.reward is None for of in samples), "the samples given are not written into"


def test_samples_of_all_shards_of_a_rollout_are_read(files: Files):
    shards = [[sample(0, 0), sample(0, 1)], [sample(1, 0)]]
    records = [
        write_table(files, "plans/p/groups", f"s{n}", samples_to_table(shard, 0))
        for n, shard in enumerate(shards)
    ]
    assert read_samples(files, node(Stage.ROLLOUT, *records)) == [
        of for shard in shards for of in shard
    ]


def test_samples_without_their_tokens_have_everything_else(files: Files):
    per_token = {"rollout_log_probs": [-1.0] * 3, "weight_versions": [(3, 2)]}
    shard = [sample(0, 0, **per_token), sample(0, 1, error="cut off")]
    record = write_table(files, "plans/p/groups", "s", samples_to_table(shard, 0))
    nothing = {name: getattr(Sample(), name) for name in TOKEN_COLUMNS}
    read = read_samples(files, node(Stage.ROLLOUT, record), tokens=False)
    assert read == [replace(of, **nothing) for of in shard]


def test_two_attempts_at_a_node_write_two_files_and_equal_ones_one(files: Files):
    first = write_rewards(files, DIGEST, [RewardRow("g", 0, 1.0)])
    assert write_rewards(files, DIGEST, [RewardRow("g", 0, 1.0)]) == first
    second = write_rewards(files, DIGEST, [RewardRow("g", 0, 0.5)])
    assert files.list(f"data/reward/{DIGEST}") == sorted([first.path, second.path])
    assert read_rewards(files, node(Stage.REWARD, first)) == [RewardRow("g", 0, 1.0)]


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (lambda files: write_rewards(files, DIGEST, [RewardRow("g", 0, 1.0)]), read_rewards),
        (lambda files: write_packing(files, DIGEST, PACKING), read_packing),
    ],
)
def test_a_changed_or_lost_file_is_refused(files: Files, write: Any, read: Any):
    record = write(files)
    path = Path(files.url(record.path).removeprefix("file://"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ObjectCorrupt):
        read(files, node(Stage.REWARD, record))
    path.unlink()
    with pytest.raises(ObjectMissing):
        read(files, node(Stage.REWARD, record))


def test_a_batch_whose_tokens_have_unequal_numbers_of_experts_is_not_written():
    row = {
        "tokens": [[1, 2], [3, 4]],
        "prompt_len": [1, 1],
        "loss_mask": [[1], [1]],
        "group_id": ["g", "g"],
        "index": [0, 1],
    }
    assert (
        make_table(BATCH, {**row, "routed_experts": [[0, 1, 2, 3], [0, 1, 2, 3]]}, "batch").num_rows
        == 2
    )
    with pytest.raises(DataError, match="not equally many for every token"):
        make_table(BATCH, {**row, "routed_experts": [[0, 1, 2, 3], [0, 1, 2]]}, "batch")


def test_a_batch_with_small_lists_of_experts_is_read():
    row = {
        "tokens": [[1, 2], [3, 4]],
        "prompt_len": [1, 1],
        "loss_mask": [[1], [1]],
        "group_id": ["g", "g"],
        "index": [0, 1],
    }
    table = make_table(BATCH, {**row, "routed_experts": [[0, 1, 2, 3], [4, 5, 6, 7]]}, "batch")
    place = table.schema.get_field_index("routed_experts")
    small = pa.list_(pa.field("element", pa.uint16(), nullable=False))
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.set_column(
            place, pa.field("routed_experts", small), table["routed_experts"].cast(small)
        ),
        sink,
    )
    assert decode(sink.getvalue().to_pybytes(), "x").equals(table)


def test_a_batch_with_nan_is_not_written(files: Files):
    columns = BatchColumns.from_lists([[1]], [[2, 3]], advantages=[[1.0, float("nan")]])
    with pytest.raises(DataError, match="advantages has a value that is not finite"):
        write_batch(files, DIGEST, Batch(columns, ("g",), (0,), np.zeros(1), {}, None), columns)
    assert files.list() == []


@pytest.mark.parametrize("text", [b"[]", b"{", b'{"num_samples": 1}', b"\xff"])
def test_a_file_that_is_not_a_packing_plan_is_named(files: Files, text: bytes):
    record = write_data(files, f"data/train/{DIGEST}", "packing.json", text)
    with pytest.raises(ObjectCorrupt, match="not a packing plan") as caught:
        read_packing(files, node(Stage.TRAIN, record))
    assert (
        caught.value.where == files.url(record.path)
        and caught.value.found
        and caught.value.expected
        and caught.value.do
    )


def test_a_train_node_without_a_packing_plan_is_named(files: Files):
    for critic in (False, True):
        with pytest.raises(ObjectCorrupt, match="a train node without a packing plan"):
            read_packing(files, node(Stage.TRAIN), critic=critic)


@pytest.mark.parametrize("read", [read_batch, read_samples])
def test_a_table_of_another_kind_is_named(files: Files, read: Any):
    record = write_rewards(files, DIGEST, [RewardRow("g", 0, 1.0)])
    with pytest.raises(ObjectCorrupt, match=r"(?s)another schema.*prompt"):
        read(files, node(Stage.ADVANTAGE, record))
