"""Sample the utilisation of the GPUs with `nvidia-smi`, ten times a second.

A sample tells whether a kernel ran in the last 1/6 to 1 s (NVML's utilisation), so it shows stages
and gaps of seconds, not of milliseconds. Without `nvidia-smi` there are no samples.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

EVERY_MS = 100


@dataclass(frozen=True)
class Moment:
    """One sample of one GPU."""

    time: float
    """Seconds since the epoch."""
    gpu: str
    percent: int
    """Share of the window with a kernel, in %."""
    mib: int
    """Memory in use by all processes."""


class Watch:
    """Samples of all GPUs, complete once the watch has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.moments: list[Moment] = []

    def read(self) -> None:
        """Read the samples so far; a line that cannot be parsed is skipped."""
        self.moments = [
            moment for line in self._path.read_text().splitlines() if (moment := read_moment(line))
        ]

    def within(self, begin: float, end: float) -> list[Moment]:
        """Return the samples between two times (seconds since 1970).

        Only GPUs on which a kernel ran count: the machine may have GPUs that the run does not use.
        """
        seen = [moment for moment in self.moments if begin <= moment.time <= end]
        used = {moment.gpu for moment in seen if moment.percent}
        return [moment for moment in seen if moment.gpu in used]


def read_moment(line: str) -> Moment | None:
    """Parse a line of nvidia-smi; None if it is not a sample."""
    try:
        when, gpu, percent, mib = (cell.strip() for cell in line.split(","))
        return Moment(
            datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp(), gpu, int(percent), int(mib)
        )
    except ValueError:
        return None


def idle(moments: Sequence[Moment]) -> float:
    """Return the share of samples without a kernel."""
    return sum(moment.percent == 0 for moment in moments) / len(moments)


@contextmanager
def watched() -> Iterator[Watch]:
    """Sample the GPUs while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(Path(folder) / "gpus.csv")
        program = shutil.which("nvidia-smi")
        if program is None:
            yield watch
            return
        query = [
            program,
            "--query-gpu=timestamp,index,utilization.gpu,memory.used",
            "--format=csv,noheader,nounits",
            f"--loop-ms={EVERY_MS}",
            *([f"--id={ours}"] if (ours := os.environ.get("CUDA_VISIBLE_DEVICES")) else []),
        ]
        with watch._path.open("w") as output:
            process = subprocess.Popen(query, stdout=output, stderr=subprocess.DEVNULL)
            try:
                yield watch
            finally:
                process.kill()
                process.wait()
                watch.read()
