"""Score samples in a separate process: `python -m rlpipe.rewards.worker_process`.

`workers.ProcessWorker` starts the process and sends it messages. A message is a frame
(`workers.FRAME`: number and length) and a pickle. Message 0 is `(sys.path, function config, args)`;
the others are lists of samples. The answer has the number of its message. It is None or an error
for message 0, and scores or a RewardError for the others.

The reward function is user code, so both pipes are protected from it:

- Standard input is empty and standard output goes to stderr, for the function and for every program
  that it starts.
- A forked process loses both pipes. It can neither answer nor keep them open after the end of this
  process.
- If the function closes a pipe, this process ends.

This process leads a process group, which is killed when the process or the stage ends. Programs
that the function left running end with it. The parent enforces deadlines.
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
from rlpipe.rewards.scorer import Scorer
from rlpipe.rewards.workers import FRAME
from rlpipe.system.orphan import end_with
from rlpipe.types import Sample

PR_SET_PDEATHSIG = 1
PIPE_LOST_STATUS = 71
"""Exit status after user code closed a pipe."""


class Pipe:
    """One end of a pipe to the stage. Every forked process closes it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._identity = self._file_identity()
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
        """Write all bytes of `content`."""
        remaining = memoryview(content)
        while remaining:
            self._check()
            remaining = remaining[os.write(self._descriptor, remaining) :]

    def _check(self) -> None:
        """End the process if user code closed the descriptor, or reused it for another file."""
        if self._file_identity() == self._identity:
            return
        os.write(2, b"the reward function closed a pipe of its process; the process ends\n")
        os._exit(PIPE_LOST_STATUS)

    def _file_identity(self) -> tuple[int, int] | None:
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return None
        return status.st_dev, status.st_ino


def main() -> None:
    """Load the reward function and answer messages until the stage closes its pipe."""
    requests = Pipe(sys.stdin.fileno())
    answers = Pipe(sys.stdout.fileno())
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # On Linux the process also ends with the thread that started it. Arithmetic on huge numbers can
    # hold the interpreter lock, and then the reader thread cannot notice the closed pipe.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        end_with(os.getppid())
    messages: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, messages), daemon=True).start()
    number, content = messages.get()
    parent_path, function, args = pickle.loads(content)
    sys.path.extend(entry for entry in parent_path if entry not in sys.path)
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
        except KeyboardInterrupt as error:
            # Raised by the function: Ctrl-C does not reach a process of another session.
            answer = RewardError(error_text(error))
        _answer(answers, number, answer)


def _samples(content: bytes) -> list[Sample]:
    """Unpickle the samples. Raises: RewardError if a class of theirs cannot be imported."""
    try:
        return pickle.loads(content)
    except Exception as error:  # unpickling a user class can raise anything
        raise RewardError(
            f"the reward process cannot unpickle the samples: {type(error).__name__}: {error}"
        ) from error


def _read(pipe: Pipe, messages: queue.SimpleQueue[tuple[int, bytes]]) -> None:
    """Queue messages until the stage closes its pipe; then end the process, even during a call."""
    while len(frame := pipe.read(FRAME.size)) == FRAME.size:
        number, size = FRAME.unpack(frame)
        messages.put((number, pipe.read(size)))
    os._exit(0)


def _answer(pipe: Pipe, number: int, message: object) -> None:
    content = pickle.dumps(message)
    pipe.write(FRAME.pack(number, len(content)) + content)


if __name__ == "__main__":
    main()
