"""Segments: states that a replay made, and that replace a recorded state of a branch.

Training the same batches again gives the same bits only on the same kind of machine. On another
machine the state of a weight version may differ from the one in its train node. The new state then
has a node (stage `segment`), a checkpoint, and a pointer that makes it the branch's state of that
weight version:

    branches/<branch>/segments/%08d-%08d-<weights>.json
        weight version, epoch, first 12 digits of the train node's digest

The first writer wins. Of several epochs the newest counts. The train node stays as it was: the
segment names the node that it replaced, and the next train node names the segment as its parent.

Entry points: `Segments`, `current_state`, `segment_problem`.
"""

from __future__ import annotations

import re
from collections.abc import Container

from rlpipe.errors import ObjectConflict, ObjectCorrupt
from rlpipe.store.nodes import Nodes, checkpoint_digest
from rlpipe.store.objects.files import Files
from rlpipe.store.records import now, seal, unseal
from rlpipe.types import Stage, VersionedRecord

SEGMENT_NAME = re.compile(r"branches/[^/]+/segments/(\d{8})-(\d{8})-[^/]+\.json")


class Segment(VersionedRecord):
    """A pointer: the branch uses this state instead of the one that a train node recorded."""

    branch: str
    version: int
    """Weight version."""
    epoch: int
    weights: str
    """Digest of the train node with the state that was not reproduced."""
    segment: str
    """Digest of the segment node that replaces it."""
    created: str = ""


class Segments:
    """The segments of a store's branches."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def record(
        self, branch: str, version: int, epoch: int, *, weights: str, segment: str
    ) -> Segment:
        """Replace the state of a train node by a segment, and return the pointer that counts.

        The result is this pointer or an earlier one. The segment's node and checkpoint must be in
        the store already.
        """
        pointer = Segment(
            branch=branch,
            version=version,
            epoch=epoch,
            weights=weights,
            segment=segment,
            created=now(),
        )
        path = segment_path(pointer)
        try:
            self._files.create(path, seal(pointer, path))
        except ObjectConflict:
            return self._read(path)
        return pointer

    def find(self, branch: str, version: int, weights: str) -> Segment | None:
        """Return the pointer that replaces a train node's state, or None if that state counts.

        Costs one listing. Raises: ObjectCorrupt.
        """
        names = [name for name in self._names(branch) if _version(name) == version]
        # The name has the epoch after the version, so the newest epoch comes first.
        pointers = [self._read(name) for name in sorted(names, reverse=True)]
        return next((pointer for pointer in pointers if pointer.weights == weights), None)

    def of(self, branch: str) -> list[Segment]:
        """Return all pointers of a branch, by weight version and epoch. Raises: ObjectCorrupt."""
        return [self._read(name) for name in self._names(branch)]

    def _names(self, branch: str) -> list[str]:
        names = self._files.list(_folder(branch))
        return sorted(name for name in names if SEGMENT_NAME.fullmatch(name))

    def _read(self, path: str) -> Segment:
        segment = unseal(Segment, self._files.read(path), self._files.url(path))
        if segment_path(segment) != path:
            raise ObjectCorrupt(
                "the record belongs to another segment",
                where=self._files.url(path),
                found=segment_path(segment),
                expected=path,
            )
        return segment


def current_state(segments: Segments, branch: str, version: int, recorded: str) -> str:
    """Return the digest of the node with the branch's state of a weight version.

    That is the recorded train or init node, or the segment that replaces it.
    """
    pointer = segments.find(branch, version, recorded)
    return pointer.segment if pointer else recorded


def segment_problem(nodes: Nodes, digest: str, known: Container[str]) -> str | None:
    """Return why a node may not be the parent of a state of the branch; None if it may.

    `known`: digests of the branch so far. A valid segment replaces a train node of the branch, has
    a checkpoint, and was trained from a state of the branch: the init node, or a checkpoint of a
    train node or of another valid segment. Raises: ObjectCorrupt.
    """
    node = nodes.find(Stage.SEGMENT, digest)
    if node is None:
        return f"{digest} is not on this branch, and is not a segment"
    replaced = node.parents.get("weights", "nothing")
    base = node.parents.get("base", "nothing")
    if replaced not in known:
        return f"segment {digest} replaces {replaced}, which is not on this branch"
    if nodes.find(Stage.CHECKPOINT, checkpoint_digest(digest)) is None:
        return f"segment {digest} has no checkpoint"
    if base in known:
        return None
    checkpoint = nodes.find(Stage.CHECKPOINT, base)
    if checkpoint is None:
        return f"segment {digest} was trained from {base}, which is not a checkpoint"
    # The segment was trained from the checkpoint of another segment, which must be valid too.
    weights = str(checkpoint.parents.get("weights"))
    return None if weights in known else segment_problem(nodes, weights, known)


def segment_path(segment: Segment) -> str:
    """Return the path of a pointer."""
    name = f"{segment.version:08d}-{segment.epoch:08d}-{segment.weights[:12]}"
    return f"{_folder(segment.branch)}/{name}.json"


def _folder(branch: str) -> str:
    return f"branches/{branch}/segments"


def _version(path: str) -> int:
    match = SEGMENT_NAME.fullmatch(path)
    assert match is not None
    return int(match[1])
