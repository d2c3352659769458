"""Engines that released their weights sample only after a push (rlpipe.actors.weight_sender, fleet,
engine).

Conductor, fleet and engine actors are real and run in the test's process without Ray; servers and
trainer ranks are fakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.actors.conductor import Conductor
from rlpipe.actors.engines import engine as engine_module
from rlpipe.actors.engines import fleet as fleet_module
from rlpipe.actors.engines.engine import EngineActor
from rlpipe.actors.engines.files_sync import FilesSync
from rlpipe.actors.engines.fleet import Fleet, Weights
from rlpipe.actors.engines.supervised import SupervisedEngine
from rlpipe.actors.sharing import ENGINE_PARTS, GpuSharing
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.train import SyncConfig
from rlpipe.errors import TrainerError
from rlpipe.lineage.states import Lineage
from rlpipe.sync.session import PushReport
from rlpipe.types import Stage
from tests.actors.engines.fake_engines import FakeRouter

RIGHT = Weights("state 1", 1, "run@1@state 1", Lineage(Stage.INIT, "init", "state 1", "init"))
GARBAGE = "undefined memory"


class Server:
    """A server that names the last loaded weights, also after it released their memory."""

    pid = 1

    def __init__(self, url: str) -> None:
        self.url = url
        self.alive = True
        self.paused = False
        self.stamp = self.weights = "default"

    def start(self) -> None: ...

    def wait_ready(self, timeout_s: float) -> None: ...

    def stop(self) -> None:
        self.alive = False


class Servers:
    """All servers so far, by URL. `sampled`: (URL, weights) of servers that resumed sampling."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, Server] = {}
        self.sampled: list[tuple[str, str]] = []
        for name in ("_release_memory", "_resume_memory", "_weight_version", "_facts"):
            monkeypatch.setattr(engine_module, name, getattr(self, name))

    def create(self, number: int) -> Server:
        url = f"http://engine-{number}/{len(self.known)}"
        return self.known.setdefault(url, Server(url))

    def load(self, urls: Sequence[str], stamp: str) -> None:
        for url in urls:
            self.known[url].stamp = self.known[url].weights = stamp

    async def _release_memory(self, url: str, tags: Sequence[str]) -> None:
        self.known[url].paused = True
        if "weights" in tags:
            self.known[url].weights = GARBAGE

    async def _resume_memory(self, url: str, tags: Sequence[str], *, samples: bool) -> None:
        if samples:
            self.known[url].paused = False
            self.sampled.append((url, self.known[url].weights))

    async def _weight_version(self, url: str) -> str | None:
        return self.known[url].stamp

    async def _facts(self, url: str) -> dict[str, Any]:
        return {}


class Ranks:
    """A trainer group. `state` "" means that its ranks were lost; `ensure` restores it."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.state = "state 1"
        self.pushed: list[list[str]] = []
        self.breaks = False

    async def occupy(self, parts: Any, *, deadline_s: float) -> list[dict[str, float]]:
        return []

    async def held(self) -> str | None:
        return self.state or None

    async def ensure(self, lineage: Lineage, *, deadline_s: float) -> None:
        self.state = lineage.target

    async def call(
        self, method: str, *, engines: list[str], stamp: str, **_: Any
    ) -> list[dict[str, Any]]:
        self.pushed.append(engines)
        if self.breaks:
            self.breaks = False
            raise TrainerError("a rank died in the middle")
        self.servers.load(engines, stamp)
        return [{"bytes": 7, "steps": {}, "seconds": 0.1, "unknown": {}}]


class LocalActor:
    """An actor handle of an object in this process. Calls run in threads, one after the other."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance
        self._lock = asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        async def remote(*arguments: Any, **keywords: Any) -> Any:
            method = getattr(self._instance, name)
            async with self._lock:
                return await asyncio.to_thread(method, *arguments, **keywords)

        return SimpleNamespace(remote=remote)


def engine_actor(servers: Servers, number: int) -> Any:
    actor = EngineActor(number, str(Path.cwd()))
    vars(actor)["_create_server"] = lambda spec: servers.create(number)
    return LocalActor(actor)


