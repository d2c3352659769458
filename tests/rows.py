"""Rows of samples that a test does not have to store first."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from rlpipe.batch.rows import RolloutRows
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import samples_to_table
from rlpipe.store.parquet.shards import write_table
from rlpipe.types import Node, Sample, Stage


def rows_of(samples: Sequence[Sample], *, routed: bool = False) -> RolloutRows:
    """The rows of a rollout with one shard, which stays in memory."""
    with tempfile.TemporaryDirectory() as folder:
        files = Files(folder)
        record = write_table(files, "shards", "shard", samples_to_table(samples, 0))
        node = Node(stage=Stage.ROLLOUT, digest="d" * 64, files=(record,))
        return RolloutRows.of_node(files, node, routed=routed)
