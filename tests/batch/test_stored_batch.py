"""The batch file of an advantage node, read whole and by the samples of one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.batch import files as batch_files
from rlpipe.batch.build import Batch
from rlpipe.batch.columns import BatchColumns, BatchSizes
from rlpipe.batch.files import StoredBatch, read_batch, read_keys, write_batch
from rlpipe.batch.packing import PackingPlan, plan, shares_of
from rlpipe.errors import DataError, ObjectCorrupt, ObjectMissing
from rlpipe.store.columns import KIND
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.schema import BATCH, make_table
from rlpipe.store.parquet.shards import read_rows, write_data, write_table
from rlpipe.types import FileRecord, Node, Stage
from tests.batch.test_files import batches

DIGEST = "d" * 64
SIZES = ("response_len", "loss_tokens", "row")
"""Columns that batch files of version 2 do not have."""


def node(*records: FileRecord, outputs: dict[str, Any] | None = None) -> Node:
    return Node(stage=Stage.ADVANTAGE, digest=DIGEST, files=records, outputs=outputs or {})


@contextmanager
def files_of(size_bytes: int) -> Iterator[None]:
    """Write batch files of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_files, "FILE_BYTES", size_bytes)
        yield


def packing_of(columns: BatchColumns, ranks: int, max_tokens: int, steps: int) -> PackingPlan:
    return plan(
        columns.lengths,
        global_batch_size=None,
        num_steps=min(steps, len(np.unique(columns.rollouts))),
        max_tokens=max_tokens,
        data_parallel=ranks,
        rollout=columns.rollout,
    )


def of_version_2(files: Files, record: FileRecord) -> FileRecord:
    """The same batch in order, as the release before these columns wrote it."""
    table = pq.read_table(pa.BufferReader(files.read(record.path)))
    order = table["row"].combine_chunks()
    if order.null_count == 0:
        table = table.take(pa.array(np.argsort(order.to_numpy())))
    table = table.drop_columns(list(SIZES)).replace_schema_metadata({KIND: b"batch/2"})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data = sink.getvalue().to_pybytes()
    return write_data(files, "data/old", "batch.parquet", data, table.num_rows)


def assert_equal(found: BatchColumns, expected: BatchColumns) -> None:
    for field in fields(BatchColumns):
        if field.name != "part":
            one = getattr(found, field.name)
            other = getattr(expected, field.name)
            assert (one is None) == (other is None), field.name
            if one is not None:
                assert one.dtype == other.dtype and np.array_equal(one, other), field.name


def assert_sizes(found: BatchSizes, expected: BatchSizes) -> None:
    for field in fields(BatchSizes):
        one = getattr(found, field.name)
        other = getattr(expected, field.name)
        assert (one is None) == (other is None) and (one is None or np.array_equal(one, other))


