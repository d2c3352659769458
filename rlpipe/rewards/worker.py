"""Score samples in a process of its own: `python -m rlpipe.rewards.worker`, started and asked by
`workers.ProcessWorker`.

A message is a frame (`workers.FRAME`: its number and its length) and a pickle. Message 0 is
`(sys.path, function config, args)`; the others are lists of samples. The answer to a message has
its number: None or an error to message 0, scores or a RewardError to the others.

The reward function is the user's and may do anything, so the two pipes are kept from it. Standard
input is empty and standard output goes to stderr, for the function and every program it starts. A
process that is forked here loses both pipes: it can neither answer nor keep them open after this
process has died. If the function closes the pipes, this process ends.

This process leads a process group, which is killed when this process or the stage ends: what the
function left running does not stay behind. On Linux it is also killed when the thread that started
it ends, because arithmetic on huge numbers holds the interpreter so that nothing else in the
process runs.

Not for anyone else to start; it keeps no deadline of its own.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
import threading

from rlpipe.config.guard import error_text, guarded
from rlpipe.errors import RewardError, RlpipeError
from rlpipe.rewards.python import Scorer
from rlpipe.rewards.workers import FRAME
from rlpipe.system.orphan import end_with
from rlpipe.types import Sample

PR_SET_PDEATHSIG = 1
PIPE_LOST_STATUS = 71
"""Exit status after the user's code has closed a pipe."""


class Pipe:
    """One end of a pipe to the stage, closed in every process that is forked here."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._identity = self._seen()
        os.register_at_fork(after_in_child=lambda: os.close(self._descriptor))

    def read(self, size: int) -> bytes:
        """Read exactly `size` bytes, or fewer at the end of the stream."""
        content = b""
        while len(content) < size:
            self._check()
            piece = os.read(self._descriptor, size - len(content))
            if not piece:
                break
            content += piece
        return content

    def write(self, content: bytes) -> None:
        """Write all of it."""
        left = memoryview(content)
        while left:
            self._check()
            left = left[os.write(self._descriptor, left) :]

    def _check(self) -> None:
        """End the process if the descriptor is closed, or names a file that the user's code has
        opened since."""
        if self._seen() == self._identity:
            return
        os.write(2, b"the reward function closed a pipe of its process; the process ends\n")
        os._exit(PIPE_LOST_STATUS)

    def _seen(self) -> tuple[int, int] | None:
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return None
        return status.st_dev, status.st_ino


def main() -> None:
    requests = Pipe(sys.stdin.fileno())
    answers = Pipe(sys.stdout.fileno())
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        end_with(os.getppid())
    messages: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, messages), daemon=True).start()
    number, content = messages.get()
    path, function, args = pickle.loads(content)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        scorer = guarded(Scorer)(function, args)
    except RlpipeError as error:
        _answer(answers, number, error)
        return
    _answer(answers, number, None)
    while True:
        number, content = messages.get()
        try:
            answer: object = scorer.score(_samples(content))
        except RewardError as error:
            answer = error
        except (
            KeyboardInterrupt
        ) as error:  # the function's own: Ctrl-C does not reach another session
            answer = RewardError(error_text(error))
        _answer(answers, number, answer)


def _samples(content: bytes) -> list[Sample]:
    """Raises: RewardError if something in them is of a class that this process cannot import."""
    try:
        return pickle.loads(content)
    except Exception as error:  # whatever a class of theirs comes up with
        raise RewardError(
            f"the samples cannot be read in the reward's process: {type(error).__name__}: {error}"
        ) from error


def _read(pipe: Pipe, messages: queue.SimpleQueue[tuple[int, bytes]]) -> None:
    """Hand messages over until the stage closes its end; then end the process, also in the middle
    of a call."""
    while len(frame := pipe.read(FRAME.size)) == FRAME.size:
        number, size = FRAME.unpack(frame)
        messages.put((number, pipe.read(size)))
    os._exit(0)


def _answer(pipe: Pipe, number: int, message: object) -> None:
    content = pickle.dumps(message)
    pipe.write(FRAME.pack(number, len(content)) + content)


if __name__ == "__main__":
    main()
