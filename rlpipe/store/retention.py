"""Retention: objects that may be removed although records name them.

Checkpoints take most of a store. Every state between two checkpoints can be trained again from the
batches since the older one. So all checkpoints of a branch may be removed except

    the newest `keep_last`, and those of every `keep_every`-th weight version
    those from which a fork or another run (for example an evaluation) started
    those of segments, and those from which segments were trained
    those of every refresh of the reference, because later states need them

A whole run may be removed if nothing else uses it: no fork, no run that started from its weights or
trains on its rollouts, no driver. Its tables and receipts are removed first, then its commits from
the newest on, and its configuration last. A removal that is killed leaves a shorter run with tables
that can be computed again, and the same command continues. Samples and batches of a run that stays
are never removed: audit, replay and reprocessing need them.

Nodes and files of a removed run become garbage, and `gc` removes them.

Entry points: `spare_checkpoints`, `branch_removal`, `record_removed_checkpoints`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from rlpipe.errors import ConfigError
from rlpipe.store.branches import Branches, config_path, is_commit, parse_commit_name
from rlpipe.store.epochs import EPOCH_NAME, SKEW_S, Epochs
from rlpipe.store.nodes import Nodes, checkpoint_digest, node_path
from rlpipe.store.objects.files import Files
from rlpipe.store.receipts import Receipts, node_receipt_path
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import Node, Stage


class Retention(NamedTuple):
    """Checkpoints of a run that are kept, in addition to those that other runs need."""

    keep_last: int
    """Number of newest checkpoints, at least 1."""
    keep_every: int | None = None
    """Also keep every weight version that this number divides; None: no others."""


class Removal(NamedTuple):
    """An object that may be removed, and the reason."""

    path: str
    reason: str


def spare_checkpoints(
    files: Files, policy: Retention, grace_s: float, branches: Collection[str] = ()
) -> list[Removal]:
    """Return receipts, records and files of the checkpoints that may be removed.

    Each record comes before the files that it names. `branches`: only these, default all.
    `grace_s`: younger checkpoints are kept. Raises: ConfigError if the policy keeps nothing;
    ObjectMissing, ObjectCorrupt if a record cannot be read, because it may name any checkpoint.
    """
    if policy.keep_last < 1 or (policy.keep_every is not None and policy.keep_every < 1):
        raise ConfigError(
            "a run keeps at least one checkpoint",
            where="keep_last",
            found=tuple(policy),
            expected="at least 1",
        )
    all_branches = Branches(files)
    needed = _needed_checkpoints(files, all_branches)
    young = {
        entry.path
        for entry in files.entries(f"nodes/{Stage.CHECKPOINT}")
        if entry.modified_s >= time.time() - grace_s
    }
    removals: list[Removal] = []
    for branch in branches or all_branches.names():
        checkpoints = list(_checkpoints(files, all_branches, branch))
        newest = {node.digest for _, node in checkpoints[: policy.keep_last]}
        for version, node in checkpoints:
            path = node_path(Stage.CHECKPOINT, node.digest)
            regular = policy.keep_every is not None and version % policy.keep_every == 0
            if not (node.digest in newest | needed or regular or path in young):
                # The order matters: a removal that is killed leaves no record of missing files.
                reason = f"checkpoint of {branch}, weight version {version}"
                receipt = node_receipt_path(Stage.CHECKPOINT, node.digest)
                paths = [
                    *([receipt] if files.exists(receipt) else []),
                    path,
                    *(record.path for record in node.files),
                ]
                removals += [Removal(path, reason) for path in paths]
    return removals


def record_removed_checkpoints(
    files: Files, removals: Iterable[Removal], leaving: Collection[str]
) -> None:
    """Record the checkpoints of runs that stay, before the first one is removed.

    Commits of these runs may name the checkpoints. `leaving`: paths of all objects that are about
    to be removed.
    """
    for removal in removals:
        if removal.path in leaving and removal.path.startswith(f"nodes/{Stage.CHECKPOINT}/"):
            node = Nodes(files).get(Stage.CHECKPOINT, _digest(removal.path))
            states = {
                node_path(stage, node.parents["weights"]) for stage in (Stage.TRAIN, Stage.SEGMENT)
            }
            if states & set(leaving):  # its run is removed too
                continue
            Receipts(files).write_removed(node, files.sha256(removal.path))


def branch_removal(files: Files, branch: str, leaving: Collection[str] = ()) -> list[Removal]:
    """Return the records of a branch in the order of their removal.

    `leaving`: branches that are removed before it. Raises: ObjectMissing if the branch has no
    records at all; ConfigError if another run uses it, or a driver runs it.
    """
    branches = Branches(files)
    names = files.list(f"branches/{branch}")
    if not names:
        branches.get(branch)  # raises ObjectMissing
    if users := sorted(user for user in _users(files, branches, branch) if user[0] not in leaving):
        raise ConfigError(
            "the run is still in use",
            where=f"run {branch}",
            found="; ".join(f"{user}: {reason}" for user, reason in users),
            do=f"remove first: {', '.join(sorted({user for user, _ in users}))}; or wait for its "
            "driver to end",
        )
    config = config_path(branch)
    derived = [
        name
        for name in names
        if name.startswith((f"branches/{branch}/scalars/", f"branches/{branch}/receipts/"))
    ]
    notes = [
        name
        for folder in ("rollouts", "gates")
        for name in reversed(files.list(f"{folder}/{branch}"))
    ]
    commits = [name for name in reversed(names) if is_commit(name)]
    # Epochs stay, so that a suspended driver of the removed run is still refused.
    others = [
        name
        for name in names
        if name not in {*derived, *commits, config} and not EPOCH_NAME.fullmatch(name)
    ]
    paths = [*derived, *notes, *commits, *others, *([config] if config in names else [])]
    return [Removal(path, f"run {branch}") for path in paths]


def _checkpoints(files: Files, branches: Branches, branch: str) -> Iterator[tuple[int, Node]]:
    """Yield (weight version, checkpoint node) of a branch's own iterations, newest first."""
    nodes = Nodes(files)
    segments = Segments(files)
    for commit in branches.walk(branch):
        if commit.branch != branch:
            return
        if recorded := commit.nodes.get(Stage.TRAIN):
            version = commit.iteration + 1
            current = current_state(segments, branch, version, recorded)
            for state in dict.fromkeys((current, recorded)):
                node = nodes.find(Stage.CHECKPOINT, checkpoint_digest(state))
                if node is not None:
                    yield version, node


