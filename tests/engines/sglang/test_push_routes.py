"""Steps of a push in one request to a server (rlpipe.engines.sglang.push_routes)."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette

from rlpipe.engines.sglang.admin import Engine
from rlpipe.engines.sglang.push_routes import PushRoutes, _end_requests
from rlpipe.errors import EngineRejected


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


class UpdatedManager(Manager):
    """Has one weight update at most, and a cache that is in use until `free`."""

    def __init__(self) -> None:
        super().__init__()
        self.server_args = SimpleNamespace(weight_version="b@1@digest")
        self.free = asyncio.Event()
        self.flushing = asyncio.Event()
        self.is_open = False
        self.log: list[str] = []

    async def pause_generation(self, _: Any) -> None: ...

    async def continue_generation(self, _: Any) -> None: ...

    async def flush_cache(self) -> Any:
        self.flushing.set()
        return SimpleNamespace(success=self.free.is_set())

    async def begin_weight_update(self, _: Any) -> tuple[bool, str]:
        if self.is_open:
            return False, "a weight update is already open"
        self.is_open = True
        self.log.append("begin")
        return True, ""

    async def end_weight_update(self, _: Any) -> tuple[bool, str]:
        if not self.is_open:
            return False, "no weight update"
        self.is_open = False
        self.log.append("end")
        return True, ""


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> UpdatedManager:
    messages: Any = SimpleNamespace(
        PauseGenerationReqInput=SimpleNamespace,
        ContinueGenerationReqInput=SimpleNamespace,
        BeginWeightUpdateReqInput=SimpleNamespace,
        EndWeightUpdateReqInput=SimpleNamespace,
    )
    # SGLang's own module imports the engine, which takes seconds.
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    return UpdatedManager()


@pytest.fixture
async def url(manager: UpdatedManager) -> AsyncIterator[str]:
    """A server with the endpoints over this manager."""
    app = Starlette()
    state = SimpleNamespace(_global_state=SimpleNamespace(tokenizer_manager=manager))
    PushRoutes(state).add_to(app)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # It accepts connections from here on; the server answers them once it has started.
        serving = asyncio.create_task(server.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


async def test_a_late_request_of_a_dead_trainer_leaves_the_update_of_the_next_one(
    url: str, manager: UpdatedManager
):
    async with Engine(url) as dead, Engine(url) as live:
        late = asyncio.create_task(dead.open_update("retract", begin=True))
        await manager.flushing.wait()
        late.cancel()
        opening = asyncio.create_task(live.open_update("retract", begin=True))
        await asyncio.sleep(0.1)
        manager.free.set()
        assert (await opening).begun
        await asyncio.sleep(0.1)
        assert manager.log == ["begin"]
        await live.close_update("b@1@digest", end=True, sample=True)
    assert manager.log == ["begin", "end"]


async def test_of_two_clients_the_last_one_has_the_update(url: str, manager: UpdatedManager):
    async with Engine(url) as first, Engine(url) as second:
        openings = [asyncio.create_task(first.open_update("retract", begin=True))]
        await manager.flushing.wait()
        openings.append(asyncio.create_task(second.open_update("retract", begin=True)))
        await asyncio.sleep(0.1)
        manager.free.set()
        await asyncio.gather(*openings)
        assert manager.log == ["begin", "end", "begin"]
        with pytest.raises(EngineRejected, match="another client has opened an update"):
            await first.close_update("b@1@digest", end=True, sample=True)
        assert manager.is_open
        await second.close_update("b@1@digest", end=True, sample=True)
    assert not manager.is_open
