"""Checkpoint directories between local disk and the store.

A checkpoint is written locally by all ranks, uploaded by all (each its own share), and counts once its node is recorded.
Fetching checks every file's sha256 and makes the directory appear complete or not at all, once per machine.

Not here: what is inside (`engines.megatron.checkpoint`), and when one is due (the checkpoint stage).
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from rlpipe.errors import ObjectMissing
from rlpipe.store.files import Files
from rlpipe.types import FileRecord, Node

TRACKER = "latest_checkpointed_iteration.txt"


def upload_share(files: Files, directory: Path, prefix: str, rank: int) -> list[FileRecord]:
    """Upload the files of `directory` that this rank wrote; rank 0 adds the common ones, `.metadata` last.

    Raises: StoreError, StoreFull, ObjectConflict.
    """
    mine = sorted(path for path in directory.iterdir() if path.is_file() and _owner(path.name) == rank)
    mine.sort(key=lambda path: path.name == ".metadata")
    return [files.put_file(path, f"{prefix}/{path.name}") for path in mine]


def fetch_checkpoint(files: Files, node: Node, folder: Path) -> Path:
    """The checkpoint root with the files of a node, as `load_checkpoint` takes it; downloaded unless it is there already.

    Raises: ObjectMissing, ObjectCorrupt, StoreFull.
    """
    version, name = node.outputs["version"], f"iter_{node.outputs['version']:07d}"
    root = folder / "fetched" / node.digest[:16]
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (root / TRACKER).write_text(str(version))
        if not (root / name).is_dir():
            _download(files, node, root / name)
    return root


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete local checkpoints, unfinished ones, and everything that was fetched."""
    complete = sorted(path for path in folder.glob("iter_*") if path.name.removeprefix("iter_").isdigit())
    for old in (folder / "fetched", *folder.glob("iter_*.unfinished"), *complete[:-keep]):
        shutil.rmtree(old, ignore_errors=True)


def _download(files: Files, node: Node, target: Path) -> None:
    if not node.files:
        raise ObjectMissing("the checkpoint's node names no files", where=f"nodes/{node.stage}/{node.digest}.json")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for record in node.files:
        files.get_file(record.path, partial / Path(record.path).name, sha256=record.sha256)
    partial.rename(target)


def _owner(name: str) -> int:
    """The rank that wrote a file of a torch_dist directory: `__3_0.distcp` is rank 3's, everything else rank 0's."""
    return int(name.split("_")[2]) if name.startswith("__") and name.endswith(".distcp") else 0
