"""The chain of a history: each commit names the digests of its parent and of its records.

The sha256 of a commit's bytes fixes everything below it. Keep that digest (the head) outside the
store. The audit proves with it that nothing was changed, even where a record was rewritten together
with its seal, its receipt and the records that name it.

    parent_sha256    digest of the parent commit, also of one on another branch. The first commit
                     of a root branch names the branch's configuration.
    records          plan parts and nodes of the stages; their inputs that the commit before does
                     not name (segments with their pointers, scores that a filter used); an opened
                     gate. The first commit of a branch also names the configuration and the node
                     of the first weights.
    leaves           checkpoints and evaluations that were recorded since the commit before

These records fix the data files. A node names each file with its sha256, also shards that were
adopted or waited in the buffer. The name of a plan is the sha256 of its bytes. Tables and epochs
are not fixed: tables are computed from the records, and epochs only name drivers.

A leaf may be recorded after the commit of its weights. A commit lists such leaves as `awaited`, and
the next commit looks for them. So only the newest leaves are not fixed, and the number of lookups
does not grow with the history.

`leaves` and `awaited` depend on the time of the commit, so two drivers may differ in them. The
stored commit counts: the loser of a race adopts its bytes. A commit does not name a record that is
missing from the store; the audit reports such a record.

Requests for a commit, in parallel: one read for each stage's node, for each leaf in question, and
for a gate if the run has gates. Parents and plans cost none: the parent is read anyway, and a
plan's digest is its name. The first commit of a branch also reads the configuration and the init
node.

Entry points: `link_commit`, `leaf_paths`. `audit.chain_check` checks a chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rlpipe.errors import ObjectMissing
from rlpipe.store.nodes import LEAVES, checkpoint_digest, node_path
from rlpipe.store.notes import gate_path
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import plan_path
from rlpipe.store.records import unseal
from rlpipe.store.segments import Segments, segment_path
from rlpipe.types import Commit, Node, Stage

READERS = 8
MOST_AWAITED = 32
"""Limit of awaited leaves. Without it, uploads that were abandoned would add up."""
EXPANDED = (Stage.INIT, Stage.ROLLOUT, Stage.REWARD, Stage.ADVANTAGE, Stage.SEGMENT)
"""Stages of foreign nodes with named inputs. A train node is not among them, because
earlier commits name the inputs of an earlier state."""
INPUT_STAGES = (
    Stage.SEGMENT,
    Stage.CHECKPOINT,
    Stage.TRAIN,
    Stage.ROLLOUT,
    Stage.REWARD,
    Stage.ADVANTAGE,
    Stage.INIT,
)
"""Stages that are tried, in this order, for an input that neither this commit nor its parent names.
Such an input is rare."""


def link_commit(
    files: Files,
    commit: Commit,
    before: Commit | None,
    *,
    config: Mapping[str, Any],
    init: str,
    config_path: str,
    parent_sha256: str | None,
    look_for: Sequence[str] = (),
) -> Commit:
    """Return the commit with the keys of the chain.

    `before`: the parent commit; its bytes have `parent_sha256`. `config`, `init`, `config_path`
    belong to the commit's branch. `look_for`: paths of leaves that may exist, in addition to the
    awaited ones. Raises: ObjectCorrupt if a record is damaged; StoreError.
    """
    linker = _Linker(files, commit, before)
    if before is None or before.branch != commit.branch:
        linker.add(config_path)
        linker.add_nodes([(Stage.INIT, init)])
        # A root branch has no parent commit, so its chain begins with the configuration.
        parent_sha256 = parent_sha256 or linker.records.get(config_path)
    else:
        linker.named.add(init)
    linker.add_iteration()
    if _has_gates(config) and Stage.TRAIN in commit.nodes:
        linker.add(gate_path(commit.branch, commit.iteration, commit.nodes[Stage.TRAIN]))
    awaited = linker.add_leaves(
        dict.fromkeys([*(before.awaited if before else ()), *commit.awaited]), look_for
    )
    keys = {
        "parent_sha256": parent_sha256,
        "records": linker.records,
        "leaves": linker.leaves,
        "awaited": awaited,
    }
    return commit.model_copy(update=keys)


def leaf_paths(weights: str, evaluations: Iterable[str] = ()) -> list[str]:
    """Return the paths of a state's checkpoint and of the evaluations with these digests."""
    return [
        node_path(Stage.CHECKPOINT, checkpoint_digest(weights)),
        *(node_path(Stage.EVAL, digest) for digest in evaluations),
    ]


def _has_gates(config: Mapping[str, Any]) -> bool:
    gates = config.get("gates")
    return isinstance(gates, dict) and bool(gates.get("bounds"))


