"""Segments: states that a replay made anew, and which of them a branch goes on from.

Training the same batches again is bit for bit the same only on the same kind of machine. Elsewhere
the state of a weight version may come out different from what its train node recorded. It then has
a node of its own (stage `segment`), a checkpoint of its own, and a pointer that makes it the
branch's state of that weight version:

    branches/<branch>/segments/%08d-%08d-<weights>.json       weight version, epoch, first digits of the train node's digest

First writer wins; of several epochs the newest counts. The recorded train node stays what it was:
the segment says what it replaced, and the next train node that it was trained from it.

Not here: making such a state (`actors.trainer.states`), and what its node holds
(`rlpipe.lineage.states`).
"""

from __future__ import annotations

import re
from collections.abc import Container

from rlpipe.errors import ObjectConflict, ObjectCorrupt
from rlpipe.store.nodes import Nodes, input_digest
from rlpipe.store.objects.files import Files
from rlpipe.store.records import now, seal, unseal
from rlpipe.types import Stage, VersionedRecord

SEGMENT_NAME = re.compile(r"branches/[^/]+/segments/(\d{8})-(\d{8})-[^/]+\.json")


class Segment(VersionedRecord):
    """A pointer: in place of the state that a train node recorded, the branch has this one."""

    branch: str
    version: int
    """Weight version."""
    epoch: int
    weights: str
    """Digest of the train node whose state could not be had again."""
    segment: str
    """Digest of the segment node that took its place."""
    created: str = ""


class Segments:
    """The segments of a store's branches."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def record(
        self, branch: str, version: int, epoch: int, *, weights: str, segment: str
    ) -> Segment:
        """Make the segment the branch's state in place of a train node's; the pointer that counts:
        ours, or an earlier one.

        The segment and its checkpoint must be in the store already.
        """
        ours = Segment(
            branch=branch,
            version=version,
            epoch=epoch,
            weights=weights,
            segment=segment,
            created=now(),
        )
        path = segment_path(ours)
        try:
            self._files.create(path, seal(ours, path))
        except ObjectConflict:
            return self._read(path)
        return ours

    def find(self, branch: str, version: int, weights: str) -> Segment | None:
        """What stands in place of a train node's state at this weight version; None if the recorded
        state still counts.

        One listing. Raises: ObjectCorrupt.
        """
        names = [name for name in self._names(branch) if int(_numbers(name)[0]) == version]
        found = [self._read(name) for name in sorted(names, reverse=True)]
        return next((segment for segment in found if segment.weights == weights), None)

    def of(self, branch: str) -> list[Segment]:
        """All pointers of a branch, by weight version and epoch. Raises: ObjectCorrupt."""
        return [self._read(name) for name in self._names(branch)]

    def _names(self, branch: str) -> list[str]:
        return sorted(
            name for name in self._files.list(_folder(branch)) if SEGMENT_NAME.fullmatch(name)
        )

    def _read(self, path: str) -> Segment:
        segment = unseal(Segment, self._files.read(path), self._files.url(path))
        if segment_path(segment) != path:
            raise ObjectCorrupt(
                "this is another segment",
                where=self._files.url(path),
                found=segment_path(segment),
                expected=path,
            )
        return segment


def current_state(segments: Segments, branch: str, version: int, recorded: str) -> str:
    """Digest of the node whose state a branch has at a weight version: the recorded train (or init)
    node, or a segment."""
    found = segments.find(branch, version, recorded)
    return found.segment if found else recorded


def segment_problem(nodes: Nodes, digest: str, known: Container[str]) -> str | None:
    """What keeps a parent that is not on a branch from being a segment in place of a state of it;
    None: nothing does.

    `known`: digests of the branch so far. A segment replaces a train node of the branch, was
    trained again from a state of it (the init node, or a checkpoint of a train node or of another
    such segment), and has a checkpoint of its own. Raises: ObjectCorrupt.
    """
    node = nodes.find(Stage.SEGMENT, digest)
    if node is None:
        return f"{digest} is not on this branch, and is no segment"
    replaced = node.parents.get("weights", "nothing")
    base = node.parents.get("base", "nothing")
    if replaced not in known:
        return f"segment {digest} stands in place of {replaced}, which is not on this branch"
    if (
        nodes.find(Stage.CHECKPOINT, input_digest(Stage.CHECKPOINT, {"weights": digest}, {}, {}))
        is None
    ):
        return f"segment {digest} has no checkpoint"
    if base in known:
        return None
    checkpoint = nodes.find(Stage.CHECKPOINT, base)
    if checkpoint is None:
        return f"segment {digest} was trained from {base}, which is no checkpoint"
    weights = str(checkpoint.parents.get("weights"))
    return None if weights in known else segment_problem(nodes, weights, known)


def _folder(branch: str) -> str:
    return f"branches/{branch}/segments"


def segment_path(segment: Segment) -> str:
    """Where a pointer lives."""
    return f"{_folder(segment.branch)}/{segment.version:08d}-{segment.epoch:08d}-{segment.weights[:12]}.json"


def _numbers(name: str) -> tuple[str, str]:
    match = SEGMENT_NAME.fullmatch(name)
    assert match is not None
    return match[1], match[2]
