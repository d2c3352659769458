"""How long an engine samples nothing, seen from outside: somebody asks it for one token, again and again.

While an engine is paused a request waits inside, so the longest answer is the pause, less what an answer takes otherwise.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

ASK = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}}
TIMEOUT_S = 600.0


class Witness:
    """Answers of one engine, while a thread asks it."""

    def __init__(self, url: str) -> None:
        self._url, self._over = url, threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.seconds: list[float] = []

    def _ask(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S) as http:
            while not self._over.is_set():
                begun_s = time.perf_counter()
                with suppress(httpx.TransportError):  # an engine that went away has no pause to be seen
                    http.post(f"{self._url}/generate", json=ASK)
                self.seconds.append(time.perf_counter() - begun_s)

    @property
    def paused_s(self) -> float:
        """Longest answer − median answer; 0 if there were none."""
        return max(self.seconds) - statistics.median(self.seconds) if self.seconds else 0.0

    def start(self) -> None:
        """Begin to ask; returns after the first answer."""
        self._thread.start()
        while not self.seconds and self._thread.is_alive():
            time.sleep(0.001)

    def stop(self) -> None:
        """Wait for the last answer."""
        self._over.set()
        self._thread.join(TIMEOUT_S)


@contextmanager
def witnessed(url: str) -> Iterator[Witness]:
    """Ask while the block runs, and for some answers before and after."""
    witness = Witness(url)
    witness.start()
    try:
        time.sleep(0.2)
        yield witness
        time.sleep(0.2)
    finally:
        witness.stop()
