"""Engines that gave up their weights sample nothing before they are given them again
(rlpipe.actors.conductor, fleet, engine).

Conductor, fleet and engine actors are ours, in the test's own process, without Ray; servers and
trainer ranks are small fakes.
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
from rlpipe.actors.engines.kept_engine import KeptEngine
from rlpipe.actors.sharing import OF_ENGINES, Sharing
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.train import SyncConfig
from rlpipe.errors import TrainerError
from rlpipe.lineage.states import Lineage
from rlpipe.sync.transports.base import PushReport
from rlpipe.types import Stage
from tests.actors.engines.started import FakeRouter

RIGHT = Weights("state 1", 1, "run@1@state 1", Lineage(Stage.INIT, "init", "state 1", "init"))
GARBAGE = "whatever is in the memory"


class Server:
    """One that names the weights it was given last, whatever became of them."""

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
    """All there were, by URL. `sampled`: with what engines have gone on to sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, Server] = {}
        self.sampled: list[tuple[str, str]] = []
        for name in ("_give_up", "_take_back", "_stamp", "_facts"):
            monkeypatch.setattr(engine_module, name, getattr(self, name))

    def made(self, number: int) -> Server:
        url = f"http://engine-{number}/{len(self.known)}"
        return self.known.setdefault(url, Server(url))

    def load(self, urls: Sequence[str], stamp: str) -> None:
        for url in urls:
            self.known[url].stamp = self.known[url].weights = stamp

    async def _give_up(self, url: str, tags: Sequence[str]) -> None:
        self.known[url].paused = True
        if "weights" in tags:
            self.known[url].weights = GARBAGE

    async def _take_back(self, url: str, tags: Sequence[str], *, goes_on: bool) -> None:
        if goes_on:
            self.known[url].paused = False
            self.sampled.append((url, self.known[url].weights))

    async def _stamp(self, url: str) -> str | None:
        return self.known[url].stamp

    async def _facts(self, url: str) -> dict[str, Any]:
        return {}


class Ranks:
    """A trainer group. It can be lost; restored, it holds the weights again."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.state = "state 1"
        self.pushed: list[list[str]] = []
        self.breaks = False

    async def occupy(self, parts: Any, *, deadline_s: float) -> list[dict[str, float]]:
        return []

    async def held(self) -> str | None:
        return self.state or None

    async def holds(self, state: str) -> bool:
        return self.state == state

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
        return [{"bytes": 7, "seconds": 0.1, "unknown": {}}]


class Here:
    """An actor in this process, whose calls run in threads of their own, one after the other."""

    def __init__(self, held: Any) -> None:
        self._held, self._turn = held, asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        async def called(*arguments: Any, **keywords: Any) -> Any:
            async with self._turn:
                return await asyncio.to_thread(getattr(self._held, name), *arguments, **keywords)

        return SimpleNamespace(remote=called)


def engine_actor(servers: Servers, number: int) -> Any:
    made = EngineActor(number, str(Path.cwd()))
    made._made = lambda spec: servers.made(number)  # type: ignore[assignment, method-assign]
    return Here(made)


def through_files(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written, brought and loaded in no time."""

    async def write(_: Any, group: Ranks, weights: Weights) -> Any:
        return SimpleNamespace(size_bytes=7, full_bytes=7)

    async def bring(
        _: Any, stamp: str, urls: Sequence[str], *__: Any
    ) -> tuple[dict[str, str], dict[str, str]]:
        return dict.fromkeys(urls, "folder"), {}

    async def load(_: Any, stamp: str, folders: Mapping[str, str], end_s: float) -> PushReport:
        servers.load(list(folders), stamp)
        return PushReport(stamp, tuple(folders), {}, 1, 7, 1, 0.1)

    for name, stub in (("_write", write), ("_bring", bring), ("_loaded", load)):
        monkeypatch.setattr(FilesSync, name, stub)


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not reached():  # noqa: ASYNC110 - keepers call nobody
            await asyncio.sleep(0.01)


@pytest.fixture(params=["tensor", "disk"])
async def shared(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Conductor, Fleet, Servers, Ranks]]:
    """Two engines that share the GPUs of two ranks, in the middle of a rollout."""
    monkeypatch.setattr(fleet_module, "LOOK_INTERVAL_S", 0.05)
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
    conductor._spec = SimpleNamespace(
        config=config, store_root=str(tmp_path / "store"), home=str(tmp_path)
    )
    conductor._sharing, conductor._turn.group = Sharing(resources), Ranks(servers)
    spec: Any = SimpleNamespace(engine=config.engine, resources=resources, logs="logs")
    engines = [KeptEngine(number, lambda n, _: engine_actor(servers, n)) for number in range(2)]

    async def on_router(url: str) -> None: ...

    make: Any = {
        "make_router": lambda: Here(FakeRouter()),
        "sharing": conductor._sharing,
        "can_send": conductor._can_send,
    }
    fleet = conductor._fleet = Fleet(
        engines, spec=spec, send=conductor._send, on_router=on_router, **make
    )
    await fleet.open()
    await fleet.publish(RIGHT, everyone=True)
    await conductor._enter("sample")
    yield conductor, fleet, servers, conductor._turn.group
    await fleet.close()


def both_sample(fleet: Fleet, servers: Servers) -> bool:
    urls = [str(engine.url) for engine in fleet.engines]
    return all(engine.admitted for engine in fleet.engines) and all(
        servers.known[url].weights == RIGHT.stamp and not servers.known[url].paused for url in urls
    )


async def test_engines_that_gave_up_their_weights_so_that_the_trainer_is_restored_are_sent_them_too(
    shared,
):
    conductor, fleet, servers, ranks = shared
    assert both_sample(fleet, servers)
    ranks.state = ""
    servers.known[str(fleet.engines[1].url)].alive = False
    await until(
        lambda: (
            bool(ranks.state) and conductor._sharing.now == "sample" and both_sample(fleet, servers)
        )
    )
    assert {weights for _, weights in servers.sampled} == {RIGHT.stamp}
    if ranks.pushed:
        assert ranks.pushed[1:] == [["http://engine-0/0", "http://engine-1/2"]]


async def test_none_goes_on_after_a_push_that_broke_in_the_middle(shared):
    conductor, fleet, servers, ranks = shared
    ranks.state = ""
    ranks.breaks = True
    servers.known[str(fleet.engines[1].url)].alive = False
    await until(
        lambda: (
            bool(ranks.state) and conductor._sharing.now == "sample" and both_sample(fleet, servers)
        )
    )
    assert {weights for _, weights in servers.sampled} == {RIGHT.stamp}


async def test_an_engine_that_has_all_its_memory_back_goes_on_once_its_weights_are_known(
    monkeypatch: pytest.MonkeyPatch,
):
    servers = Servers(monkeypatch)
    actor = engine_actor(servers, 0)
    spec: Any = SimpleNamespace(resources=SimpleNamespace(start_timeout_s=1.0))
    (server,) = [servers.known[await actor.start.remote(spec)]]
    await actor.keep.remote(())
    await actor.take.remote(OF_ENGINES)
    assert server.paused
    await actor.keep.remote(("weights",))
    await actor.mark.remote(unknown=False)
    await actor.take.remote(OF_ENGINES)
    assert not server.paused
