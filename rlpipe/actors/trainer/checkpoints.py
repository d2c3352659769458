"""Checkpoint directories between local disk and the store.

A checkpoint is written locally by all ranks, uploaded by all (each its own share), and counts once
its node is recorded. Fetching checks every file's sha256 and makes the directory appear complete or
not at all, once per machine. The part of a critic with ranks of its own lies in the folder `critic`
beside the policy's files, here and there; both are one checkpoint.

Not here: what is inside (`engines.megatron.checkpoint.checkpoint`), and when one is due (the
checkpoint stage).
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlpipe.errors import DeadlineExceeded, ObjectConflict, ObjectMissing, StoreError
from rlpipe.lineage.stage_inputs import Inputs
from rlpipe.store.objects.files import Files
from rlpipe.types import FileRecord, Node

TRACKER = "latest_checkpointed_iteration.txt"
CRITIC = "critic"
LOOK_INTERVAL_S = 0.05


@dataclass(frozen=True)
class Upload:
    """A checkpoint that is on local disk and on its way to the store. The ranks keep it until some
    driver has recorded it."""

    prefix: str
    """Where it goes: names the attempt."""
    inputs: Inputs
    outputs: dict[str, Any]


class Share:
    """A rank's part of an upload, on its way in the background."""

    def __init__(self, about: Upload, begin: Callable[[], Future[list[FileRecord]]]) -> None:
        """`begin`: what sends it; more than once if the store was away or full."""
        self.about = about
        self._begin = begin
        self._future: Future[list[FileRecord]] | None = begin()

    @property
    def future(self) -> Future[list[FileRecord]]:
        """What comes of it."""
        if self._future is None:
            self._future = self._begin()
        return self._future

    def after(self, error: BaseException) -> Share | None:
        """What is left of it once its failure is said: itself, begun again when it is next asked
        for, if the store was away or full; else None."""
        self._future = None
        lasting = not isinstance(error, StoreError) or isinstance(
            error, (ObjectConflict, ObjectMissing)
        )
        return None if lasting else self


def upload_share(files: Files, directory: Path, prefix: str, rank: int) -> list[FileRecord]:
    """Upload the files of `directory` that this rank wrote; rank 0 adds the common ones,
    `.metadata` last.

    Raises: StoreError, StoreFull, ObjectConflict.
    """
    mine = sorted(
        path for path in directory.iterdir() if path.is_file() and _owner(path.name) == rank
    )
    mine.sort(key=lambda path: path.name == ".metadata")
    return [files.put_file(path, f"{prefix}/{path.name}") for path in mine]


def shares_complete(shares: Iterable[Sequence[FileRecord] | None]) -> tuple[FileRecord, ...] | None:
    """All files of a checkpoint, from what each rank has in the store; None if a rank lost its
    share, and so the checkpoint."""
    found = list(shares)
    files = tuple(record for share in found for record in share or ())
    described = any(record.path.endswith("/.metadata") for record in files)
    return files if described and all(share is not None for share in found) else None


def fetch_checkpoint(files: Files, node: Node, folder: Path, *, timeout_s: float = 3600.0) -> Path:
    """The checkpoint root with the files of a node, as `load_checkpoint` takes it; downloaded
    unless it is there already.

    `timeout_s`: how long another rank of this machine may take to download it.
    Raises: ObjectMissing, ObjectCorrupt, StoreFull, DeadlineExceeded.
    """
    version = node.outputs["version"]
    name = f"iter_{node.outputs['version']:07d}"
    root = folder / "fetched" / node.digest[:16]
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        _lock(lock, timeout_s, node)
        (root / TRACKER).write_text(str(version))
        if not (root / name).is_dir():
            _download(files, node, root, name)
    return root


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete local checkpoints, unfinished ones, and everything
    that was fetched.

    The same of a critic with ranks of its own, in the folder `critic`.
    """
    complete = sorted(
        path for path in folder.glob("iter_*") if path.name.removeprefix("iter_").isdigit()
    )
    for old in (folder / "fetched", *folder.glob("iter_*.unfinished"), *complete[:-keep]):
        shutil.rmtree(old, ignore_errors=True)
    if (folder / CRITIC).is_dir():
        prune(folder / CRITIC, keep)


def _lock(lock: IO[str], timeout_s: float, node: Node) -> None:
    """Have the file lock. Raises: DeadlineExceeded."""
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > end_s:
                raise DeadlineExceeded(
                    "another rank of this machine does not finish downloading a checkpoint",
                    where=lock.name,
                    found=f"{node.stage} {node.digest[:12]} not there after {timeout_s:g} s",
                    do="look whether the store answers; the same command tries again",
                ) from error
        time.sleep(LOOK_INTERVAL_S)


def _download(files: Files, node: Node, root: Path, name: str) -> None:
    """The files of a node as `root`/`name`, a critic's as `root`/critic/`name`, which is there
    before the other is."""
    if not node.files:
        raise ObjectMissing(
            "the checkpoint's node names no files", where=f"nodes/{node.stage}/{node.digest}.json"
        )
    parts: dict[Path, list[FileRecord]] = {root / CRITIC / name: [], root / name: []}
    for record in node.files:
        within_critic = Path(record.path).parent.name == CRITIC
        parts[root / CRITIC / name if within_critic else root / name].append(record)
    for target, records in parts.items():
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        for record in records:
            files.get_file(record.path, partial / Path(record.path).name, sha256=record.sha256)
        if records:
            partial.rename(target)


def _owner(name: str) -> int:
    """The rank that wrote a file of a torch_dist directory: `__3_0.distcp` is rank 3's, everything
    else rank 0's."""
    return int(name.split("_")[2]) if name.startswith("__") and name.endswith(".distcp") else 0
