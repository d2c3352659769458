"""A fleet over an external router and external servers (rlpipe.actors.engines.fleet).

Servers and router are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlpipe.actors.engines import fleet as fleet_module
from rlpipe.actors.engines.engine import EngineActor, EngineSpec, RouterActor
from rlpipe.actors.engines.fleet import Fleet, Receivers, Weights, max_failed_checks
from rlpipe.actors.engines.supervised import SupervisedEngine
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.train import SyncConfig
from rlpipe.errors import ConfigError, EngineUnavailable
from rlpipe.lineage.states import Lineage
from rlpipe.sync.transports.base import Push, TransportSetup
from rlpipe.sync.transports.distributed import DistributedTransport
from rlpipe.system.ports import free_port
from rlpipe.types import Stage
from tests.actors.engines.fake_engines import find_or_start
from tests.live_engine import START_S, Live, live_engine, make_server

pytestmark = pytest.mark.integration


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Live:
    return live_engine(request.config)


class Pushes:
    """Send the weights of a model by broadcast, as a trainer does."""

    def __init__(self, live: Live) -> None:
        sync = SyncConfig(update_weight_buffer_size=1 << 20, timeout_s=120.0)
        setup = TransportSetup(model_dir=live.model_dir, sync=sync)
        self.transport = DistributedTransport(setup)
        self.model = live.model

    async def __call__(self, weights: Weights, to: Receivers, *, force: bool) -> dict[str, Any]:
        urls = await to.begin_push(to.urls())
        report = await asyncio.to_thread(
            self.transport.send, self.model.state_dict().items(), Push(weights.stamp, urls)
        )
        await to.end_push(report.unknown)
        return {"bytes": report.size_bytes, "seconds": report.seconds, "unknown": report.unknown}


def spec(live: Live, folder: Path, *engines: str, dtype: str = "float32") -> EngineSpec:
    return EngineSpec(
        model_dir=str(live.model_dir),
        engine=EngineConfig.model_validate({"router_url": live.router.url}),
        resources=ResourcesConfig.model_validate(
            {"external_engines": engines, "start_timeout_s": START_S}
        ),
        dtype=dtype,
        seed=1,
        trust_remote_code=False,
        logs=str(folder),
    )


async def always(_: Any) -> bool:
    return True


@pytest.fixture
async def make(
    local_ray: str, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """Function that makes a fleet of the engines at these addresses.

    All actors end with the test; the servers do not.
    """
    monkeypatch.setattr(fleet_module, "CHECK_INTERVAL_S", 0.1)
    fleets: list[Fleet] = []
    sender = Pushes(live)

    def fleet(*engines: str, **keywords: Any) -> Fleet:
        cwd = str(Path.cwd())
        engines_of_fleet = [
            SupervisedEngine(n, lambda n, _: find_or_start(EngineActor, f"external-{n}", n, cwd))
            for n in range(len(engines))
        ]
        fleets.append(
            Fleet(
                engines_of_fleet,
                lambda: find_or_start(RouterActor, "external-router", cwd),
                spec(live, tmp_path, *engines, **keywords),
                sender,
                can_send=always,
                on_router=always,  # type: ignore[arg-type]
            )
        )
        return fleets[-1]

    yield fleet
    for one_fleet in fleets:
        await one_fleet.close()
        engine_actors = (engine.actor for engine in one_fleet.engines)
        for actor in (one_fleet.router.actor, *engine_actors):
            ray.kill(actor)
    sender.transport.close()
    live.router.add(live.server.url)


async def until(reached: Any) -> None:
    async with asyncio.timeout(START_S):
        while not reached():  # noqa: ASYNC110 - other processes set no event here
            await asyncio.sleep(0.1)


@pytest.mark.long
async def test_an_engine_that_is_away_is_left_out_and_gets_the_published_weights_when_it_comes(
    make, live, tmp_path
):
    late = make_server(live.model_dir, tmp_path / "late.log")
    fleet = make(live.server.url, late.url)
    await fleet.open()
    weights = Weights("digest", 3, "run@3@digest", Lineage(Stage.INIT, "init", "digest", "init"))
    assert (await fleet.publish(weights, everyone=True))["engines"] == 1
    assert [status["stamp"] for status in fleet.status()] == [weights.stamp, None]
    assert [worker["url"] for worker in live.router.workers()] == [live.server.url]
    late.start()
    try:
        await until(lambda: fleet.engines[1].admitted)
        assert sorted(worker["url"] for worker in live.router.workers()) == sorted(
            [live.server.url, late.url]
        )
        assert fleet.status()[1]["stamp"] == weights.stamp
    finally:
        late.stop()
    await until(lambda: [worker["url"] for worker in live.router.workers()] == [live.server.url])
    assert fleet.status()[1]["url"] is None
    assert live.server.alive and fleet.trouble() is None


def test_an_external_engine_may_be_away_as_long_as_a_start_takes(live, tmp_path):
    assert max_failed_checks(spec(live, tmp_path, "127.0.0.1:9")) == START_S / 2
    assert max_failed_checks(spec(live, tmp_path)) == 3


async def test_a_run_does_not_begin_if_all_engines_are_away_or_one_serves_something_else(
    make, live
):
    unused = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(EngineUnavailable, match=unused):
        await make(unused).open()
    with pytest.raises(
        ConfigError, match=r"(?s)has another model or other settings.*dtype float32.*dtype bfloat16"
    ):
        await make(live.server.url, unused, dtype="bfloat16").open()
