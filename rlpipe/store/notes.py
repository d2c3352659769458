"""Which nodes make an iteration of a branch that has no commit for it: of one that only sampled, or was reprocessed.

    rollouts/<branch>/<k>.json     stage → digest of its node

Not here: what such rollouts are read for (`rlpipe.run_rollouts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from rlpipe.errors import ObjectConflict, ObjectCorrupt
from rlpipe.store.files import Files
from rlpipe.types import Stage


def note(files: Files, branch: str, k: int, nodes: Mapping[Stage, str]) -> dict[Stage, str]:
    """Write down which nodes are iteration k of a branch. The first that are noted stay; answers those that are.

    Raises: ObjectCorrupt if what is there is no such record; StoreError.
    """
    try:
        files.create(note_path(branch, k), json.dumps({str(stage): digest for stage, digest in nodes.items()}).encode())
    except ObjectConflict:
        return noted(files, branch, k)
    return dict(nodes)


def noted(files: Files, branch: str, k: int) -> dict[Stage, str]:
    """The nodes of iteration k of a branch. Raises: ObjectMissing, ObjectCorrupt."""
    path = note_path(branch, k)
    try:
        said = json.loads(files.read(path))
        if all(isinstance(digest, str) for digest in said.values()):
            return {Stage(stage): digest for stage, digest in said.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ObjectCorrupt("not a note of an iteration", where=files.url(path), found=repr(error)) from error
    raise ObjectCorrupt("not a note of an iteration", where=files.url(path), found=said, expected="a digest for each stage")


def noted_iterations(files: Files, branch: str) -> list[int]:
    """The iterations of a branch that are noted, in order."""
    names = {path.rpartition("/")[2].removesuffix(".json") for path in files.list(f"rollouts/{branch}")}
    return sorted(int(name) for name in names if name.isdecimal())


def note_path(branch: str, k: int) -> str:
    """Where the note of an iteration lies."""
    return f"rollouts/{branch}/{k:08d}.json"
