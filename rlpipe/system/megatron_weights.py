"""Use a Megatron checkpoint as a model directory: convert it once, and keep the result.

    directory = converted_directory(Path("/ckpt"), origin, folder, step=None, key="model.source...")

The conversion runs in a child process, because it needs Megatron and torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import rlpipe.errors
from rlpipe.errors import ConfigError, ResourceError, RlpipeError
from rlpipe.system.orphan import FLAG

MODULE = "rlpipe.engines.megatron.checkpoint.conversion"
TRACKER = "latest_checkpointed_iteration.txt"
"""File of Megatron with the newest iteration of a folder of checkpoints."""
REPORT_INTERVAL_S = 5.0


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
    if not checkpoint.is_dir() or not is_megatron_checkpoint(checkpoint):
        raise ConfigError(
            "no Megatron checkpoint",
            where=key,
            found=f"no {TRACKER}, iter_… or .metadata in {checkpoint}"
            if checkpoint.is_dir()
            else f"no directory {checkpoint}",
            expected="a folder such as iter_0000100, or its parent",
        )
    target = folder / f"megatron-{_identity(checkpoint, origin, step)}"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _convert(checkpoint, origin, target, step, key)
    return target


def _identity(checkpoint: Path, origin: Path, step: int | None) -> str:
    """Return a digest of the paths, sizes and times of change of all files."""
    digest = hashlib.sha256(f"{checkpoint.resolve()}|{step}".encode())
    for path in sorted([*checkpoint.rglob("*"), *origin.iterdir()]):
        if path.is_file():
            stat = path.stat()
            digest.update(f"|{path}|{stat.st_size}|{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _convert(checkpoint: Path, origin: Path, target: Path, step: int | None, key: str) -> None:
    job = {
        "to": "huggingface",
        "checkpoint": str(checkpoint.absolute()),
        "output": str(target.absolute()),
        "origin": str(origin.absolute()),
        "step": step,
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
                    done, total = (message[name] // 2**20 for name in ("done", "total"))
                    print(f"{key}: converted {done:,} of {total:,} MiB", file=sys.stderr)
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
