"""Files in the folders of a run that no writer of rlpipe creates.

Examples: copies, files with a wrong checksum in the name, rows of another plan. Most of them are
never read, but a retry that adopts the files of a folder might read them.

A file that no record names is not always unexpected. An attempt that was killed before its node was
recorded, or that continued after another attempt replaced it, leaves complete files with right
checksums in their names. Two attempts never write equal bytes, because samples have times. Only
groups from the buffer and failed groups may be written twice with equal bytes.

Entry points: `of_branch`, `of_plan`, `of_node`, `of_weights`, `misnamed`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from rlpipe.errors import ObjectMissing, StoreError
from rlpipe.store import branches, engine_targets, epochs, notes, receipts, segments, signatures
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.parquet.schema import decode
from rlpipe.store.plans import plan_path
from rlpipe.store.tables import scalars
from rlpipe.types import Node, Plan

SHARD = re.compile(r"plans/[^/]+/(?:groups|cut)/[^/]+-[0-9]{5}-([0-9a-f]{16})\.parquet")
DATA = re.compile(r"data/[^/]+/[^/]+/[^/]+-([0-9a-f]{16})\.(?:parquet|json)")
WEIGHTS = re.compile(r"weights/(?:\.[^/]+/)?([^/]+)/weight_v[0-9]{6,}-[^/]+/[^/]+")
"""Files of pushes (`rlpipe.sync.transports.versions`), which also remove old versions. No record
names them: checkpoints hold the same weights."""
OF_A_BRANCH = (
    branches.CONFIG_NAME,
    branches.COMMIT_NAME,
    receipts.RECEIPT_NAME,
    epochs.EPOCH_NAME,
    engine_targets.TARGET_NAME,
    segments.SEGMENT_NAME,
    scalars.TABLE_FILE_NAME,
    notes.NOTE_NAME,
    notes.GATE_NAME,
    signatures.SIGNATURE_NAME,
)
FOLDERS_OF_A_BRANCH = ("branches", "rollouts", "gates")
UNKNOWN_NAME = "rlpipe writes no file with such a name: it is a copy, or was added by hand"


class UnexpectedFile(NamedTuple):
    """A file, and the reason why no writer created it."""

    path: str
    problem: str


def of_branch(files: Snapshot, branch: str) -> Iterator[UnexpectedFile]:
    """Yield the unexpected files among the records of a branch."""
    for path in (
        name for folder in FOLDERS_OF_A_BRANCH for name in files.list(f"{folder}/{branch}")
    ):
        if not any(pattern.fullmatch(path) for pattern in OF_A_BRANCH):
            yield UnexpectedFile(path, UNKNOWN_NAME)


def of_plan(
    files: Snapshot, digest: str, plan: Plan, named: Collection[str]
) -> Iterator[UnexpectedFile]:
    """Yield the unexpected files among the rows of a plan. `named`: files of the rollout node."""
    names = files.list(f"plans/{digest}")
    buffered = {waiting.group_id for waiting in plan.before.buffer}
    is_new = {
        group.group_id: group.earlier is None and group.group_id not in buffered
        for group in plan.groups
    }
    for path in names:
        if path in named or path == plan_path(digest):
            continue
        problem = misnamed(files, path, SHARD) or _misplaced(files, path, is_new, names)
        if problem:
            yield UnexpectedFile(path, problem)


def of_weights(path: str, runs: Collection[str]) -> str | None:
    """Return the problem of a file among the weights that engines read. `runs`: known names."""
    match = WEIGHTS.fullmatch(path)
    return None if match and unquote(match[1]) in runs else UNKNOWN_NAME


def of_node(files: Snapshot, node: Node) -> Iterator[UnexpectedFile]:
    """Yield the unexpected files in the folders of a node's files.

    Folders of a rollout belong to its plans (`of_plan`).
    """
    named = {record.path for record in node.files}
    folders = {path.rpartition("/")[0] for path in named if not path.startswith("plans/")}
    for folder in sorted(folders):
        names = files.list(folder)
        for path in names:
            if path in named:
                continue
            if problem := misnamed(files, path, DATA):
                yield UnexpectedFile(path, problem)
            elif twin := _twin(path, names):
                yield UnexpectedFile(path, f"a copy: {twin} has the same bytes")


def misnamed(files: Snapshot, path: str, pattern: re.Pattern[str]) -> str | None:
    """Return the problem with an object's name, or None.

    The name must have the pattern, and the checksum in it must match the bytes.
    """
    match = pattern.fullmatch(path)
    if match is None:
        return UNKNOWN_NAME
    # Shards and data files are small. A sparse file of petabytes would take days to hash.
    try:
        files.refuse_large(path)
        sha256 = files.sha256(path)
    except ObjectMissing:
        return None  # deleted since the listing
    except StoreError as error:
        files.check_reachable()
        return str(error)
    if sha256.startswith(match[1]):
        return None
    return f"its bytes do not match its name: sha256 {sha256}"


def _misplaced(
    files: Snapshot, path: str, is_new: dict[str, bool], names: Sequence[str]
) -> str | None:
    """Return the problem with a shard's rows, or None.

    `is_new`: for each group of the plan, True if it is sampled for the first time.
    """
    try:
        rows = decode(files.read(path), files.url(path), ["group_id", "t_end_s"])
    except ObjectMissing:
        return None
    except StoreError as error:
        files.check_reachable()
        return str(error)
    groups = rows["group_id"].to_pylist()
    sampled = {
        group for group, end_s in zip(groups, rows["t_end_s"].to_pylist(), strict=True) if end_s
    }
    if foreign := sorted(set(groups) - set(is_new)):
        return f"it has rows of {', '.join(foreign[:3])}, which its plan does not draw"
    # Only new groups with a time of their end must be unique (module docstring).
    if (
        "/groups/" in path
        and any(is_new[group] for group in sampled)
        and (twin := _twin(path, names))
    ):
        return f"a copy of the same samples: {twin} has the same bytes"
    return None


def _twin(path: str, names: Sequence[str]) -> str | None:
    """Return another file of the folder with the same checksum in its name, or None."""
    # Names end in the first 16 digits of the sha256.
    own = PurePosixPath(path)
    for name in names:
        other = PurePosixPath(name)
        if name != path and other.parent == own.parent and other.stem[-16:] == own.stem[-16:]:
            return name
    return None
