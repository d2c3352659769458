"""What may be deleted though something still names it, and what has to stay for it.

Checkpoints are most of a store, and every state between two of them can be trained again from the
batches since the one before. So of a branch's checkpoints all may go but

    the newest `keep_last`, and those of every `keep_every`-th weight version
    those that a fork, or another run (such as an evaluation of its own) started from
    those of states that a replay made anew (segments), and what they were trained from
    those of every refresh of the reference: later states need it

A whole run may go if nothing else names it: no fork, no run that started from its weights or trains
on its rollouts, no driver. What is drawn from its commits or says that they were there goes first
(tables, receipts), then its newest commits, its configuration last: a removal that is killed leaves
a shorter run whose tables are made anew, and the same command goes on. Rows of a run that stays are
never removed: they are what it can be audited, replayed and re-scored from.

Not here: what nothing names (`gc`), which is also what a removal leaves behind.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from rlpipe.errors import ConfigError
from rlpipe.store.branches import Branches, config_path, is_commit, parse_commit_name
from rlpipe.store.epochs import EPOCH_NAME, SKEW_S, Epochs
from rlpipe.store.nodes import Nodes, input_digest, node_path
from rlpipe.store.objects.files import Files
from rlpipe.store.receipts import Receipts, node_receipt_path
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import Node, Stage


class Retention(NamedTuple):
    """Which checkpoints of a run are kept, beside those that others need."""

    keep_last: int
    """The newest so many, at least 1."""
    keep_every: int | None = None
    """Those of every such weight version; None: no others."""


class Removal(NamedTuple):
    """One object that may go, and why."""

    path: str
    reason: str


def spare_checkpoints(
    files: Files, policy: Retention, grace_s: float, branches: Collection[str] = ()
) -> list[Removal]:
    """Receipts, records and files of the checkpoints that may go (of these branches, or of all),
    each before what it names.

    Younger ones than the grace period (seconds) stay. Raises: ConfigError if nothing would be kept;
    ObjectMissing, ObjectCorrupt if a record cannot be read: who knows what it names, so nothing may
    go.
    """
    if policy.keep_last < 1 or (policy.keep_every is not None and policy.keep_every < 1):
        raise ConfigError(
            "a run keeps a checkpoint",
            where="keep_last",
            found=tuple(policy),
            expected="at least 1",
        )
    known = Branches(files)
    needed = _needed(files, known)
    young = {
        entry.path
        for entry in files.entries(f"nodes/{Stage.CHECKPOINT}")
        if entry.modified_s >= time.time() - grace_s
    }
    removals: list[Removal] = []
    for branch in branches or known.names():
        kept = list(_checkpoints(files, known, branch))
        newest = {node.digest for _, node in kept[: policy.keep_last]}
        for version, node in kept:
            path = node_path(Stage.CHECKPOINT, node.digest)
            regular = policy.keep_every is not None and version % policy.keep_every == 0
            if not (node.digest in newest | needed or regular or path in young):
                reason = f"checkpoint of {branch}, weight version {version}"
                receipt = node_receipt_path(Stage.CHECKPOINT, node.digest)
                paths = [
                    *([receipt] if files.exists(receipt) else []),
                    path,
                    *(record.path for record in node.files),
                ]
                removals += [Removal(one, reason) for one in paths]
    return removals


def record_removed_checkpoints(
    files: Files, removals: Iterable[Removal], leaving: Collection[str]
) -> None:
    """Write down which checkpoints are about to be removed, before the first of them goes: commits
    that stay may name them.

    `leaving`: paths of all that is about to be removed.
    """
    for removal in removals:
        if removal.path in leaving and removal.path.startswith(f"nodes/{Stage.CHECKPOINT}/"):
            node = Nodes(files).get(Stage.CHECKPOINT, _digest(removal.path))
            states = {
                node_path(stage, node.parents["weights"]) for stage in (Stage.TRAIN, Stage.SEGMENT)
            }
            if states & set(leaving):
                continue
            Receipts(files).write_removed(node, files.sha256(removal.path))


def branch_removal(files: Files, branch: str, leaving: Collection[str] = ()) -> list[Removal]:
    """The records of a branch in the order in which they go; its nodes and files are garbage then.

    `leaving`: branches that are removed before it. Raises: ObjectMissing if there is no such
    branch, nor anything left of one; ConfigError if something else names it, or it is being driven.
    """
    known = Branches(files)
    names = files.list(f"branches/{branch}")
    if not names:
        known.get(branch)
    if users := sorted(user for user in _users(files, known, branch) if user[0] not in leaving):
        do = f"remove first: {', '.join(sorted({user for user, _ in users}))}; or wait for its driver to end"
        found = "; ".join(f"{user}: {why}" for user, why in users)
        raise ConfigError("this run is still needed", where=f"run {branch}", found=found, do=do)
    last = config_path(branch)
    witnesses = [
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
    others = [
        name
        for name in names
        if name not in {*witnesses, *commits, last} and not EPOCH_NAME.fullmatch(name)
    ]
    own = [*witnesses, *notes, *commits, *others, *([last] if last in names else [])]
    return [Removal(path, f"run {branch}") for path in own]


def _checkpoints(files: Files, branches: Branches, branch: str) -> Iterator[tuple[int, Node]]:
    """(weight version, checkpoint node) of a branch's own iterations that have one, newest
    first."""
    nodes = Nodes(files)
    segments = Segments(files)
    for commit in branches.walk(branch):
        if commit.branch != branch:
            return
        if recorded := commit.nodes.get(Stage.TRAIN):
            states = dict.fromkeys(
                (current_state(segments, branch, commit.iteration + 1, recorded), recorded)
            )
            for node in (nodes.find(Stage.CHECKPOINT, _of(state)) for state in states):
                if node is not None:
                    yield commit.iteration + 1, node


def _needed(files: Files, branches: Branches) -> set[str]:
    """Digests of the checkpoints that something else needs."""
    nodes = Nodes(files)
    needed = set()
    for path in files.list(f"nodes/{Stage.INIT}"):
        needed |= set(nodes.get(Stage.INIT, _digest(path)).parents.values())
    for path in files.list(f"nodes/{Stage.SEGMENT}"):
        segment = nodes.get(Stage.SEGMENT, _digest(path))
        needed |= {_of(segment.digest), segment.parents["base"]}
    for branch in branches.names():
        record = branches.get(branch)
        if record.parent:
            origin, k = parse_commit_name(record.parent)
            recorded = branches.read(origin, k).nodes[Stage.TRAIN]
            owners = (branch, origin)
            needed |= {
                _of(recorded),
                *(_of(current_state(Segments(files), owner, k + 1, recorded)) for owner in owners),
            }
        if interval := (record.config.get("reference") or {}).get("ref_update_interval"):
            needed |= {
                node.digest
                for version, node in _checkpoints(files, branches, branch)
                if version % int(interval) == 0
            }
    return needed


def _users(files: Files, branches: Branches, branch: str) -> Iterator[tuple[str, str]]:
    """(name, why) of all that keeps a branch from being removed."""
    lease = Epochs(files).newest(branch)
    if lease is not None and not lease.expired(SKEW_S):
        yield branch, f"driven by process {lease.holder.pid} on {lease.holder.host}"
    nodes = Nodes(files)
    mine = set[str]()
    if (record := branches.find(branch)) is not None:
        mine = {node.digest for _, node in _checkpoints(files, branches, branch)} | {
            _of(record.init)
        }
    for name in branches.names():
        record = branches.get(name)
        if name != branch:
            debug = record.config.get("debug") or {}
            if record.parent and parse_commit_name(record.parent)[0] == branch:
                yield name, f"a fork of {record.parent}"
            if isinstance(debug, dict) and debug.get("load_debug_rollout_data") == branch:
                yield name, "trains on its rollouts"
            if mine & set(nodes.get(Stage.INIT, record.init).parents.values()):
                yield name, "started from its weights"


def _of(state: str) -> str:
    """Digest of the checkpoint node of a state."""
    return input_digest(Stage.CHECKPOINT, {"weights": state}, {}, {})


def _digest(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".json")
