"""A fleet over real servers and a real router that it did not start
(rlpipe.actors.engines.external)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlpipe.actors.engines import fleet as module
from rlpipe.actors.engines.engine import EngineActor, EngineSpec, RouterActor
from rlpipe.actors.engines.external import attempts
from rlpipe.actors.engines.fleet import Fleet, Receivers, Weights
from rlpipe.actors.engines.kept_engine import KeptEngine
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.train import SyncConfig
from rlpipe.errors import ConfigError, EngineUnavailable
from rlpipe.lineage.states import Lineage
from rlpipe.sync.transports.base import Push, TransportSetup
from rlpipe.sync.transports.distributed import DistributedTransport
from rlpipe.system.ports import free_port
from rlpipe.types import Stage
from tests.actors.engines.started import find_or_start
from tests.live_engine import START_S, Live, live_engine, make_server

pytestmark = pytest.mark.integration


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Live:
    return live_engine(request.config)


class Pushes:
    """Sends a model by broadcast, as a trainer does."""

    def __init__(self, live: Live) -> None:
        sync = SyncConfig(update_weight_buffer_size=1 << 20, timeout_s=120.0)
        setup = TransportSetup(model_dir=live.model_dir, sync=sync)
        self.transport = DistributedTransport(setup)
        self.model = live.model

    async def __call__(self, weights: Weights, to: Receivers, *, must: bool) -> dict[str, Any]:
        urls = await to.begin(to.urls())
        report = await asyncio.to_thread(
            self.transport.send, self.model.state_dict().items(), Push(weights.stamp, urls)
        )
        await to.end(report.unknown)
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


async def ready(_: Any) -> bool:
    return True


@pytest.fixture
async def make(
    local_ray: str, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """Makes a fleet of the engines at these addresses; all actors end with the test, and the
    servers do not."""
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0.1)
    made: list[Fleet] = []
    sender = Pushes(live)

    def fleet(*engines: str, **keywords: Any) -> Fleet:
        cwd = str(Path.cwd())
        kept = [
            KeptEngine(n, lambda n, _: find_or_start(EngineActor, f"external-{n}", n, cwd))
            for n in range(len(engines))
        ]
        made.append(
            Fleet(
                kept,
                lambda: find_or_start(RouterActor, "external-router", cwd),
                spec(live, tmp_path, *engines, **keywords),
                sender,
                can_send=ready,
                on_router=ready,  # type: ignore[arg-type]
            )
        )
        return made[-1]

    yield fleet
    for one in made:
        await one.close()
        for actor in (one.router.actor, *(engine.actor for engine in one.engines)):
            ray.kill(actor)
    sender.transport.close()
    live.router.add(live.server.url)


async def until(reached: Any) -> None:
    async with asyncio.timeout(START_S):
        while not reached():  # noqa: ASYNC110 - what is looked at is in other processes
            await asyncio.sleep(0.1)


async def test_one_that_is_away_is_left_out_and_taken_in_with_the_published_weights_when_it_comes(
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


def test_one_may_be_away_as_long_as_a_start_takes_before_the_run_gives_up(live, tmp_path):
    assert attempts(spec(live, tmp_path, "127.0.0.1:9"), 3, 2.0) == START_S / 2
    assert attempts(spec(live, tmp_path), 3, 2.0) == 3


async def test_a_run_whose_engines_are_all_away_or_serve_something_else_does_not_begin(make, live):
    nobody = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(EngineUnavailable, match=nobody):
        await make(nobody).open()
    with pytest.raises(
        ConfigError, match=r"(?s)serves something else.*dtype float32.*dtype bfloat16"
    ):
        await make(live.server.url, nobody, dtype="bfloat16").open()
