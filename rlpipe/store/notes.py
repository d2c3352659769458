"""Notes of an iteration outside its commit.

    rollouts/<branch>/<k>.json             nodes of an iteration without a commit: it was only
                                           sampled, or reprocessed
    gates/<branch>/<k>-<weights>.json      a person opened a gate: the run continued although a
                                           metric was out of bounds

Entry points: `write_note`, `read_note`, `noted_iterations`, `OpenedGate`, `gate_path`.
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
ADVICE = (
    "delete it and run the sampling or reprocessing again: the nodes are found, and noted again"
)


class Note(VersionedRecord):
    """The nodes of iteration k of a branch."""

    branch: str
    iteration: int
    nodes: dict[Stage, str]


class OpenedGate(VersionedRecord):
    """Iteration k continued although metrics were out of bounds."""

    iteration: int
    broken: tuple[str, ...]
    """Descriptions of the metrics that were out of bounds."""
    asked: float
    """Time of the pause, in seconds since the epoch."""
    resumed: float
    """Time of the approval, in seconds since the epoch."""


def write_note(files: Files, branch: str, k: int, nodes: Mapping[Stage, str]) -> dict[Stage, str]:
    """Note the nodes of iteration k of a branch, and return the nodes that count.

    The first note of an iteration wins. Raises: ObjectCorrupt if the stored note is not readable;
    StoreError.
    """
    note = Note(branch=branch, iteration=k, nodes=dict(nodes))
    path = note_path(branch, k)
    try:
        files.create(path, seal(note, path))
    except ObjectConflict:
        # Sampling the same iteration again has other samples. Later runs may use the first ones.
        return read_note(files, branch, k)
    return dict(nodes)


def read_note(files: Files, branch: str, k: int) -> dict[Stage, str]:
    """Return the nodes of iteration k of a branch.

    Raises: ObjectMissing; ObjectCorrupt, also if the record belongs to another iteration.
    """
    path = note_path(branch, k)
    note = unseal(Note, files.read(path), files.url(path), do=ADVICE)
    if (note.branch, note.iteration) != (branch, k):
        raise ObjectCorrupt(
            "the note belongs to another iteration",
            where=files.url(path),
            found=f"iteration {note.iteration} of {note.branch}",
            expected="the iteration of its name",
            do=ADVICE,
        )
    return note.nodes


def noted_iterations(files: Files, branch: str) -> list[int]:
    """Return the iterations of a branch that have notes, in order."""
    return [
        int(match[1])
        for path in files.list(f"rollouts/{branch}")
        if (match := NOTE_NAME.fullmatch(path))
    ]


def note_path(branch: str, k: int) -> str:
    """Return the path of an iteration's note."""
    return f"rollouts/{branch}/{k:08d}.json"


def gate_path(branch: str, k: int, train: str) -> str:
    """Return the path of an opened gate. `train`: digest of the train node of iteration k."""
    return f"gates/{branch}/{k:08d}-{train[:16]}.json"
