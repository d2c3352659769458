"""Folders of a conversion: publish the finished result.

`staging_folder` is a folder that gets its final name when it is
complete; an interrupted conversion continues in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError, ResourceError, StoreFull
from rlpipe.system.megatron_weights import RELEASE, TRACKER

RECORD = ".conversion.json"
"""File in a converted folder: source and settings of the conversion."""


def is_hf_directory(path: Path) -> bool:
    """True if `path` is a Hugging Face directory."""
    return (path / "config.json").is_file()


def refuse_training_checkpoints(save: Path, *, force: bool) -> None:
    """Raises: ConfigError if the folder's latest checkpoint is from a training.

    A release would hide it. `force` allows that.
    """
    tracker = save / TRACKER
    latest = tracker.read_text().strip() if tracker.is_file() else RELEASE
    if latest != RELEASE and not force:
        raise ConfigError(
            "this directory has checkpoints of a training",
            where=str(tracker),
            found=latest,
            do="choose another directory, or use --force",
        )


def point_to_release(save: Path) -> None:
    """Make the release the folder's latest checkpoint."""
    marker = save / TRACKER
    marker.with_suffix(".new").write_text(RELEASE)
    marker.with_suffix(".new").replace(marker)


def conversion_identity(files: Iterator[Path] | list[Path], **settings: Any) -> str:
    """Return a digest of the source files (path, size, modification time) and the settings."""
    stats = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(files)
    ]
    return hashlib.sha256(
        json.dumps([stats, settings], sort_keys=True, default=str).encode()
    ).hexdigest()


@contextlib.contextmanager
def staging_folder(
    target: Path, identity: str, *, needed_bytes: int, force: bool
) -> Iterator[Path]:
    """Yield a folder next to `target`, and rename it to `target` at the end of the context.

    Files of an interrupted conversion with the same `identity` are kept. Raises: ConfigError if the
    target has other content and `force` is off; StoreFull; ResourceError if another process
    converts to the same target.
    """
    if target.exists() and any(target.iterdir()) and not force:
        raise ConfigError(
            "the target directory is not empty",
            where=str(target),
            do="choose another directory, or use --force to replace it",
        )
    folder = target.with_name(f"{target.name}.unfinished")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        marker = folder / ".identity"
        if not marker.is_file() or marker.read_text() != identity:
            _clear(folder)
            marker.write_text(identity)
        existing = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        _require_disk_space(folder, needed_bytes - existing)
        yield folder
        for path in (marker, *folder.glob("*.partial")):
            path.unlink()
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    (target / ".lock").unlink(missing_ok=True)


def is_converted(target: Path, identity: str) -> bool:
    """True if an earlier conversion with this identity finished in `target`."""
    record = target / RECORD
    return record.is_file() and json.loads(record.read_text()).get("identity") == identity


def write_record(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the record of a conversion."""
    (folder / RECORD).write_text(json.dumps(content, indent=1, default=str) + "\n")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResourceError(
                "another process converts to the same directory",
                where=str(folder),
                do="wait until it ends",
            ) from error
        yield


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != ".lock":
            path.unlink()


def _require_disk_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StoreFull(
            "no room on the disk",
            where=str(folder),
            found=f"{free / 1024**2:,.0f} MiB free",
            expected=f"{needed_bytes / 1024**2:,.0f} MiB",
            do="free disk space and run the same command again",
        )
