"""The process behind `workers.ProcessWorker`: `python -m rlpipe.rewards.worker`, spoken to over stdin and stdout.

Messages are a length and a pickle. First `(sys.path, function config, args)`, answered by None or the error of loading it; then
lists of samples, each answered by its scores or a RewardError. Whatever the verifier prints goes to stderr.

It ends when the stage is gone, even in the middle of a call: when stdin closes, and on Linux also when the thread that
started it ends, because arithmetic on huge numbers holds the interpreter so that nothing else in the process runs.

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
from typing import BinaryIO

from rlpipe.errors import RewardError, RlpipeError
from rlpipe.rewards.python import Scorer
from rlpipe.rewards.workers import HEADER
from rlpipe.types import Sample

PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, messages), daemon=True).start()
    path, function, args = pickle.loads(messages.get())
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        scorer = Scorer(function, args)
    except RlpipeError as error:
        _send(answers, error)
        return
    _send(answers, None)
    while True:
        content = messages.get()
        try:
            answer: object = scorer.score(_samples(content))
        except RewardError as error:
            answer = error
        _send(answers, answer)


def _samples(content: bytes) -> list[Sample]:
    """Raises: RewardError if something in them is of a class that this process cannot import."""
    try:
        return pickle.loads(content)
    except Exception as error:  # whatever a class of theirs comes up with
        raise RewardError(f"the samples cannot be read in the reward's process: {type(error).__name__}: {error}") from error


def _read(stream: BinaryIO, messages: queue.SimpleQueue[bytes]) -> None:
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        messages.put(stream.read(HEADER.unpack(header)[0]))
    os._exit(0)


def _send(stream: BinaryIO, message: object) -> None:
    content = pickle.dumps(message)
    stream.write(HEADER.pack(len(content)) + content)
    stream.flush()


if __name__ == "__main__":
    main()
