"""A local Ray for the tests of this package, and a fleet of fake actors on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from ray import cloudpickle

from rlpipe.actors.engines import fleet as fleet_module
from rlpipe.actors.engines.fleet import Fleet
from rlpipe.actors.engines.supervised import SupervisedEngine
from rlpipe.actors.ray.local_ray import connect, disconnect
from rlpipe.config.model import ResourcesConfig
from tests.actors.engines.fake_engines import FakeEngine, FakeRouter, find_or_start, renew
from tests.actors.engines.fake_fleet import ENGINES, SPEC, Trainer

NAMESPACE = "rlpipe-tests"


@pytest.fixture(scope="package")
def ray_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home of the local Ray, which has its token."""
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="package")
def started_ray(ray_home: Path) -> Iterator[str]:
    """Start a local Ray, and return its namespace."""
    connect(ResourcesConfig(), ray_home, namespace=NAMESPACE)
    yield NAMESPACE
    disconnect()


@pytest.fixture(scope="module")
def local_ray(started_ray: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the namespace of a local Ray.

    Actors get classes of the test module by value. By reference, each actor's process would import
    the test module with all its imports, which takes seconds.
    """
    cloudpickle.register_pickle_by_value(request.module)
    yield started_ray
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
async def fleet(
    local_ray: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    """Two engines that are up, without weights, checked 20 times a second."""
    monkeypatch.setattr(fleet_module, "CHECK_INTERVAL_S", 0.05)
    engines = [
        SupervisedEngine(number, lambda n, _: find_or_start(FakeEngine, f"fleet-engine-{n}", n))
        for number in range(ENGINES)
    ]
    urls: list[str] = []

    async def on_router(url: str) -> None:
        urls.append(url)

    fleet = Fleet(
        engines,
        lambda: find_or_start(FakeRouter, "fleet-router"),
        SPEC,
        trainer.send,
        can_send=trainer.can_send,
        on_router=on_router,
    )
    await fleet.open()
    assert urls == ["http://router"]
    yield fleet
    await fleet.close()
    for actor in (fleet.router.actor, *(engine.actor for engine in fleet.engines)):
        renew(actor)
