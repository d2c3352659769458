"""Checkpoint directories on local disk and in the store.

All ranks write a checkpoint locally and upload their own share; the checkpoint counts once its node
is recorded. A download checks the sha256 of every file, and makes the directory appear complete or
not at all, once per machine. A critic with ranks of its own writes its part into the subfolder
`critic`, locally and in the store; both parts are one checkpoint.

Entry points: `upload_share` and `BackgroundUpload`, `shares_complete`, `fetch_checkpoint`, `prune`.
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
LOCK_INTERVAL_S = 0.05


@dataclass(frozen=True)
class Upload:
    """A local checkpoint that is being uploaded. Ranks keep it until a driver has recorded it."""

    prefix: str
    """Target in the store, different for each attempt."""
    inputs: Inputs
    outputs: dict[str, Any]


class BackgroundUpload:
    """One rank's share of an upload, in the background."""

    def __init__(self, upload: Upload, begin: Callable[[], Future[list[FileRecord]]]) -> None:
        """`begin` starts the upload; called again if the store was unreachable or full."""
        self.upload = upload
        self._begin = begin
        self._future: Future[list[FileRecord]] | None = begin()

    @property
    def future(self) -> Future[list[FileRecord]]:
        """Result of the upload. Starts the upload again after a failure."""
        if self._future is None:
            self._future = self._begin()
        return self._future

    def after_failure(self, error: BaseException) -> BackgroundUpload | None:
        """Return this upload if the failure may be temporary, else None.

        The next use of `future` starts the upload again.
        """
        self._future = None
        permanent = not isinstance(error, StoreError) or isinstance(
            error, (ObjectConflict, ObjectMissing)
        )
        return None if permanent else self


def upload_share(files: Files, directory: Path, prefix: str, rank: int) -> list[FileRecord]:
    """Upload the files of `directory` that this rank wrote; rank 0 adds the common files.

    Raises: StoreError, StoreFull, ObjectConflict.
    """
    own = sorted(
        path for path in directory.iterdir() if path.is_file() and _owner(path.name) == rank
    )
    # .metadata last: it makes the other files a checkpoint
    own.sort(key=lambda path: path.name == ".metadata")
    return [files.put_file(path, f"{prefix}/{path.name}") for path in own]


def shares_complete(shares: Iterable[Sequence[FileRecord] | None]) -> tuple[FileRecord, ...] | None:
    """Return all files of a checkpoint; None if a rank has lost its share.

    `shares`: the uploaded files of each rank.
    """
    all_shares = list(shares)
    files = tuple(record for share in all_shares for record in share or ())
    has_metadata = any(record.path.endswith("/.metadata") for record in files)
    return files if has_metadata and all(share is not None for share in all_shares) else None


def fetch_checkpoint(files: Files, node: Node, folder: Path, *, timeout_s: float = 3600.0) -> Path:
    """Download the files of a node unless they exist; return the root for `load_checkpoint`.

    `timeout_s`: seconds to wait for another rank of this machine that downloads them. Raises:
    ObjectMissing, ObjectCorrupt, StoreFull, DeadlineExceeded.
    """
    version = node.outputs["version"]
    name = f"iter_{version:07d}"
    # by digest: checkpoints of two branches may have the same version
    root = folder / "fetched" / node.digest[:16]
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        _lock(lock, timeout_s, node)
        # Megatron reads the version to load from this file
        (root / TRACKER).write_text(str(version))
        if not (root / name).is_dir():
            _download(files, node, root, name)
    return root


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` local checkpoints, and everything that was downloaded.

    Unfinished checkpoints are deleted too. The same is done in the subfolder `critic`.
    """
    complete = sorted(
        path for path in folder.glob("iter_*") if path.name.removeprefix("iter_").isdigit()
    )
    for path in (folder / "fetched", *folder.glob("iter_*.unfinished"), *complete[:-keep]):
        shutil.rmtree(path, ignore_errors=True)
    if (folder / CRITIC).is_dir():
        prune(folder / CRITIC, keep)


def _lock(lock: IO[str], timeout_s: float, node: Node) -> None:
    """Take the file lock. Raises: DeadlineExceeded."""
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
                    do="check that the store answers; the same command tries again",
                ) from error
        time.sleep(LOCK_INTERVAL_S)


def _download(files: Files, node: Node, root: Path, name: str) -> None:
    """Download the files of a node to `root/name`, and a critic's files to `root/critic/name`."""
    if not node.files:
        raise ObjectMissing(
            "the checkpoint's node names no files", where=f"nodes/{node.stage}/{node.digest}.json"
        )
    # The critic's part first: `root/name` exists only once the whole checkpoint does.
    parts: dict[Path, list[FileRecord]] = {root / CRITIC / name: [], root / name: []}
    for record in node.files:
        of_critic = Path(record.path).parent.name == CRITIC
        parts[root / CRITIC / name if of_critic else root / name].append(record)
    for target, records in parts.items():
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        for record in records:
            files.get_file(record.path, partial / Path(record.path).name, sha256=record.sha256)
        if records:
            partial.rename(target)  # atomic: readers see all files or none


def _owner(name: str) -> int:
    """Return the rank that wrote a file of a torch_dist directory.

    Rank 3 writes `__3_0.distcp`; files with other names are rank 0's.
    """
    return int(name.split("_")[2]) if name.startswith("__") and name.endswith(".distcp") else 0
