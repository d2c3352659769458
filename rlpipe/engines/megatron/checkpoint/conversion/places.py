"""What a path holds, and folders that appear when they are complete.

Not here: what is in the files (`hf_files`, `torch_dist`, `legacy`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError, ResourceError, StoreFull

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Folder and tracker of weights that no training made, as Megatron-LM calls them."""
RECORD = ".conversion.json"
"""In what was made: from what, and how."""


@dataclass(frozen=True)
class Place:
    """A checkpoint's folder."""

    folder: Path
    legacy: bool
    """In the older format, a file for each rank."""


def find_checkpoint(path: Path, step: int | None = None) -> Place:
    """The checkpoint at `path`: a folder like iter_0000100 itself, or the one above it (`step`:
    which; None: the latest).

    Raises: ConfigError if there is none.
    """
    for folder in (path, *_below(path, step)):
        if (folder / ".metadata").is_file():
            return Place(folder, legacy=False)
        if any(folder.glob("mp_rank_*")):
            return Place(folder, legacy=True)
    raise ConfigError(
        "no checkpoint here",
        where=str(path),
        found="nothing"
        if not path.exists()
        else f"no {TRACKER}, no .metadata, no mp_rank_…"
        if step is None
        else f"no {step}",
        expected="a folder like iter_0000100, or the one above it",
    )


def _below(path: Path, step: int | None) -> list[Path]:
    if step is not None:
        return [path / f"iter_{step:07d}"]
    tracker = path / TRACKER
    latest = tracker.read_text().strip() if tracker.is_file() else ""
    return (
        [path / (f"iter_{int(latest):07d}" if latest.isdigit() else latest)]
        if latest in (RELEASE,) or latest.isdigit()
        else []
    )


def is_hf(path: Path) -> bool:
    """Is it a Hugging Face directory?"""
    return (path / "config.json").is_file()


def refuse_iterations(save: Path, *, force: bool) -> None:
    """Raises: ConfigError if the folder's latest checkpoint is one of a training, which a release
    would hide."""
    tracker = save / TRACKER
    latest = tracker.read_text().strip() if tracker.is_file() else RELEASE
    if latest != RELEASE and not force:
        raise ConfigError(
            "there are checkpoints of a training",
            where=str(tracker),
            found=latest,
            do="give another place, or --force",
        )


def point_to_release(save: Path) -> None:
    """Make the release the folder's latest checkpoint."""
    marker = save / TRACKER
    marker.with_suffix(".new").write_text(RELEASE)
    marker.with_suffix(".new").replace(marker)


def identity(files: Iterator[Path] | list[Path], **settings: Any) -> str:
    """A digest of what is converted, by name, size and time of change, and of how."""
    seen = [
        (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(files)
    ]
    return hashlib.sha256(
        json.dumps([seen, settings], sort_keys=True, default=str).encode()
    ).hexdigest()


@contextlib.contextmanager
def unfinished(target: Path, name: str, *, needed_bytes: int, force: bool) -> Iterator[Path]:
    """A folder beside `target`, under whose name it appears at the end; what an interrupted start
    left in it is there again if its name (`identity`) is the same.

    Raises: ConfigError if something else is in the way and `force` is off; StoreFull; ResourceError
    if another process is at it.
    """
    if target.exists() and any(target.iterdir()) and not force:
        raise ConfigError(
            "there is something already",
            where=str(target),
            do="give another place, or --force to replace it",
        )
    folder = target.with_name(f"{target.name}.unfinished")
    folder.mkdir(parents=True, exist_ok=True)
    with _mine(folder):
        marker = folder / ".identity"
        if not marker.is_file() or marker.read_text() != name:
            _clear(folder)
            marker.write_text(name)
        there = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        _require_room(folder, needed_bytes - there)
        yield folder
        for path in (marker, *folder.glob("*.partial")):
            path.unlink()
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    (target / ".lock").unlink(missing_ok=True)


def is_made(target: Path, name: str) -> bool:
    """Did an earlier start make this very thing?"""
    record = target / RECORD
    return record.is_file() and json.loads(record.read_text()).get("identity") == name


def record(folder: Path, content: Mapping[str, Any]) -> None:
    """Write down what was made of what."""
    (folder / RECORD).write_text(json.dumps(content, indent=1, default=str) + "\n")


@contextlib.contextmanager
def _mine(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ResourceError(
                "another process converts to the same place", where=str(folder), do="wait for it"
            ) from error
        yield


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != ".lock":
            path.unlink()


def _require_room(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StoreFull(
            "no room on the disk",
            where=str(folder),
            found=f"{free / 1024**2:,.0f} MiB free",
            expected=f"{needed_bytes / 1024**2:,.0f} MiB",
            do="make room and start the same command again",
        )
