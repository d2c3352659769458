"""How busy the GPUs were while something ran: `nvidia-smi`, asked ten times a second.

A sample says whether any kernel ran in the last moments (NVML's utilisation, a window of 1/6 to 1 s), so it finds stages and gaps
of seconds, not of milliseconds. Without `nvidia-smi` there are no samples.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY_MS = 100


class Watch:
    """Samples, once the watch has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.percents: list[float] = []
        """Of all GPUs together, one after another."""
        self.peak_gib = 0.0
        """Largest memory in use on any of them, of all processes."""

    def read(self) -> None:
        """Take what was written so far; a line that is cut off is left out."""
        rows = [line.split(",") for line in self._path.read_text().splitlines()]
        known = [row for row in rows if len(row) == 2 and all(cell.strip().isdigit() for cell in row)]
        self.percents = [float(percent) for percent, _ in known]
        self.peak_gib = max((float(mib) for _, mib in known), default=0.0) / 1024

    @property
    def idle(self) -> float | None:
        """Share of the samples without any kernel; None without samples."""
        return sum(percent == 0 for percent in self.percents) / len(self.percents) if self.percents else None


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(Path(folder) / "gpus.csv")
        program = shutil.which("nvidia-smi")
        if program is None:
            yield watch
            return
        query = [program, "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", f"-lms={EVERY_MS}"]
        with watch._path.open("w") as output:
            process = subprocess.Popen(query, stdout=output, stderr=subprocess.DEVNULL)
            try:
                yield watch
            finally:
                process.kill()
                process.wait()
                watch.read()
