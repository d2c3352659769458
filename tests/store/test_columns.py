"""The table of columns: what is stored keeps its bytes, and everything else is derived from it."""

from __future__ import annotations

import dataclasses
import hashlib

import pyarrow as pa
import pytest

from rlpipe.batch.columns import RESPONSE_COLUMNS, BatchColumns
from rlpipe.store.columns import BATCH, REWARDS, SAMPLES, STORED, hook_names
from rlpipe.store.parquet.rows import FIELDS
from rlpipe.store.parquet.schema import WRITE_OPTIONS, encode, make_table
from rlpipe.store.tables.derived import DERIVED
from rlpipe.types import Sample

TABLES = pytest.mark.parametrize("table", [*STORED, *DERIVED], ids=lambda table: table.name)

PINNED = {
    "samples": "fb11589e9e14453b",
    "rewards": "f00387dd4a799b98",
    "batch": "45ca285091191af1",
}
"""First digits of the sha256 of a stored schema. Stores of every release depend on them: raise the
version of a table in `rlpipe.store.columns` and keep reading the old one, do not edit them. An
optional column changes no file that does not have it."""
OPTIONAL = [
    "images list<element: struct<sha256: string not null, rows: int32 not null, "
    "columns: int32 not null> not null> True"
]


@TABLES
def test_every_column_says_what_it_means(table):
    for column in table.columns:
        assert column.meaning.endswith((".", "`")) or column.meaning[-1].isalnum(), column.name
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("table", STORED, ids=lambda table: table.name)
def test_a_stored_schema_stays_as_it_is(table):
    optional = {column.name for column in table.columns if column.optional}
    fields = [
        f"{field.name} {field.type} {field.nullable}"
        for field in table.schema
        if field.name not in optional
    ]
    digest = hashlib.sha256(f"{fields} {table.version}".encode()).hexdigest()[:16]
    assert digest == PINNED[table.name]
    added = [field for field in table.schema if field.name in optional]
    assert [f"{field.name} {field.type} {field.nullable}" for field in added] in ([], OPTIONAL)


def test_the_columns_of_a_batch_are_those_of_the_table():
    fields = {field.name for field in dataclasses.fields(BatchColumns)}
    assert set(RESPONSE_COLUMNS) < fields
    assert set(BATCH.schema.names) - fields == {
        "group_id",
        "index",
        "prompt_len",
        "response_len",
        "loss_tokens",
        "row",
    }
    assert fields - set(BATCH.schema.names) == {"offsets", "prompt_lengths", "part"}


def test_the_fields_of_a_sample_that_are_stored_have_their_names_in_the_table():
    derived = {"iteration", "drop_reason", "prompt_tokens", "response_tokens"}
    assert set(SAMPLES.schema.names) - set(FIELDS) == derived
    assert set(FIELDS) < {field.name for field in dataclasses.fields(Sample)}


def test_hooks_get_each_column_of_a_batch_under_one_name():
    names = hook_names()
    assert set(names) == set(RESPONSE_COLUMNS) - {"loss_mask"}
    assert len(set(names.values())) == len(names)
    assert names["proximal_log_probs"] == "log_probs"
    assert names["reference_log_probs"] == "ref_log_probs"


@pytest.mark.parametrize("table", STORED, ids=lambda table: table.name)
def test_only_columns_of_the_table_have_parquet_options(table):
    options = WRITE_OPTIONS[table.schema.metadata[b"rlpipe"]]
    written = [
        *options["use_dictionary"],
        *options["column_encoding"],
        *options["write_statistics"],
    ]
    assert {leaf.split(".")[0] for leaf in written} <= set(table.schema.names)


def test_equal_rows_have_equal_bytes():
    values = {"group_id": ["g"], "index": [0], "reward": [1.0], "parts": [[("a", 0.5)]]}
    first = make_table(REWARDS.schema, values, "x")
    second = make_table(REWARDS.schema, {**values, "error": pa.nulls(1, pa.string())}, "x")
    assert encode(first) == encode(second)
