"""Capture what this process writes to its terminal, at the level of file descriptors.

A live block is redrawn in place, so a line written into it would tear it. rich replaces
`sys.stdout` and `sys.stderr`, which C++ libraries and log handlers made earlier do not use. Here
descriptors 1 and 2 become a pipe, and a thread prints its lines through the console.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import select
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

STDOUT = 1
STDERR = 2
PIPE_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16


class CapturedOutput:
    """Descriptors 1 and 2, as far as they are terminals, become a pipe between start and stop.

    `print_lines` is called in a thread with complete lines.
    """

    def __init__(self, print_lines: Callable[[list[str]], None]) -> None:
        self._print_lines = print_lines
        self._terminals: dict[int, int] = {}
        self._rest = b""

    @property
    def unfinished(self) -> str:
        """The last line so far, if it has no end yet: a prompt, or a bar that is redrawn."""
        return _text(self._rest)

    def start(self) -> TextIO:
        """Begin; return a stream that writes to the terminal itself."""
        self._read_end, write_end = os.pipe()
        # A writer that holds the GIL must not wait for the thread that reads: it needs the GIL.
        with suppress(OSError):
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._wake_end, self._end = os.pipe()
        self._stream = os.fdopen(
            os.dup(STDERR), "w", encoding=sys.stderr.encoding, errors="replace", newline=""
        )
        _flush()
        for descriptor in (STDOUT, STDERR):
            if os.isatty(descriptor):
                self._terminals[descriptor] = os.dup(descriptor)
                os.dup2(write_end, descriptor)
        os.close(write_end)
        if faulthandler.is_enabled():
            # The stack trace of a crash would stay in the pipe of the dead process.
            faulthandler.enable(file=self._stream)
        self._thread = threading.Thread(target=self._forward, name="terminal output", daemon=True)
        self._thread.start()
        return self._stream

    def stop(self) -> None:
        """Give the descriptors back, after everything written before has been printed."""
        _flush()
        for descriptor, terminal in self._terminals.items():
            os.dup2(terminal, descriptor)
            os.close(terminal)
        self._terminals.clear()
        if faulthandler.is_enabled():
            faulthandler.enable(file=STDERR)
        # Child processes may hold the write end open, so the pipe's end is no sign.
        os.write(self._end, b"\0")
        self._thread.join()
        self._stream.close()
        for descriptor in (self._read_end, self._wake_end, self._end):
            os.close(descriptor)

    def _forward(self) -> None:
        while True:
            readable = select.select([self._read_end, self._wake_end], [], [])[0]
            if self._read_end not in readable:
                break
            chunk = os.read(self._read_end, CHUNK_BYTES)
            if not chunk:
                break
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._print(lines)
        self._print([self._rest] if self._rest else [])

    def _print(self, lines: list[bytes]) -> None:
        # A bar that redraws its line with carriage returns is shown in its last state.
        texts = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]
        if texts:
            self._print_lines(texts)


def _text(line: bytes) -> str:
    """Return a line as text. A bar that redraws its line is taken in its last state."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