def _needed_checkpoints(files: Files, branches: Branches) -> set[str]:
    """Return the digests of the checkpoints that forks, runs, segments or references need."""
    nodes = Nodes(files)
    segments = Segments(files)
    needed = set()
    # A run may have started from any checkpoint, which is then a parent of its init node.
    for path in files.list(f"nodes/{Stage.INIT}"):
        needed |= set(nodes.get(Stage.INIT, _digest(path)).parents.values())
    for path in files.list(f"nodes/{Stage.SEGMENT}"):
        segment = nodes.get(Stage.SEGMENT, _digest(path))
        needed |= {checkpoint_digest(segment.digest), segment.parents["base"]}
    for branch in branches.names():
        record = branches.get(branch)
        if record.parent:
            # A fork continues from the recorded state or from a segment of either branch.
            origin, k = parse_commit_name(record.parent)
            recorded = branches.read(origin, k).nodes[Stage.TRAIN]
            states = {
                recorded,
                *(current_state(segments, owner, k + 1, recorded) for owner in (branch, origin)),
            }
            needed |= {checkpoint_digest(state) for state in states}
        if interval := (record.config.get("reference") or {}).get("ref_update_interval"):
            done = int(record.config.get("start_rollout_id") or 0)
            needed |= {
                node.digest
                for version, node in _checkpoints(files, branches, branch)
                if (done + version) % int(interval) == 0
            }
    return needed


def _users(files: Files, branches: Branches, branch: str) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of each run that prevents the removal of a branch."""
    lease = Epochs(files).newest(branch)
    if lease is not None and not lease.expired(SKEW_S):
        yield branch, f"driven by process {lease.holder.pid} on {lease.holder.host}"
    nodes = Nodes(files)
    weights = set[str]()
    if (record := branches.find(branch)) is not None:
        weights = {node.digest for _, node in _checkpoints(files, branches, branch)}
        weights.add(checkpoint_digest(record.init))
        # Nodes of training have the adapters from which a run may have started.
        commits = branches.walk(branch)
        weights |= {one.nodes.get(Stage.TRAIN, "") for one in commits if one.branch == branch}
    for name in branches.names():
        record = branches.get(name)
        if name != branch:
            debug = record.config.get("debug") or {}
            if record.parent and parse_commit_name(record.parent)[0] == branch:
                yield name, f"a fork of {record.parent}"
            if isinstance(debug, dict) and debug.get("load_debug_rollout_data") == branch:
                yield name, "trains on its rollouts"
            if weights & set(nodes.get(Stage.INIT, record.init).parents.values()):
                yield name, "started from its weights"


def _digest(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".json")
