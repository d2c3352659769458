"""Whoever pushes waits until an engine is up, and no longer (rlpipe.actors.engines.fleet). Without
Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.actors.engines import fleet as module
from rlpipe.actors.engines.fleet import Fleet

SPEC: Any = SimpleNamespace(resources=SimpleNamespace(start_timeout_s=60.0))


class Engine:
    """One whose actor answers after a while. The first `downs` times its server is not up."""

    trouble = None
    starting = False

    def __init__(self, after_s: float, downs: int = 0) -> None:
        self.after_s = after_s
        self.downs = downs
        self.looks = 0

    async def look(self) -> bool:
        await asyncio.sleep(self.after_s)
        self.looks += 1
        return self.looks > self.downs


async def waited(engines: Sequence[Engine]) -> None:
    nothing: Any = None
    fleet = Fleet([*engines], lambda: nothing, SPEC, nothing, can_send=nothing, on_router=nothing)  # type: ignore[list-item]
    async with asyncio.timeout(30):
        await fleet._until_one_is_up()


async def test_one_that_hangs_holds_nobody_up_and_all_others_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    engines = [Engine(600.0), Engine(0.0), Engine(0.1, downs=9)]
    await waited(engines)
    assert [engine.looks for engine in engines] == [0, 1, 1]


async def test_the_first_that_comes_up_ends_the_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    engines = [Engine(0.0, downs=2), Engine(0.2, downs=9)]
    await waited(engines)
    assert engines[0].looks == 3
