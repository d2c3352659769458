"""A push waits for the first engine that is up, and not longer (rlpipe.actors.engines.fleet).

Engines are fakes without Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.actors.engines import fleet as fleet_module
from rlpipe.actors.engines.fleet import Fleet

SPEC: Any = SimpleNamespace(resources=SimpleNamespace(start_timeout_s=60.0))


class Engine:
    """An engine that answers after `delay_s`, and is down in the first `downs` checks."""

    trouble = None
    starting = False
    url: str | None = None
    """URL at the last check."""

    def __init__(self, delay_s: float, downs: int = 0) -> None:
        self.delay_s = delay_s
        self.downs = downs
        self.checks = 0

    async def check(self) -> bool:
        await asyncio.sleep(self.delay_s)
        self.checks += 1
        return self.checks > self.downs


async def wait_for_engine(engines: Sequence[Engine]) -> None:
    unused: Any = None
    fleet = Fleet([*engines], lambda: unused, SPEC, unused, can_send=unused, on_router=unused)  # type: ignore[list-item]
    async with asyncio.timeout(30):
        await fleet._wait_for_engine()


async def test_an_engine_that_hangs_does_not_delay_the_push_and_all_others_are_checked(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(fleet_module, "STATUS_S", 0.5)
    engines = [Engine(600.0), Engine(0.0), Engine(0.1, downs=9)]
    await wait_for_engine(engines)
    assert [engine.checks for engine in engines] == [0, 1, 1]


async def test_the_wait_ends_when_the_first_engine_is_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet_module, "STATUS_S", 0.1)
    engines = [Engine(0.0, downs=2), Engine(0.2, downs=9)]
    await wait_for_engine(engines)
    assert engines[0].checks == 3


async def test_a_push_does_not_wait_for_engines_that_were_down_before():
    engines = [Engine(0.0), Engine(600.0)]
    engines[0].url = "http://engine-0"
    await asyncio.wait_for(wait_for_engine(engines), 5.0)
    assert [engine.checks for engine in engines] == [1, 0]