def through_files(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the transfer of files by a call of `servers.load`."""

    async def write(_: Any, group: Ranks, weights: Weights, *__: Any) -> Any:
        return SimpleNamespace(size_bytes=7, full_bytes=7)

    async def fetch(
        _: Any, stamp: str, urls: Sequence[str], *__: Any
    ) -> tuple[dict[str, str], dict[str, str]]:
        return dict.fromkeys(urls, "folder"), {}

    async def load(_: Any, stamp: str, folders: Mapping[str, str], end_s: float) -> PushReport:
        servers.load(list(folders), stamp)
        return PushReport(stamp, tuple(folders), {}, 1, 7, 1, 0.1)

    for name, stub in (("_write", write), ("_fetch", fetch), ("_load_all", load)):
        monkeypatch.setattr(FilesSync, name, stub)


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not reached():  # noqa: ASYNC110 - supervisors set no event
            await asyncio.sleep(0.01)


@pytest.fixture(params=["tensor", "disk"])
async def shared(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Conductor, Fleet, Servers, Ranks]]:
    """Two engines that share the GPUs of two ranks, in the middle of a rollout."""
    monkeypatch.setattr(fleet_module, "CHECK_INTERVAL_S", 0.05)
    servers = Servers(monkeypatch)
    through_files(servers, monkeypatch)
    resources = ResourcesConfig(colocate=True, actor_num_gpus_per_node=2)
    config = SimpleNamespace(
        resources=resources,
        sync=SyncConfig(transport=request.param),
        engine=EngineConfig(rollout_health_check_interval=1000.0),
        train=SimpleNamespace(timeout_s=60.0),
        checkpoint=SimpleNamespace(timeout_s=60.0),
    )
    conductor: Any = Conductor("shared", str(Path.cwd()))
    state = conductor._state
    state.spec = SimpleNamespace(
        config=config, store_root=str(tmp_path / "store"), home=str(tmp_path)
    )
    state.sharing = GpuSharing(resources)
    state.trainer.group = Ranks(servers)
    spec: Any = SimpleNamespace(
        engine=config.engine, resources=resources, logs="logs", devices=None
    )
    engines = [
        SupervisedEngine(number, lambda n, _: engine_actor(servers, n)) for number in range(2)
    ]

    async def on_router(url: str) -> None: ...

    make: Any = {
        "make_router": lambda: LocalActor(FakeRouter()),
        "sharing": state.sharing,
        "can_send": conductor._sender.can_send,
    }
    fleet = Fleet(engines, spec=spec, send=conductor._sender.send, on_router=on_router, **make)
    state.fleet = fleet
    await fleet.open()
    await fleet.publish(RIGHT, everyone=True)
    await state.enter("sample")
    yield conductor, fleet, servers, state.trainer.group
    await fleet.close()


def both_sample(fleet: Fleet, servers: Servers) -> bool:
    urls = [str(engine.url) for engine in fleet.engines]
    return all(engine.admitted for engine in fleet.engines) and all(
        servers.known[url].weights == RIGHT.stamp and not servers.known[url].paused for url in urls
    )


async def test_a_push_after_a_restore_includes_engines_that_released_their_weights_for_the_restore(
    shared,
):
    conductor, fleet, servers, ranks = shared
    assert both_sample(fleet, servers)
    ranks.state = ""
    servers.known[str(fleet.engines[1].url)].alive = False
    await until(
        lambda: (
            bool(ranks.state)
            and conductor._state.sharing.now == "sample"
            and both_sample(fleet, servers)
        )
    )
    assert {weights for _, weights in servers.sampled} == {RIGHT.stamp}
    if ranks.pushed:
        assert ranks.pushed[1:] == [["http://engine-0/0", "http://engine-1/2"]]


async def test_no_engine_samples_with_wrong_weights_after_a_failed_push(shared):
    conductor, fleet, servers, ranks = shared
    ranks.state = ""
    ranks.breaks = True
    servers.known[str(fleet.engines[1].url)].alive = False
    await until(
        lambda: (
            bool(ranks.state)
            and conductor._state.sharing.now == "sample"
            and both_sample(fleet, servers)
        )
    )
    assert {weights for _, weights in servers.sampled} == {RIGHT.stamp}


async def test_an_engine_samples_once_it_has_all_memory_and_known_weights(
    monkeypatch: pytest.MonkeyPatch,
):
    servers = Servers(monkeypatch)
    actor = engine_actor(servers, 0)
    resources = SimpleNamespace(start_timeout_s=1.0, external_engines=())
    spec: Any = SimpleNamespace(resources=resources, devices=None)
    (server,) = [servers.known[await actor.start.remote(spec)]]
    await actor.release_memory.remote(())
    await actor.resume_memory.remote(ENGINE_PARTS)
    assert server.paused
    await actor.release_memory.remote(("weights",))
    await actor.mark.remote(unknown=False)
    await actor.resume_memory.remote(ENGINE_PARTS)
    assert not server.paused
