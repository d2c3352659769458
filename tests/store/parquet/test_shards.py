"""Shards of finished groups: each group is adopted once, and each shard is verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlpipe.errors import DataError, ObjectCorrupt, ObjectMissing
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import table_to_samples
from rlpipe.store.parquet.shards import ShardWriter, adopt, read_rows, write_data, write_table
from tests.store.lineage import batch_table, group, sample


def on_disk(files: Files, path: str) -> Path:
    return Path(files.url(path).removeprefix("file://"))


def test_a_retry_adopts_the_groups_it_finds(files: Files):
    writer = ShardWriter(files, "plans/d/groups", 4, attempt="first")
    records = [
        writer.write([group("a"), group("b")]),
        writer.write([group("c")], {"c": "too short"}),
    ]
    assert adopt(files, "plans/d/groups") == [(records[0], ["a", "b"]), (records[1], ["c"])]
    assert all(record.sha256[:16] in record.path and "/first-" in record.path for record in records)
    table = read_rows(files, records)
    assert table_to_samples(table) == [*group("a"), *group("b"), *group("c")]
    assert table["drop_reason"].to_pylist() == [None] * 4 + ["too short"] * 2
    assert adopt(files, "plans/other/groups") == []


def test_a_group_that_two_attempts_finished_counts_once(files: Files):
    late = ShardWriter(files, "g", 0, attempt="b").write([group("one"), group("two")])
    early = ShardWriter(files, "g", 0, attempt="a").write(
        [[replace(s, response="first") for s in group("one")]]
    )
    ShardWriter(files, "g", 0, attempt="c").write([group("two")])
    adopted = adopt(files, "g")
    assert adopted == [(early, ["one"]), (late, ["two"])]
    rows = table_to_samples(read_rows(files, [record for record, _ in adopted]))
    assert [(row.group_id, row.index, row.response) for row in rows] == [
        ("one", 0, "first"),
        ("one", 1, "first"),
        ("two", 0, "abc"),
        ("two", 1, "abc"),
    ]


def test_the_same_shard_written_twice_is_one_shard(local_files: Files):
    records = [
        ShardWriter(local_files, "g", 0, attempt="a").write([group("one")]) for _ in range(2)
    ]
    assert records[0] == records[1]
    assert len(local_files.list("g")) == 1


def test_a_flipped_byte_in_a_shard_is_found_with_its_name_and_with_its_record(local_files: Files):
    record = ShardWriter(local_files, "g", 0).write([group("one")])
    path = on_disk(local_files, record.path)
    data = bytearray(path.read_bytes())
    for position in (5, len(data) // 2, len(data) - 6):
        data[position] ^= 1
        path.write_bytes(data)
        with pytest.raises(ObjectCorrupt, match="do not match its name") as caught:
            adopt(local_files, "g")
        assert caught.value.where == local_files.url(record.path)
        with pytest.raises(ObjectCorrupt, match="not the bytes that were written"):
            read_rows(local_files, [record])
        data[position] ^= 1


def test_a_missing_shard_is_named(local_files: Files):
    record = ShardWriter(local_files, "g", 0).write([group("one")])
    local_files.delete(record.path)
    with pytest.raises(ObjectMissing, match=record.path):
        read_rows(local_files, [record])


def test_a_wrong_number_of_rows_is_named(local_files: Files):
    record = ShardWriter(local_files, "g", 0).write([group("one")])
    with pytest.raises(ObjectCorrupt, match="another number of rows than recorded"):
        read_rows(local_files, [record.model_copy(update={"rows": 3})])


def test_a_group_with_two_ids_is_refused(local_files: Files):
    with pytest.raises(DataError, match="one group_id"):
        ShardWriter(local_files, "g", 0).write([[sample("a", 0), sample("b", 0)]])
    with pytest.raises(DataError, match="one group_id"):
        ShardWriter(local_files, "g", 0).write([[]])
    with pytest.raises(DataError, match="two rows have the same"):
        ShardWriter(local_files, "g", 0).write([group("a"), group("a")])
    assert local_files.list() == []


def test_batch_rows_of_several_files_are_joined_and_never_dropped(local_files: Files):
    first = write_table(local_files, "data/advantage/d", "batch", batch_table(["a"]))
    second = write_table(local_files, "data/advantage/d", "batch", batch_table(["b"]))
    table = read_rows(local_files, [first, second], ["prompt_len", "group_id"])
    assert table.to_pydict() == {"prompt_len": [2] * 4, "group_id": ["a", "a", "b", "b"]}
    with pytest.raises(ObjectCorrupt, match="two files of one node have the same row"):
        read_rows(local_files, [first, first])
    with pytest.raises(ValueError, match="no rows"):
        read_rows(local_files, [])


def test_other_content_gets_another_name(local_files: Files):
    one, other = (
        write_data(local_files, "data/train/d", "packing.json", data) for data in (b"[1]", b"[2]")
    )
    assert one.path != other.path
    assert one.path == f"data/train/d/packing-{one.sha256[:16]}.json"
    assert write_data(local_files, "data/train/d", "packing.json", b"[1]") == one
