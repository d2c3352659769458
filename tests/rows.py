"""Rows of samples that no test has to store first."""

from __future__ import annotations

from collections.abc import Sequence

from rlpipe.batch.rows import RolloutRows
from rlpipe.store.parquet.rows import samples_to_table
from rlpipe.store.parquet.schema import StoredTable, encode
from rlpipe.types import Sample


def rows_of(samples: Sequence[Sample], *, routed: bool = False) -> RolloutRows:
    """The rows of a rollout with one shard."""
    shard = StoredTable(encode(samples_to_table(samples, 0)), "samples")
    return RolloutRows.of_shards([shard], routed=routed)