class _Linker:
    """Collects the digests of one commit."""

    def __init__(self, files: Files, commit: Commit, before: Commit | None) -> None:
        self._files = files
        self._commit = commit
        self._before = before
        self.records: dict[str, str] = {}
        self.leaves: dict[str, str] = {}
        self.named: set[str] = {*commit.plans}
        """Digests that this commit or an earlier one names."""
        if before is not None:
            self.named |= {*before.plans, *before.nodes.values()}

    def add(self, path: str) -> None:
        """Name a record if it exists."""
        data = self._read(path)
        if data is not None:
            self.records[path] = hashlib.sha256(data).hexdigest()

    def add_iteration(self) -> None:
        """Name the parts of the plan, the nodes of the stages, and the inputs of these nodes."""
        # The name of a plan is its digest, so no plan is read.
        self.records |= {plan_path(digest): digest for digest in self._commit.plans}
        self.named |= set(self._commit.nodes.values())
        self.add_nodes(list(self._commit.nodes.items()))

    def add_nodes(self, wanted: Sequence[tuple[Stage, str]]) -> None:
        """Name nodes and those of their inputs that are not named yet."""
        self.named |= {digest for _, digest in wanted}
        own = {*self._commit.nodes.values()}
        for node in self._nodes(wanted):
            if node.stage is Stage.SEGMENT:
                self._add_pointers(node.digest)
                self._add_input(checkpoint_digest(node.digest))
            if node.digest in own or node.stage in EXPANDED:
                for digest in _inputs(node):
                    self._add_input(digest)

    def add_leaves(self, awaited: Iterable[str], look_for: Iterable[str]) -> tuple[str, ...]:
        """Name the leaves that exist. Return the awaited ones that are missing, oldest first."""
        due = list(awaited)
        wanted = [path for path in dict.fromkeys([*due, *look_for]) if path not in self.leaves]
        with ThreadPoolExecutor(READERS) as pool:
            contents = pool.map(self._read, wanted)
            self.leaves |= {
                path: hashlib.sha256(data).hexdigest()
                for path, data in zip(wanted, contents, strict=True)
                if data is not None
            }
        # A run uploads one checkpoint at a time. So an older one that is still missing when a
        # later one exists will never arrive.
        checkpoints = node_path(Stage.CHECKPOINT, "").removesuffix(".json")
        arrived = [
            number
            for number, path in enumerate(due)
            if path in self.leaves and path.startswith(checkpoints)
        ]
        newest = max(arrived, default=-1)
        missing = [
            path
            for number, path in enumerate(due)
            if path not in self.leaves and (number > newest or not path.startswith(checkpoints))
        ]
        return tuple(missing[-MOST_AWAITED:])

    def _nodes(self, wanted: Sequence[tuple[Stage, str]]) -> list[Node]:
        """Name these nodes, and return those that exist."""
        paths = [node_path(stage, digest) for stage, digest in wanted]
        with ThreadPoolExecutor(READERS) as pool:
            contents = list(pool.map(self._read, paths))
        nodes = []
        for (stage, _), path, data in zip(wanted, paths, contents, strict=True):
            if data is not None:
                digests = self.leaves if stage in LEAVES else self.records
                digests[path] = hashlib.sha256(data).hexdigest()
                nodes.append(unseal(Node, data, self._files.url(path)))
        return nodes

    def _add_input(self, digest: str) -> None:
        """Name a plan or node that an iteration was made of, unless it is named already."""
        if digest in self.named:
            return
        self.named.add(digest)
        # A digest does not show its stage. A missing record is not named, and the audit reports it.
        if self._files.exists(plan_path(digest)):
            self.records[plan_path(digest)] = digest
            return
        found = next(
            (stage for stage in INPUT_STAGES if self._files.exists(node_path(stage, digest))), None
        )
        if found is not None:
            self.add_nodes([(found, digest)])

    def _add_pointers(self, segment: str) -> None:
        """Name the pointers that make a segment a state of this branch or of its origin."""
        segments = Segments(self._files)
        branches = {self._commit.branch} | ({self._before.branch} if self._before else set())
        for pointer in (pointer for branch in sorted(branches) for pointer in segments.of(branch)):
            if pointer.segment == segment:
                self.add(segment_path(pointer))

    def _read(self, path: str) -> bytes | None:
        with suppress(ObjectMissing):
            return self._files.read(path)
        return None


def _inputs(node: Node) -> list[str]:
    """Return the digests of a node's inputs: its parents, and a rollout's source and scores."""
    config_inputs = (
        [node.config.get(key) for key in ("of", "judged_by")] if node.stage is Stage.ROLLOUT else []
    )
    return [*node.parents.values(), *(one for one in config_inputs if isinstance(one, str))]
