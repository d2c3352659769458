"""Megatron checkpoints on disk: find one, convert it once and keep the result.

    find_checkpoint(Path("/ckpt"), step)      the folder of an iteration
    converted_directory(Path("/ckpt"), ...)   its weights as a Hugging Face directory
    converted_adam_state(Path("/ckpt"), ...)  its optimizer state, for any parallel layout

A conversion runs in a child process, because it needs Megatron and torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import rlpipe.errors
from rlpipe.errors import ConfigError, ResourceError, RlpipeError
from rlpipe.system.orphan import FLAG

MODULE = "rlpipe.engines.megatron.checkpoint.conversion"
TRACKER = "latest_checkpointed_iteration.txt"
"""File of Megatron with the newest iteration of a folder of checkpoints."""
RELEASE = "release"
"""Megatron-LM's folder name and tracker content for weights without an iteration."""
REPORT_INTERVAL_S = 5.0
Kind = Literal["huggingface", "adam_state"]
"""Result of a conversion."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of one checkpoint."""

    folder: Path
    legacy: bool
    """True for the older format with a file for each rank."""

    @property
    def iteration(self) -> int | None:
        """Number of the iteration; None for converted weights and for a folder of another name."""
        number = self.folder.name.removeprefix("iter_")
        return int(number) if number.isdecimal() else None


def find_checkpoint(path: Path, step: int | None = None, *, key: str = "") -> CheckpointFolder:
    """Return the checkpoint at `path`.

    `path`: a folder like iter_0000100, or its parent. `step`: iteration to take from the parent;
    None: the latest. `key`: configuration key, for errors. Raises: ConfigError if there is no
    checkpoint.
    """
    for folder in (path, *_iteration_folders(path, step)):
        if (folder / ".metadata").is_file():
            return CheckpointFolder(folder, legacy=False)
        if any(folder.glob("mp_rank_*")):
            return CheckpointFolder(folder, legacy=True)
    if not path.exists():
        found = "no such directory"
    elif step is None:
        found = f"no {TRACKER}, no .metadata, no mp_rank_…"
    else:
        found = f"no iteration {step}"
    raise ConfigError(
        "no checkpoint in this directory",
        where=key or str(path),
        found=f"{found} in {path}" if key else found,
        expected="a folder like iter_0000100, or its parent",
    )


def _iteration_folders(path: Path, step: int | None) -> list[Path]:
    if step is not None:
        return [path / f"iter_{step:07d}"]
    tracker = path / TRACKER
    latest = tracker.read_text().strip() if tracker.is_file() else ""
    if latest.isdigit():
        return [path / f"iter_{int(latest):07d}"]
    return [path / RELEASE] if latest == RELEASE else []


def is_megatron_checkpoint(path: Path) -> bool:
    """True for a folder such as iter_0000100, or its parent."""
    return (
        (path / TRACKER).is_file()
        or (path / ".metadata").is_file()
        or any(path.glob("iter_*"))
        or any(path.glob("mp_rank_*"))
    )


def converted_directory(
    checkpoint: Path, origin: Path, folder: Path, *, step: int | None, key: str
) -> Path:
    """Return a model directory with the weights of a Megatron checkpoint.

    `checkpoint`: a folder such as iter_0000100, or its parent. `step`: iteration of the parent;
    None: the newest. `origin`: model directory with architecture and tokenizer. `folder`: parent of
    the result. An unchanged checkpoint is converted once. `key`: configuration key, for errors.

    Raises: ConfigError if there is no checkpoint or the model does not fit; ResourceError if the
    conversion process dies.
    """
    return _converted(checkpoint, origin, folder, step, key, "huggingface")


def converted_adam_state(
    checkpoint: Path, origin: Path, folder: Path, *, step: int | None, key: str
) -> Path:
    """Return a folder with the optimizer state of a Megatron checkpoint.

    Arguments and errors as `converted_directory`.
    """
    return _converted(checkpoint, origin, folder, step, key, "adam_state")


def _converted(
    checkpoint: Path, origin: Path, folder: Path, step: int | None, key: str, kind: Kind
) -> Path:
    prefix = "megatron" if kind == "huggingface" else f"megatron-{kind}"
    # The parent may be the run's store too (slime's --load and --save), which grows.
    source = find_checkpoint(checkpoint, step, key=key).folder
    target = folder / f"{prefix}-{_identity(source, origin)}"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks of one machine start at the same time, and one of them converts.
        with _locked(target.with_name(f"{target.name}.lock")):
            if not target.is_dir():
                _convert(source, origin, target, key, kind)
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _identity(checkpoint: Path, origin: Path) -> str:
    """Return a digest of the paths, sizes and times of change of all files."""
    digest = hashlib.sha256(str(checkpoint.resolve()).encode())
    for path in sorted([*checkpoint.rglob("*"), *origin.iterdir()]):
        if path.is_file():
            stat = path.stat()
            digest.update(f"|{path}|{stat.st_size}|{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _convert(checkpoint: Path, origin: Path, target: Path, key: str, kind: Kind) -> None:
    job = {
        "to": kind,
        "checkpoint": str(checkpoint.absolute()),
        "output": str(target.absolute()),
        "origin": str(origin.absolute()),
    }
    command = [sys.executable, "-m", MODULE, FLAG, str(os.getpid()), json.dumps(job)]
    print(f"{key}: converting {checkpoint} to {target}", file=sys.stderr)
    next_report_s = time.monotonic() + REPORT_INTERVAL_S
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            for message in _messages(process):
                if error := message.get("error"):
                    raise getattr(rlpipe.errors, error["type"], RlpipeError)(error["text"])
                if "report" in message:
                    return
                if time.monotonic() >= next_report_s:
                    percent = 100 * message["done"] // max(1, message["total"])
                    print(f"{key}: converted {percent} %", file=sys.stderr)
                    next_report_s = time.monotonic() + REPORT_INTERVAL_S
        finally:
            process.kill()  # after an interruption; otherwise the process has done its work
    raise ResourceError(
        "the conversion process ended without a report",
        where=f"{key}: {checkpoint}",
        found=f"exit code {process.returncode}",
    )


def _messages(process: subprocess.Popen[str]) -> Iterator[dict]:
    assert process.stdout is not None
    for line in process.stdout:
        # Libraries print other lines to the same pipe.
        if line.startswith("{"):
            yield json.loads(line)
