"""What a branch notes of an iteration beside its commit.

    rollouts/<branch>/<k>.json             its nodes, where it has no commit: it was only sampled, or reprocessed
    gates/<branch>/<k>-<weights>.json      that somebody let it go on though its figures were out of bounds

Not here: what such rollouts are read for (`rlpipe.lineage.rollouts`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlpipe.errors import ObjectConflict, ObjectCorrupt
from rlpipe.store.objects.files import Files
from rlpipe.store.records import seal, unseal
from rlpipe.types import Stage, VersionedRecord

NOTE_NAME = re.compile(r"rollouts/[^/]+/([0-9]{8})\.json")
GATE_NAME = re.compile(r"gates/([^/]+)/([0-9]{8})-([0-9a-f]{16})\.json")
AGAIN = "delete it and start again what wrote it (sampling, reprocessing): its nodes are found and noted anew"


class Note(VersionedRecord):
    """The nodes of iteration k of a branch."""

    branch: str
    iteration: int
    nodes: dict[Stage, str]


class OpenedGate(VersionedRecord):
    """Iteration k was resumed though its figures were out of bounds."""

    iteration: int
    broken: tuple[str, ...]
    """What was out of bounds, in words."""
    asked: float
    """Seconds since the epoch."""
    resumed: float
    """Seconds since the epoch."""


def write_note(files: Files, branch: str, k: int, nodes: Mapping[Stage, str]) -> dict[Stage, str]:
    """Write down which nodes are iteration k of a branch. The first that are noted stay; answers
    those that are.

    Raises: ObjectCorrupt if what is there is no such record; StoreError.
    """
    ours = Note(branch=branch, iteration=k, nodes=dict(nodes))
    path = note_path(branch, k)
    try:
        files.create(path, seal(ours, path))
    except ObjectConflict:
        return read_note(files, branch, k)
    return dict(nodes)


def read_note(files: Files, branch: str, k: int) -> dict[Stage, str]:
    """The nodes of iteration k of a branch. Raises: ObjectMissing; ObjectCorrupt, also if it is
    another iteration's note."""
    path = note_path(branch, k)
    found = unseal(Note, files.read(path), files.url(path), do=AGAIN)
    if (found.branch, found.iteration) != (branch, k):
        said = f"iteration {found.iteration} of {found.branch}"
        raise ObjectCorrupt(
            "this is another note",
            where=files.url(path),
            found=said,
            expected="that of its name",
            do=AGAIN,
        )
    return found.nodes


def noted_iterations(files: Files, branch: str) -> list[int]:
    """The iterations of a branch that are noted, in order."""
    return [
        int(match[1])
        for path in files.list(f"rollouts/{branch}")
        if (match := NOTE_NAME.fullmatch(path))
    ]


def note_path(branch: str, k: int) -> str:
    """Where the note of an iteration lies."""
    return f"rollouts/{branch}/{k:08d}.json"


def gate_path(branch: str, k: int, train: str) -> str:
    """Where it is recorded that an iteration with these weights was let go on."""
    return f"gates/{branch}/{k:08d}-{train[:16]}.json"
