"""The chain of a history: each commit names the digests of its parent and of its records.

The sha256 of a commit's own bytes fixes everything below it. Keep that one digest (the head)
elsewhere, and the audit proves later that nothing was changed, even where a record was rewritten
together with its seal, its receipt and the records that name it.

    parent_sha256    of the parent commit as it is stored, also on another branch; of the first
                     commit of a root branch, of the branch's configuration
    records          plan parts; nodes of the stages; what these were made of and the commit
                     before does not name (segments with their pointers, scores that a filter
                     chose by); an opened gate; where the chain of a branch begins, also its
                     configuration and the node of its first weights
    leaves           checkpoints and evaluations that were recorded since the commit before

Data files are fixed through these. A node names each file with its sha256, also the shards that
were adopted or waited in the buffer. The name of a plan is the sha256 of its bytes.

A leaf may be recorded after the commit of its weights. A commit names the leaves that were due and
are not there yet (`awaited`), and the next commit looks for them. So only the newest leaves are not
fixed, and a commit looks for the same number of leaves however long the history is.

`leaves` and `awaited` depend on the time of the commit, so two drivers may differ in them. The
stored commit counts: the loser of a race adopts its bytes. A commit does not name a record that is
not in the store; the audit reports that.

Requests for a commit, in parallel: one read for each stage's node, for each leaf that is looked
for, and for a gate if the run has gates. Parents and plans cost none: the parent is read anyway,
and a plan's digest is its name. Where a chain begins: the configuration and the init node as well.

Not here: checking the chain (`audit_chain`). Not fixed: tables, which are drawn from the records,
and epochs, which say only which process drove the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rlpipe.errors import ObjectMissing
from rlpipe.store.nodes import LEAVES, input_digest, node_path
from rlpipe.store.notes import gate_path
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import plan_path
from rlpipe.store.records import unseal
from rlpipe.store.segments import Segments, segment_path
from rlpipe.types import Commit, Node, Stage

READERS = 8
MOST_AWAITED = 32
"""The most leaves that a commit waits for, so that uploads that were given up do not add up."""
EXPANDED = (Stage.INIT, Stage.ROLLOUT, Stage.REWARD, Stage.ADVANTAGE, Stage.SEGMENT)
"""Stages of other nodes than the iteration's own whose parents are named too. A train node is not
among them: the parents of an earlier state are in earlier commits.
"""
BESIDE = (
    Stage.SEGMENT,
    Stage.CHECKPOINT,
    Stage.TRAIN,
    Stage.ROLLOUT,
    Stage.REWARD,
    Stage.ADVANTAGE,
    Stage.INIT,
)
"""Stages that are tried for a parent that neither this commit nor the one before names. It is
rare."""


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
    """The commit with the keys of the chain.

    `before`: the parent commit, whose bytes have `parent_sha256`. `config`, `init`, `config_path`:
    of the commit's branch. `look_for`: paths of leaves that may be there, in addition to those
    that the parent or this commit awaits. Raises: ObjectCorrupt if one of its records is damaged;
    StoreError.
    """
    begins = before is None or before.branch != commit.branch
    linker = _Linker(files, commit, before)
    if begins:
        linker.add(config_path)
        linker.add_nodes([(Stage.INIT, init)])
        parent_sha256 = parent_sha256 or linker.records.get(config_path)
    else:
        linker.known.add(init)
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
    """Paths of the records about a state: its checkpoint, and the evaluations of these digests."""
    checkpoint = input_digest(Stage.CHECKPOINT, {"weights": weights}, {}, {})
    return [
        node_path(Stage.CHECKPOINT, checkpoint),
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
        self.known: set[str] = {*commit.plans}
        """Digests that are named already, here or below."""
        if before is not None:
            self.known |= {*before.plans, *before.nodes.values()}

    def add(self, path: str) -> bytes | None:
        """Name a record, if it is there: its bytes."""
        data = self._read(path)
        if data is not None:
            self.records[path] = hashlib.sha256(data).hexdigest()
        return data

    def add_iteration(self) -> None:
        """Name the plan's parts, the stages' nodes and what these were made of."""
        self.records |= {plan_path(digest): digest for digest in self._commit.plans}
        self.known |= set(self._commit.nodes.values())
        self.add_nodes(list(self._commit.nodes.items()))

    def add_nodes(self, wanted: Sequence[tuple[Stage, str]]) -> None:
        """Name nodes, and what they were made of that is not named below."""
        self.known |= {digest for _, digest in wanted}
        own = {*self._commit.nodes.values()}
        for node in self._nodes(wanted):
            if node.stage is Stage.SEGMENT:
                self._add_pointers(node.digest)
                self._add_beside(input_digest(Stage.CHECKPOINT, {"weights": node.digest}, {}, {}))
            if node.digest in own or node.stage in EXPANDED:
                for digest in _made_of(node):
                    self._add_beside(digest)

    def add_leaves(self, awaited: Iterable[str], look_for: Iterable[str]) -> tuple[str, ...]:
        """Name the leaves that are there; those of the awaited ones that are not, oldest first.

        A checkpoint is not awaited any more once a later one is there: a run uploads one at a time.
        """
        due = list(awaited)
        asked = [path for path in dict.fromkeys([*due, *look_for]) if path not in self.leaves]
        with ThreadPoolExecutor(READERS) as pool:
            found = pool.map(self._read, asked)
            self.leaves |= {
                path: hashlib.sha256(data).hexdigest()
                for path, data in zip(asked, found, strict=True)
                if data is not None
            }
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
        """Name these nodes; those that are there."""
        paths = [node_path(stage, digest) for stage, digest in wanted]
        with ThreadPoolExecutor(READERS) as pool:
            read = list(pool.map(self._read, paths))
        nodes = []
        for (stage, _), path, data in zip(wanted, paths, read, strict=True):
            if data is not None:
                named = self.leaves if stage in LEAVES else self.records
                named[path] = hashlib.sha256(data).hexdigest()
                nodes.append(unseal(Node, data, self._files.url(path)))
        return nodes

    def _add_beside(self, digest: str) -> None:
        """Name a record that an iteration was made of beside its own and those of the iteration
        before.
        """
        if digest in self.known:
            return
        self.known.add(digest)
        if self._files.exists(plan_path(digest)):
            self.records[plan_path(digest)] = digest
            return
        found = next(
            (stage for stage in BESIDE if self._files.exists(node_path(stage, digest))), None
        )
        if found is not None:
            self.add_nodes([(found, digest)])

    def _add_pointers(self, segment: str) -> None:
        """Name the pointers that make a segment a state of the branch, or of the one it is a fork
        of.
        """
        segments = Segments(self._files)
        branches = {self._commit.branch} | ({self._before.branch} if self._before else set())
        for pointer in (pointer for branch in sorted(branches) for pointer in segments.of(branch)):
            if pointer.segment == segment:
                self.add(segment_path(pointer))

    def _read(self, path: str) -> bytes | None:
        with suppress(ObjectMissing):
            return self._files.read(path)
        return None


def _made_of(node: Node) -> list[str]:
    """Digests of what a node was made of."""
    beside = (
        [node.config.get(key) for key in ("of", "judged_by")] if node.stage is Stage.ROLLOUT else []
    )
    return [*node.parents.values(), *(one for one in beside if isinstance(one, str))]
