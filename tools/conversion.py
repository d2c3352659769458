"""Sizes, progress bar, report and exit codes of the conversion commands."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from rlpipe.errors import ConfigError, RlpipeError

if TYPE_CHECKING:
    from rlpipe.engines.megatron.checkpoint.conversion.convert import Report

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


def size_bytes(text: str) -> int:
    """Return the bytes of a size such as "5GB"; units of 1024. Raises: ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or (size := int(float(match[1]) * _UNITS[match[2].upper()])) <= 0:
        raise ConfigError(
            "not a size", where="--max-shard-size", found=text, expected="such as 5GB or 500MB"
        )
    return size


def hide_gpus() -> None:
    """Hide GPUs from Megatron, before its import: conversions use files only."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@contextmanager
def bar() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a progress function: a bar on a terminal, else a line a file."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, what: print(
            f"{done / 1024**2:,.0f} of {total / 1024**2:,.0f} MiB: {what}", file=sys.stderr
        )
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, description=what
        )


def counted(number: int, noun: str) -> str:
    """Return "1 file" or "2 files"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_report(report: Report) -> None:
    """Print the result in a few lines."""
    size = f"{report.total_bytes / 1024**2:,.0f} MiB"
    print(
        f"{report.folder}: {report.tensors} tensors, {size} in {counted(report.files, 'file')}, "
        f"{report.dtype}, {report.seconds:.1f} s"
    )
    if report.reused_files:
        print(f"{report.reused_files} files were reused from an interrupted start")
    for note in report.notes:
        print(f"note: {note}")


def exit_code(work: Callable[[], int]) -> int:
    """Run a command; return its exit code, 2 after an error of rlpipe, 130 after Ctrl-C."""
    try:
        return work()
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues from here", file=sys.stderr)
        return 130
