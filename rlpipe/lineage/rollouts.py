"""Read the stored rollouts of a run as rows: samples with their rewards and advantages.

`iterations` lists the rollouts of a run, `find` returns the nodes of one, `sample_rows` its rows.
`unfinished` returns the rollouts of iterations that run or have failed after sampling.
The commit of an iteration names the rollout that it trained on. A rollout that was only sampled has
no commit, so `rollouts/<run>/<k>.json` names it (`rlpipe.store.notes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import PurePosixPath
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
from rlpipe.store.plans import Plans
from rlpipe.types import Node, Stage

ADVANTAGES = pa.list_(pa.float32())
SKEW_S = 60
"""Difference of the clocks of a driver and of the store, at most."""

Key = tuple[str, int]
"""(group_id, index) of a sample."""


class StoredRollout(NamedTuple):
    """The nodes of one rollout; None for a stage that has not run."""

    iteration: int
    rollout: Node
    reward: Node | None
    advantage: Node | None


def find(files: Files, run: str, k: int) -> StoredRollout | None:
    """Return the rollout of iteration k of a run, trained or only sampled.

    Raises: ObjectMissing if one of its nodes is missing; ObjectCorrupt.
    """
    digests = _node_digests(files, run, k)
    if digests is None:
        return None
    nodes = {
        stage: Nodes(files).get(stage, digests[stage])
        for stage in (Stage.ROLLOUT, Stage.REWARD, Stage.ADVANTAGE)
        if stage in digests
    }
    return StoredRollout(
        k, nodes[Stage.ROLLOUT], nodes.get(Stage.REWARD), nodes.get(Stage.ADVANTAGE)
    )


def iterations(files: Files, run: str) -> list[int]:
    """Return the iterations of a run that have a rollout, in order; without those of its parent."""
    return sorted({*Branches(files).committed(run), *noted_iterations(files, run)})


def unfinished(files: Files, run: str) -> dict[int, StoredRollout]:
    """Return k → the newest rollout of iteration k, of iterations that no record names yet.

    Raises: ObjectMissing, ObjectCorrupt.
    """
    branch = Branches(files).find(run)
    if branch is None:
        return {}
    known = iterations(files, run)
    # Rollouts of an asynchronous run are older than the commits before theirs.
    ahead = int(branch.config.get("async_buffer_size", 0))
    before = Branches(files).committed(run)[: -ahead or None]
    since = Branches(files).read(run, before[-1]).created if before else branch.created
    rewards = {
        reward.parents.get("rollout"): reward for reward in _nodes_since(files, Stage.REWARD, since)
    }
    found: dict[int, StoredRollout] = {}
    for node in _nodes_since(files, Stage.ROLLOUT, since):
        if not any(name.startswith(f"{run}:") for name in _groups(node)):
            continue  # without a request: most nodes are of other runs
        plan = Plans(files).read(node.parents["plan"])
        if plan.branch == run and plan.iteration not in known:
            stored = StoredRollout(plan.iteration, node, rewards.get(node.digest), None)
            found[plan.iteration] = max(
                (found.get(plan.iteration, stored), stored), key=lambda one: one.rollout.created
            )
    return dict(sorted(found.items()))


def _groups(rollout: Node) -> list[str]:
    """Return the ids of the groups that a rollout accepted or dropped."""
    return [*rollout.outputs.get("accepted", ()), *rollout.outputs.get("dropped", ())]


def _nodes_since(files: Files, stage: Stage, since: str) -> Iterator[Node]:
    """Yield the nodes of a stage that were written after a time."""
    first_s = datetime.fromisoformat(since).timestamp() - SKEW_S if since else 0
    for entry in files.entries(f"nodes/{stage.value}"):
        if entry.modified_s >= first_s:
            yield Nodes(files).get(stage, PurePosixPath(entry.path).stem)


def sample_rows(files: Files, stored: StoredRollout) -> pa.Table:
    """Return all rows of a rollout: the stored columns but the routed experts, with their rewards.

    `iteration` is the run's. Two columns are added: `accepted` (the rollout accepted the group) and
    `advantages` (of each response token; null if the sample was not trained). `drop_reason` is the
    rollout's or the advantage stage's. Raises: ObjectMissing, ObjectCorrupt.
    """
    names = [name for name in SAMPLES.names if name != EXPERTS]
    table = read_rows(files, stored.rollout.files, names)
    keys = list(zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True))
    accepted = set(stored.rollout.outputs.get("accepted", ()))
    dropped = dict(stored.rollout.outputs.get("dropped", {}))
    if stored.advantage:
        dropped |= stored.advantage.outputs.get("dropped", {})
    advantages = _advantages(files, stored.advantage)
    replaced = {
        "iteration": [stored.iteration] * len(keys),
        "drop_reason": [dropped.get(group_id) for group_id, _ in keys],
        **_reward_columns(files, stored.reward, keys, table),
    }
    for name, values in replaced.items():
        number = table.schema.get_field_index(name)
        table = table.set_column(number, name, pa.array(values, table.schema.field(name).type))
    added = {
        "accepted": pa.array([group_id in accepted for group_id, _ in keys], pa.bool_()),
        "advantages": pa.array([advantages.get(key) for key in keys], ADVANTAGES),
    }
    for name, column in added.items():
        table = table.append_column(name, column)
    return table.replace_schema_metadata(None)


def _reward_columns(
    files: Files, reward: Node | None, keys: list[Key], table: pa.Table
) -> dict[str, list[Any]]:
    if reward is None:
        return {}
    reward_of = {(row.group_id, row.index): row for row in read_rewards(files, reward)}
    rows = [reward_of.get(key) for key in keys]
    errors = table["error"].to_pylist()
    return {
        "reward": [row.reward if row else None for row in rows],
        "reward_parts": [list(row.parts.items()) if row else [] for row in rows],
        "error": [
            error or (row.error if row else None) for error, row in zip(errors, rows, strict=True)
        ],
    }


def _advantages(files: Files, advantage: Node | None) -> dict[Key, list[float]]:
    if advantage is None or not advantage.files:
        return {}
    rows = read_rows(files, advantage.files, ["group_id", "index", "advantages"]).to_pylist()
    return {(row["group_id"], row["index"]): row["advantages"] for row in rows}


def _node_digests(files: Files, run: str, k: int) -> Mapping[Stage, str] | None:
    with suppress(ObjectMissing):
        return Branches(files).read(run, k).nodes
    with suppress(ObjectMissing):
        return read_note(files, run, k)
    return None
