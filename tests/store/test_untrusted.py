"""Bytes of a store that anybody may have written: whatever they are, reading them is right or one named error."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.errors import ObjectCorrupt, RlpipeError
from rlpipe.store.records import digest, seal, unseal
from rlpipe.store.rows import samples_to_table, table_to_samples
from rlpipe.store.schema import decode, encode
from rlpipe.types import Commit, DataState, Node, Plan, PlannedGroup, Record, Stage
from tests.store.lineage import batch_table, group, make_node

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
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
    Commit: Commit(branch="run", iteration=0, plans=("p",), nodes={Stage.TRAIN: "t"}, data=DataState(), config_digest="c"),
}


@pytest.mark.parametrize("kind", RECORDS)
@given(data=st.data())
def test_a_sealed_record_of_any_values_is_read_or_corrupt(kind: type[Record], data: st.DataObject):
    content = RECORDS[kind].model_dump(mode="json")
    for name in data.draw(st.lists(st.sampled_from(sorted(content)), max_size=3)):
        content[name] = data.draw(JSON)
    sealed = json.dumps({**content, "sha256": digest(content, "x")}).encode()
    with suppress(ObjectCorrupt):
        read = unseal(kind, sealed, "x")
        assert unseal(kind, seal(read, "x"), "x") == read


@given(data=st.binary(max_size=200))
def test_any_bytes_are_no_record(data: bytes):
    with pytest.raises(ObjectCorrupt):
        unseal(Commit, data, "x")


def test_a_record_of_bottomless_depth_is_corrupt():
    with pytest.raises(ObjectCorrupt):
        unseal(Commit, b'{"a":' * 100_000, "x")


@pytest.mark.parametrize(
    "make", [lambda: encode(samples_to_table([*group("a"), *group("b")], 0)), lambda: encode(batch_table(["a", "b"]))]
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
