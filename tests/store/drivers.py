"""Drivers of the branch `run` in separate processes that get their commands through a pipe."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from rlpipe.errors import Fenced, RlpipeError
from rlpipe.store import holders
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, DataState, Stage
from tests.processes import adopt, fork_server


def a_commit(iteration: int, epoch: int = 0) -> Commit:
    parent = f"run/{iteration - 1:08d}" if iteration else None
    nodes = {Stage.TRAIN: f"t{iteration}"}
    data = DataState(draws=iteration)
    return Commit(
        branch="run",
        iteration=iteration,
        parent=parent,
        plans=("p",),
        nodes=nodes,
        data=data,
        config_digest="c",
        epoch=epoch,
    )


def drive(
    files: Files, pipe: Connection, options: dict[str, Any], environment: Mapping[str, str]
) -> None:
    """Run a driver: acquire the branch, then execute commands and send their results."""
    adopt(environment)
    if elsewhere := options.pop("pid_space", None):
        holders.pid_space = lambda: elsewhere
    epoch: Any = None
    calls: dict[str, Callable[..., object]] = {
        "acquire": lambda: None,
        "check": lambda: epoch.check(),
        "renew": lambda: epoch.renew(),
        "release": lambda: epoch.release(),
        "commit": lambda k: Branches(files).commit(a_commit(k, epoch.number), fence=epoch.check),
    }
    call = "acquire"
    arguments = list[Any]()
    while True:
        try:
            if epoch is None:
                epoch = Epochs(files, skew_s=1.0).acquire("run", **options)
            calls[call](*arguments)
            pipe.send(epoch.number)
        except RlpipeError as error:
            pipe.send(error)
        call, *arguments = pipe.recv()


class Driver:
    """A driver in another process. Its errors are raised here.

    With `own_child` it is a child of this process, which can leave it a zombie.
    """

    def __init__(self, files: Files, *, own_child: bool = False, **options: Any) -> None:
        context = multiprocessing.get_context("spawn") if own_child else fork_server()
        self._pipe, theirs = context.Pipe()
        arguments = (files, theirs, options, dict(os.environ))
        self.process = context.Process(target=drive, args=arguments, daemon=True)
        self.process.start()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def answer(self) -> int:
        """Return its epoch after the last command (the first command is to acquire)."""
        assert self._pipe.poll(60), "no answer in a minute"
        if isinstance(answer := self._pipe.recv(), Exception):
            raise answer
        return answer

    def do(self, call: str, *arguments: object) -> int:
        self._pipe.send((call, *arguments))
        return self.answer()


@contextmanager
def refused(*texts: str) -> Iterator[None]:
    """Expect Fenced with all these texts in its message."""
    with pytest.raises(Fenced) as caught:
        yield
    missing = [text for text in texts if text not in str(caught.value)]
    assert not missing, f"{missing} not in:\n{caught.value}"
