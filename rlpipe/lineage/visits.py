"""Visits of rows: how many samples of each drawn row passed in an iteration.

The reward node has the scores of the accepted groups. Groups that a filter rejected have no row
there, and are often the ones that all samples solve. The rollout counted them while it sampled.

Entry points: `row_visits`, `group_visits`, `rejected_visits`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rlpipe.batch.files import read_rewards
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import Plans
from rlpipe.types import Node, Sample, Stage

OUTPUT = "rejected_visits"
"""Output of a rollout node: group id → [passed, scored samples], of scored groups that were
dropped."""


def row_visits(
    files: Files, branch: str, iteration: int, pass_threshold: float
) -> dict[int, tuple[int, int]]:
    """Return row → (passed, scored samples) of the commit of an iteration.

    A row that was drawn twice has its later visit. Rows of plans without a curriculum are unknown.

    Raises: ObjectMissing, ObjectCorrupt.
    """
    commit = Branches(files).of_iteration(branch, iteration)
    nodes = Nodes(files)
    rewards = read_rewards(files, nodes.get(Stage.REWARD, commit.nodes[Stage.REWARD]))
    rollout = nodes.get(Stage.ROLLOUT, commit.nodes[Stage.ROLLOUT])
    visits = group_visits(rollout, rewards, pass_threshold)
    plans = map(Plans(files).read, commit.plans)
    groups = (group for plan in plans for group in plan.groups)
    return {
        group.row[0]: visits[group.group_id]
        for group in groups
        if group.row is not None and group.group_id in visits
    }


def group_visits(
    rollout: Node, rewards: Iterable[RewardRow], pass_threshold: float
) -> dict[str, tuple[int, int]]:
    """Return group id → (passed, scored samples) of an iteration, from its nodes."""
    visits = passed_samples(((row.group_id, row.reward) for row in rewards), pass_threshold)
    rejected = rollout.outputs.get(OUTPUT, {})
    return visits | {group_id: (passed, scored) for group_id, (passed, scored) in rejected.items()}


def rejected_visits(
    scored: Mapping[str, Sequence[Sample]], dropped: Collection[str], pass_threshold: float
) -> dict[str, Any]:
    """Return the outputs of a rollout about the scored groups that it dropped; {} without any."""
    rewards = (
        (group_id, sample.reward)
        for group_id, samples in scored.items()
        if group_id in dropped
        for sample in samples
    )
    visits = passed_samples(rewards, pass_threshold)
    return {OUTPUT: {group_id: list(pair) for group_id, pair in visits.items()}} if visits else {}


def passed_samples(
    rewards: Iterable[tuple[str, float | None]], pass_threshold: float
) -> dict[str, tuple[int, int]]:
    """Return group id → (passed, scored samples). A reward None was not scored."""
    counts: dict[str, tuple[int, int]] = {}
    for group_id, reward in rewards:
        if reward is not None:
            passed, scored = counts.get(group_id, (0, 0))
            counts[group_id] = (passed + (reward >= pass_threshold), scored + 1)
    return counts
