"""Steps of a push in one request to a server (rlpipe.engines.sglang.push_routes)."""

from __future__ import annotations

import asyncio

from rlpipe.engines.sglang.push_routes import _end_requests


class Manager:
    """Replaces SGLang's TokenizerManager: its requests end with the second abort."""

    def __init__(self) -> None:
        self.is_pause = False
        self.is_pause_cond = asyncio.Condition()
        self.model_update_lock = self
        self.paused_at_abort: list[bool] = []

    async def is_locked(self) -> bool:
        return len(self.paused_at_abort) < 2

    def abort_request(self, *, abort_all: bool) -> None:
        assert abort_all
        self.paused_at_abort.append(self.is_pause)


async def test_requests_that_arrive_while_others_are_aborted_wait():
    manager = Manager()
    await _end_requests(manager)
    assert manager.paused_at_abort == [True, True]
