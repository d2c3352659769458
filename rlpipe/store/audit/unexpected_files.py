"""What lies in a run's own folders and no writer put there: copies, files under names that say
nothing of their bytes, rows of another plan. Nothing would read most of it; but who adopts what a
folder holds might.

Not every file that no record names is one. An attempt that was killed before its node was recorded,
or that wrote on after another had taken its place, leaves whole files, under names that carry their
checksum. Two attempts never write the same bytes: what is sampled carries its time. (Only what came
finished from the buffer, or failed, may be written twice alike.)

Not here: files that records name (`audit_reading`), and what no branch refers to (`explained`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from rlpipe.errors import ObjectMissing, StoreError
from rlpipe.store import branches, epochs, notes, receipts, segments, signatures
from rlpipe.store.audit.snapshot import Snapshot
from rlpipe.store.parquet.schema import decode
from rlpipe.store.plans import plan_path
from rlpipe.store.tables import scalars
from rlpipe.types import Node, Plan

SHARD = re.compile(r"plans/[^/]+/(?:groups|cut)/[^/]+-[0-9]{5}-([0-9a-f]{16})\.parquet")
DATA = re.compile(r"data/[^/]+/[^/]+/[^/]+-([0-9a-f]{16})\.(?:parquet|json)")
OF_A_BRANCH = (
    branches.CONFIG_NAME,
    branches.COMMIT_NAME,
    receipts.RECEIPT_NAME,
    epochs.EPOCH_NAME,
    segments.SEGMENT_NAME,
    scalars.TABLE_FILE_NAME,
    notes.NOTE_NAME,
    notes.GATE_NAME,
    signatures.SIGNATURE_NAME,
)
FOLDERS_OF_A_BRANCH = ("branches", "rollouts", "gates")
NO_NAME = "no writer gives a file such a name: it is a copy, or was put there by hand"


class Stray(NamedTuple):
    """An object, and why it cannot be a writer's."""

    path: str
    problem: str


def of_branch(files: Snapshot, branch: str) -> Iterator[Stray]:
    """Among the records of a branch."""
    for path in (
        name for folder in FOLDERS_OF_A_BRANCH for name in files.list(f"{folder}/{branch}")
    ):
        if not any(name.fullmatch(path) for name in OF_A_BRANCH):
            yield Stray(path, NO_NAME)


def of_plan(files: Snapshot, digest: str, plan: Plan, named: Collection[str]) -> Iterator[Stray]:
    """Among the rows of a plan. `named`: files of the rollout's node."""
    names = files.list(f"plans/{digest}")
    drawn = {group.group_id: group.earlier is None for group in plan.groups}
    for path in names:
        if path in named or path == plan_path(digest):
            continue
        if (problem := misnamed(files, path, SHARD)) or (
            problem := _misplaced(files, path, drawn, names)
        ):
            yield Stray(path, problem)


def of_node(files: Snapshot, node: Node) -> Iterator[Stray]:
    """Beside the files of a node; those of a rollout lie below its plans. Of a checkpoint, which is
    recorded once it is complete, all files are named."""
    named = {record.path for record in node.files}
    for folder in sorted(
        {path.rpartition("/")[0] for path in named if not path.startswith("plans/")}
    ):
        names = files.list(folder)
        for path in names:
            if path in named:
                continue
            if problem := misnamed(files, path, DATA):
                yield Stray(path, problem)
            elif twin := _twin(path, names):
                yield Stray(path, f"its bytes are those of {twin}: it is a copy")


def misnamed(files: Snapshot, path: str, form: re.Pattern[str]) -> str | None:
    """What is wrong with the name of an object; None if it has the form, and the object's bytes are
    those of the name."""
    match = form.fullmatch(path)
    if match is None:
        return NO_NAME
    try:
        files.refuse_large(path)
        found = files.sha256(path)
    except ObjectMissing:
        return None  # it was removed since the listing
    except StoreError as error:
        files.check_reachable()
        return str(error)
    return (
        None
        if found.startswith(match[1])
        else f"its bytes are not those of its name: sha256 {found}"
    )


def _misplaced(
    files: Snapshot, path: str, drawn: dict[str, bool], names: Sequence[str]
) -> str | None:
    """What is wrong with its rows. `drawn`: group → is it sampled for the first time?"""
    try:
        rows = decode(files.read(path), files.url(path), ["group_id", "t_end_s"])
    except ObjectMissing:
        return None
    except StoreError as error:
        files.check_reachable()
        return str(error)
    sampled = {
        group
        for group, end_s in zip(
            rows["group_id"].to_pylist(), rows["t_end_s"].to_pylist(), strict=True
        )
        if end_s
    }
    if strangers := sorted(set(rows["group_id"].to_pylist()) - set(drawn)):
        return f"it has rows of {', '.join(strangers[:3])}, which its plan does not draw"
    if (
        "/groups/" in path
        and any(drawn[group] for group in sampled)
        and (twin := _twin(path, names))
    ):
        return f"its bytes are those of {twin}: the same samples lie there twice"
    return None


def _twin(path: str, names: Sequence[str]) -> str | None:
    """Another file of its folder whose name says that it has the same bytes."""
    own = PurePosixPath(path)
    alike = (PurePosixPath(name) for name in names if name != path)
    return next(
        (
            str(one)
            for one in alike
            if one.parent == own.parent and one.stem[-16:] == own.stem[-16:]
        ),
        None,
    )
