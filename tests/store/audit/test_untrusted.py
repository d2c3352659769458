"""Untrusted bytes in a store: reading them gives a right result or one named error."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.errors import ObjectCorrupt, RlpipeError, StoreError
from rlpipe.store.epochs import Epochs, Lease
from rlpipe.store.holders import Holder
from rlpipe.store.notes import note_path, noted_iterations, read_note
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import samples_to_table, table_to_samples
from rlpipe.store.parquet.schema import decode, encode
from rlpipe.store.plans import Plans
from rlpipe.store.records import digest, now, seal, unseal
from rlpipe.store.segments import Segment, Segments
from rlpipe.types import Commit, DataState, Node, Plan, PlannedGroup, Record, Stage
from tests.store.lineage import batch_table, group, make_node

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
RECORDS: dict[type[Record], Record] = {
    Node: make_node(Stage.TRAIN, {"batch": "d"}),
    Plan: Plan(
        branch="run",
        iteration=0,
        groups=(PlannedGroup(group_id="g", prompt="p", prompt_ids=(1,), seeds=(1,)),),
        before=DataState(),
        after=DataState(),
    ),
    Commit: Commit(
        branch="run",
        iteration=0,
        plans=("p",),
        nodes={Stage.TRAIN: "t"},
        data=DataState(),
        config_digest="c",
    ),
}


@pytest.mark.parametrize("kind", RECORDS)
@given(data=st.data())
def test_a_sealed_record_with_any_values_is_read_or_corrupt(
    kind: type[Record], data: st.DataObject
):
    content = RECORDS[kind].model_dump(mode="json")
    for name in data.draw(st.lists(st.sampled_from(sorted(content)), max_size=3)):
        content[name] = data.draw(JSON)
    sealed = json.dumps({**content, "sha256": digest(content, "x")}).encode()
    with suppress(ObjectCorrupt):
        read = unseal(kind, sealed, "x")
        assert unseal(kind, seal(read, "x"), "x") == read


@given(data=st.binary(max_size=200))
def test_random_bytes_are_corrupt(data: bytes):
    with pytest.raises(ObjectCorrupt):
        unseal(Commit, data, "x")


def test_a_deeply_nested_record_is_corrupt():
    with pytest.raises(ObjectCorrupt):
        unseal(Commit, b'{"a":' * 100_000, "x")


@pytest.mark.parametrize(
    "make",
    [
        lambda: encode(samples_to_table([*group("a"), *group("b")], 0)),
        lambda: encode(batch_table(["a", "b"])),
    ],
)
@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_shard_is_read_or_corrupt(make: Callable[[], bytes], data: st.DataObject):
    shard = bytearray(make())
    for _ in range(data.draw(st.integers(1, 4))):
        shard[data.draw(st.integers(0, len(shard) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(shard)) | st.just(len(shard)))
    with suppress(RlpipeError):
        table = decode(bytes(shard[:cut]), "x")
        if "prompt" in table.column_names:
            table_to_samples(table)
        table.to_pylist()


LEASE = Lease(
    branch="b", epoch=1, holder=Holder.here(), since=now(), renewed=now(), lease_s=60.0
).model_dump()
SEGMENT = Segment(branch="b", version=1, epoch=1, weights="w" * 64, segment="s" * 64).model_dump()


def _sealed(content: dict[str, Any]) -> bytes:
    return json.dumps({**content, "sha256": digest(content, "x")}).encode()


@given(
    name=st.sampled_from(sorted(LEASE)),
    value=JSON | st.sampled_from(["2026-01-01", "9999-12-31T23:59:59+00:00", 1e300]),
)
def test_a_lease_with_any_values_is_expired_valid_or_corrupt(name: str, value: object):
    with suppress(ObjectCorrupt):
        lease = unseal(Lease, _sealed({**LEASE, name: value}), "x")
        assert lease.expired(10.0) in (True, False)


@pytest.mark.parametrize("pid", [-1, 0, 2**31, 2**70])
def test_a_lease_without_a_possible_process_is_corrupt(pid: int):
    with pytest.raises(ObjectCorrupt, match="pid"):
        unseal(Lease, _sealed({**LEASE, "holder": {**LEASE["holder"], "pid": pid}}), "x")


@pytest.mark.parametrize("change", [{"branch": "c"}, {"epoch": 7}, {"epoch": -1}])
def test_a_lease_under_another_name_does_not_take_a_branch(change: dict[str, Any], tmp_path: Path):
    files = Files(tmp_path)
    files.create("branches/b/epochs/00000001.json", _sealed({**LEASE, **change}))
    for ask in (Epochs(files).newest, Epochs(files).acquire):
        with pytest.raises(ObjectCorrupt, match="the record belongs to another epoch"):
            ask("b")


@pytest.mark.parametrize(
    "change", [{"branch": "c"}, {"epoch": 7}, {"version": 2}, {"weights": "v" * 64}]
)
def test_a_segment_under_another_name_replaces_no_state(change: dict[str, Any], tmp_path: Path):
    files = Files(tmp_path)
    files.create(
        f"branches/b/segments/00000001-00000001-{'w' * 12}.json", _sealed({**SEGMENT, **change})
    )
    with pytest.raises(ObjectCorrupt, match="another segment"):
        Segments(files).find("b", 1, "w" * 64)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"../../etc", b"0" * 63])
def test_a_draw_that_names_no_plan_is_corrupt(data: bytes, tmp_path: Path):
    plan = RECORDS[Plan]
    assert isinstance(plan, Plan)
    plans = Plans(Files(tmp_path))
    files = Files(tmp_path)
    plans.draw(plan)
    (draw,) = files.list("draws")
    files.delete(draw)
    files.create(draw, data)
    for ask in (lambda: plans.drawn(plan.branch, 0, 0, plan.before), lambda: plans.draw(plan)):
        with pytest.raises(ObjectCorrupt, match="digest of a plan"):
            ask()


@pytest.mark.parametrize(
    "data", [b"[", b"[]", b"1", b'{"rollout": 1}', b'{"x": "y"}', b"[" * 100_000, b"\xff"]
)
def test_a_malformed_note_is_corrupt_and_other_names_are_no_notes(data: bytes, tmp_path: Path):
    files = Files(tmp_path)
    files.create(note_path("b", 0), data)
    files.create("rollouts/b/²", b"")
    assert noted_iterations(files, "b") == [0]
    with pytest.raises(ObjectCorrupt):
        read_note(files, "b", 0)


SAMPLE_ROWS = samples_to_table([*group("a"), *group("b")], 0)
BATCH_ROWS = batch_table(["a", "b"])


def _shard(table: pa.Table, name: str, value: object) -> bytes:
    """Return a table of the right schema whose first row has any values, as from another writer."""
    place = table.schema.get_field_index(name)
    column = pa.array([value, *table[name].to_pylist()[1:]], table.schema.field(name).type)
    written = io.BytesIO()
    pq.write_table(table.set_column(place, table.schema.field(name), column), written)
    return written.getvalue()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", "{"),
        ("prompt", "[" * 100_000),
        ("metadata", "{"),
        ("metadata", "[]"),
        ("status", "done"),
        ("weight_versions", [{"tokens": 5, "version": 1}, {"tokens": -2, "version": 1}]),
        ("weight_versions", [{"tokens": -3, "version": 1}]),
        ("weight_versions", [{"tokens": 2, "version": 1}]),
        ("response_ids", [-1, 1, 1]),
        ("loss_mask", [1, 2, 1]),
        ("rollout_log_probs", [0.0]),
        ("rollout_routed_experts", [1, 2, 3]),
        ("reward_parts", [("a", float("nan"))]),
        ("reward", float("inf")),
        ("index", 1),
    ],
)
def test_a_foreign_row_of_samples_is_corrupt(name: str, value: object):
    with pytest.raises(ObjectCorrupt):
        table_to_samples(decode(_shard(SAMPLE_ROWS, name, value), "x"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", [1]),
        ("prompt_len", 9),
        ("loss_mask", [2, 1, 1]),
        ("advantages", None),
        ("values", [0.0] * 3),
        ("rollout", 5),
    ],
)
def test_a_foreign_row_of_a_batch_is_corrupt_even_if_it_only_lacks_a_column(
    name: str, value: object
):
    with pytest.raises(ObjectCorrupt, match="row"):
        decode(_shard(BATCH_ROWS, name, value), "x")


@pytest.mark.parametrize(
    "table",
    [
        SAMPLE_ROWS.append_column("x", pa.array([1] * 4)),
        SAMPLE_ROWS.append_column("index", SAMPLE_ROWS["index"]),
        SAMPLE_ROWS.drop(["prompt"]),
        SAMPLE_ROWS.replace_schema_metadata({}),
        SAMPLE_ROWS.replace_schema_metadata(BATCH_ROWS.schema.metadata),
        SAMPLE_ROWS.set_column(2, "index", pa.array(["0", "1", "0", "1"])),
    ],
    ids=[
        "a column more",
        "a column twice",
        "a column less",
        "of no kind",
        "of another kind",
        "text for numbers",
    ],
)
def test_a_foreign_table_is_corrupt(table: pa.Table):
    written = io.BytesIO()
    pq.write_table(table, written)
    with pytest.raises(ObjectCorrupt):
        decode(written.getvalue(), "x")


def test_a_password_in_the_stores_address_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hunter2@127.0.0.1:9")
    with pytest.raises(StoreError, match="AWS_ENDPOINT_URL") as caught:
        Files("s3://bucket/x").exists("a")
    assert "hunter2" not in str(caught.value)