@settings(max_examples=60, deadline=None)
@given(
    batches(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([4, 64]), st.integers(1, 3), st.data()
)
def test_a_rank_reads_its_samples_in_any_layout_and_packing(
    made: tuple[Batch, BatchColumns], ranks: int, max_tokens: int, steps: int, data: st.DataObject
):
    batch, columns = made
    if data.draw(st.booleans()):
        columns = replace(columns, rollout=np.arange(len(columns)) // 2)
    written = packing_of(columns, data.draw(st.sampled_from([1, 2, 4, 8])), 32, 1)
    packing = packing_of(columns, ranks, max_tokens, steps)
    with tempfile.TemporaryDirectory() as folder:
        files = Files(folder)
        shares = shares_of(written)
        (record,) = write_batch(files, DIGEST, batch, columns, shares).files
        with files_of(data.draw(st.sampled_from([1, 100, 400]))):
            several = write_batch(files, DIGEST, batch, columns, shares)
        for node_of in (
            node(record),
            node(of_version_2(files, record)),
            node(*several.files, outputs=several.outputs),
        ):
            stored = StoredBatch(files, node_of)
            assert_sizes(stored.sizes, columns.sizes)
            assert stored.scored == (columns.proximal_log_probs is not None)
            assert stored.keys() == list(zip(batch.group_ids, batch.indices, strict=True))
            assert_equal(stored.columns(), columns)
            for share in shares_of(packing):
                samples = np.array(share, np.int64)
                own = stored.columns(samples)
                assert_equal(own, columns.select(samples))
                assert own.part is not None and own.part.samples.tolist() == share
                assert np.array_equal(columns.tokens[own.token_index()], own.tokens)


def two_shares(tmp_path: Path) -> tuple[Files, FileRecord, BatchColumns]:
    columns = BatchColumns.from_lists(
        [[1], [2], [3], [4]],
        [[5] * 3, [6] * 4, [7] * 5, [8] * 6],
        advantages=[[0.5] * n for n in (3, 4, 5, 6)],
    )
    batch = Batch(columns, ("a", "a", "b", "b"), (0, 1, 0, 1), np.zeros(4), {})
    files = Files(tmp_path)
    (record,) = write_batch(files, DIGEST, batch, columns, [[0, 3], [1, 2]]).files
    return files, record, columns


def test_each_share_is_a_row_group_and_plans_keep_their_numbers(tmp_path: Path):
    files, record, columns = two_shares(tmp_path)
    file = pq.ParquetFile(pa.BufferReader(files.read(record.path)))
    assert [file.metadata.row_group(i).num_rows for i in range(2)] == [2, 2]
    assert file.read()["row"].to_pylist() == [0, 3, 1, 2]
    assert read_keys(files, node(record)) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert_equal(StoredBatch(files, node(record)).columns(), columns)


def test_a_changed_byte_in_any_row_group_is_found_by_every_rank(tmp_path: Path):
    files, record, _ = two_shares(tmp_path)
    path = Path(files.url(record.path).removeprefix("file://"))
    data = path.read_bytes()
    path.chmod(0o644)
    for place in range(0, len(data), 53):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ObjectCorrupt):
            StoredBatch(files, node(record))


def several_files(folder: Path) -> tuple[Files, Node, BatchColumns]:
    """Three files with one, two and one samples."""
    columns = BatchColumns.from_lists([[1]] * 4, [[5] * 3, [6] * 4, [7] * 5, [8] * 6])
    batch = Batch(columns, ("a", "a", "b", "b"), (0, 1, 0, 1), np.zeros(4), {})
    files = Files(folder)
    with files_of(1):
        written = write_batch(files, DIGEST, batch, columns, [[3], [0, 2], [1]])
    assert [record.rows for record in written.files] == [1, 2, 1]
    return files, node(*written.files, outputs=written.outputs), columns


def test_a_rank_reads_only_the_files_of_its_samples(tmp_path: Path):
    files, stored_node, columns = several_files(tmp_path)
    for number in (0, 2):
        files.delete(stored_node.files[number].path)
    stored = StoredBatch(files, stored_node)
    assert_sizes(stored.sizes, columns.sizes)
    assert_equal(stored.columns(np.array([0, 2])), columns.select(np.array([0, 2])))
    with pytest.raises(ObjectMissing):
        stored.columns(np.array([0, 1]))


def test_several_files_are_read_by_all_who_read_one(tmp_path: Path):
    files, stored_node, columns = several_files(tmp_path)
    assert_equal(read_batch(files, stored_node), columns)
    assert read_keys(files, stored_node) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    rows = read_rows(files, stored_node.files, ["group_id", "index", "tokens", "row"])
    assert rows["row"].to_pylist() == [3, 0, 2, 1]
    assert [len(tokens) for tokens in rows["tokens"].to_pylist()] == [7, 4, 6, 5]


@pytest.mark.parametrize(
    "changed",
    [
        {"sample": [0, 0, 2, 1]},
        {"prompt_len": [1, 1, 2, 1]},
        {"response_len": [6, 3, 4, 4]},
        {"sample": [1, 0, 2]},
        None,
    ],
)
def test_recorded_rows_that_the_files_do_not_have_are_refused(
    tmp_path: Path, changed: dict[str, list[int]] | None
):
    files, stored_node, _ = several_files(tmp_path)
    rows = {**stored_node.outputs["rows"], **(changed or {})}
    outputs = {"rows": rows} if changed else {}
    with pytest.raises(ObjectCorrupt):
        StoredBatch(files, stored_node.model_copy(update={"outputs": outputs})).columns()


def test_files_of_a_batch_have_at_most_the_given_size_or_one_share(tmp_path: Path):
    columns = BatchColumns.from_lists([[1]] * 6, [[5] * 9] * 6)
    batch = Batch(columns, ("a",) * 6, tuple(range(6)), np.zeros(6), {})
    shares = [[0], [1], [2, 3], [4], [5]]
    of_a_sample = 4 * 10 + 9
    with files_of(2 * of_a_sample):
        written = write_batch(Files(tmp_path), DIGEST, batch, columns, shares)
    assert [record.rows for record in written.files] == [2, 2, 2]
    assert write_batch(Files(tmp_path), DIGEST, batch, columns, shares).outputs == {}


ROW: dict[str, Any] = {
    "group_id": ["g", "g"],
    "index": [0, 1],
    "tokens": [[1, 2], [3, 4, 5]],
    "prompt_len": [1, 1],
    "loss_mask": [[1], [1, 0]],
    "response_len": [1, 2],
    "loss_tokens": [1, 1],
}


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        ("response_len", [1, 1], "response_len is not the number of response tokens"),
        ("response_len", [-1, 2], "response_len is negative"),
        ("loss_tokens", [1, 2], "loss_tokens is not the sum of the loss mask"),
    ],
)
def test_sizes_that_the_tokens_do_not_have_are_not_written(column: str, values: Any, problem: str):
    assert make_table(BATCH, ROW, "batch").num_rows == 2
    with pytest.raises(DataError, match=problem):
        make_table(BATCH, {**ROW, column: values}, "batch")


def test_rows_without_a_number_each_are_refused(tmp_path: Path):
    files = Files(tmp_path)
    table = make_table(BATCH, {**ROW, "row": [1, 1]}, "batch")
    with pytest.raises(ObjectCorrupt, match="have not each number once"):
        StoredBatch(files, node(write_table(files, "data/x", "batch", table)))
