"""A terminal emulator that runs a program in a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte

HEIGHT = 60
TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
"""Without a controlling terminal, Ctrl-C would reach no process."""


class Terminal:
    """A program on a pseudo-terminal, and the screen that a person would see."""

    def __init__(self, source: str, home: Path, *, width: int = 80, **environment: str) -> None:
        self._screen = pyte.Screen(width, HEIGHT)
        self._stream = pyte.ByteStream(self._screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, width, 0, 0))
        os.set_blocking(self._master, False)
        variables = {"TERM": "xterm-256color", "RLPIPE_HOME": str(home), **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL + source],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        os.close(slave)

    @property
    def lines(self) -> list[str]:
        """Lines on the screen now, without empty lines at the end."""
        self._feed()
        text = "\n".join(line.rstrip() for line in self._screen.display)
        return text.rstrip().splitlines()

    @property
    def has_cursor(self) -> bool:
        """True if the cursor is visible."""
        self._feed()
        return not self._screen.cursor.hidden

    def wait_for(self, text: str, *, timeout_s: float = 60.0) -> list[str]:
        """Wait until the screen shows this text; return its lines."""
        deadline_s = time.monotonic() + timeout_s
        while text not in "\n".join(lines := self.lines):
            assert time.monotonic() < deadline_s, lines
            time.sleep(0.02)
        return lines

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._master, b"\x03")

    def end(self, *, timeout_s: float = 60.0) -> list[str]:
        """Wait until the program has ended; return the last screen."""
        deadline_s = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, self.lines
            self._feed()  # a full pseudo-terminal would block the program
            time.sleep(0.02)
        lines = self.lines
        os.close(self._master)
        return lines

    def _feed(self) -> None:
        while True:
            try:
                chunk = os.read(self._master, 65536)
            # EIO: the program has ended.
            except OSError:
                return
            self._stream.feed(chunk)
