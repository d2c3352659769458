"""Parts of a stored table (rlpipe.store.parquet.schema.StoredTable)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.errors import ObjectCorrupt
from rlpipe.store.parquet import schema
from rlpipe.store.parquet.schema import REWARDS, StoredTable, encode, make_table

ROWS = 11


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Rewards of 11 rows in row groups of 3."""
    monkeypatch.setattr(schema, "ROW_GROUP_ROWS", 3)
    values = {
        "group_id": [f"g{row // 2}" for row in range(ROWS)],
        "index": [row % 2 for row in range(ROWS)],
        "reward": [row / 8 for row in range(ROWS)],
        "parts": [[("length", float(row))] * (row % 3 > 0) for row in range(ROWS)],
    }
    return encode(make_table(REWARDS, values, "rewards"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.sets(st.integers(0, ROWS - 1)))
def test_rows_are_read_from_any_row_groups(stored: bytes, rows: set[int]):
    table = StoredTable(stored, "x")
    part = table.read_part(["parts"], np.array(sorted(rows), np.int64))
    whole = table.read().select(["group_id", "index", "parts"])
    assert part.to_pylist() == [whole.to_pylist()[row] for row in sorted(rows)]
    assert table.num_rows == ROWS and table.read_part(["parts"]).equals(whole)


def test_a_damaged_row_group_is_named_where_it_is_read(stored: bytes):
    first = stored.index(b"g0")
    damaged = stored[: first + 1] + b"?" + stored[first + 2 :]
    with pytest.raises(ObjectCorrupt, match="not a readable Parquet file"):
        StoredTable(damaged, "x").read_part(["reward"], np.array([0]))
    assert StoredTable(damaged, "x").read_part(["reward"], np.array([10])).num_rows == 1
