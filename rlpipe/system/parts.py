"""`Parts`: measure the seconds of each part of a stage, for its record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Parts:
    """Seconds by name. A part `push/begin` is inside the part `push`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a part, also if the block fails."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start_s

    def inside(self, name: str, seconds: Mapping[str, float]) -> None:
        """Add parts that another process measured inside the part `name`."""
        self.seconds.update({f"{name}/{part}": part_s for part, part_s in seconds.items()})
