"""The stored rollouts of a run as rows: samples with what the verifier said of them and what they
were trained with.

A rollout that was trained on is named by the commit of its iteration. One that was only sampled has
no commit, so `rollouts/<run>/<k>.json` names it (`store.notes`).

Not here: where rows lie (`stage_files`, `store.parquet.shards`), or showing them
(`tools.rollouts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa

from rlpipe.batch.files import read_rewards
from rlpipe.errors import ObjectMissing
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.notes import noted_iterations, read_note
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import EXPERTS
from rlpipe.store.parquet.schema import SAMPLES
from rlpipe.store.parquet.shards import read_rows
from rlpipe.types import Node, Stage

ADVANTAGES = pa.list_(pa.float32())


class StoredRollout(NamedTuple):
    """The nodes of one rollout; those of stages that it has not seen are None."""

    iteration: int
    rollout: Node
    reward: Node | None
    advantage: Node | None


def find(files: Files, run: str, k: int) -> StoredRollout | None:
    """The rollout of iteration k of a run, trained or only sampled. Raises: ObjectMissing for a
    node, ObjectCorrupt."""
    named = _named(files, run, k)
    if named is None:
        return None
    nodes = {
        stage: Nodes(files).get(stage, named[stage])
        for stage in (Stage.ROLLOUT, Stage.REWARD, Stage.ADVANTAGE)
        if stage in named
    }
    return StoredRollout(
        k, nodes[Stage.ROLLOUT], nodes.get(Stage.REWARD), nodes.get(Stage.ADVANTAGE)
    )


def iterations(files: Files, run: str) -> list[int]:
    """The iterations of a run that have a rollout, in order; of a fork those of its own."""
    return sorted({*Branches(files).committed(run), *noted_iterations(files, run)})


def sample_rows(files: Files, stored: StoredRollout) -> pa.Table:
    """All rows of a rollout: the columns of `store.parquet.schema.SAMPLES` (but routed experts)
    with their rewards, and

    `iteration`: that of the run; `accepted`: its group made the batch; `drop_reason`: why it did
    not, or was not trained; `advantages`: of each response token, null where it was not trained.
    Raises: ObjectMissing, ObjectCorrupt.
    """
    table = read_rows(
        files, stored.rollout.files, [name for name in SAMPLES.names if name != EXPERTS]
    )
    keys = list(zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True))
    accepted = set(stored.rollout.outputs.get("accepted", ()))
    dropped = {
        **stored.rollout.outputs.get("dropped", {}),
        **(stored.advantage.outputs.get("dropped", {}) if stored.advantage else {}),
    }
    trained = _advantages(files, stored.advantage)
    columns = {
        "iteration": [stored.iteration] * len(keys),
        "drop_reason": [dropped.get(group_id) for group_id, _ in keys],
        **_scored(files, stored.reward, keys, table),
    }
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pa.array(values, table.schema.field(name).type))
    table = table.append_column(
        "accepted", pa.array([group_id in accepted for group_id, _ in keys], pa.bool_())
    )
    table = table.append_column(
        "advantages", pa.array([trained.get(key) for key in keys], ADVANTAGES)
    )
    return table.replace_schema_metadata(None)


def _scored(
    files: Files, reward: Node | None, keys: list[tuple[str, int]], table: pa.Table
) -> dict[str, list[Any]]:
    if reward is None:
        return {}
    said = {(row.group_id, row.index): row for row in read_rewards(files, reward)}
    errors = table["error"].to_pylist()
    rows = [said.get(key) for key in keys]
    return {
        "reward": [row.reward if row else None for row in rows],
        "reward_parts": [list(row.parts.items()) if row else [] for row in rows],
        "error": [
            error or (row.error if row else None) for error, row in zip(errors, rows, strict=True)
        ],
    }


def _advantages(files: Files, advantage: Node | None) -> dict[tuple[str, int], list[float]]:
    if advantage is None or not advantage.files:
        return {}
    rows = read_rows(files, advantage.files, ["group_id", "index", "advantages"]).to_pylist()
    return {(row["group_id"], row["index"]): row["advantages"] for row in rows}


def _named(files: Files, run: str, k: int) -> Mapping[Stage, str] | None:
    with suppress(ObjectMissing):
        return Branches(files).read(run, k).nodes
    with suppress(ObjectMissing):
        return read_note(files, run, k)
    return None
