"""A driver without a conductor (rlpipe.actors.client)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from rlpipe.actors import client
from rlpipe.actors.client import Cluster, open_cluster
from rlpipe.actors.drivers import Driver
from rlpipe.actors.ray import named
from rlpipe.actors.ray.calls import kill_actors
from rlpipe.errors import ActorLost, Fenced
from tests.actors.test_conductor import spec

pytestmark = pytest.mark.integration
NAMESPACE = named.namespace("gone")


class Fake:
    """Any actor of a run; as a conductor it may refuse `close`."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal

    def open(self, *_: Any) -> None: ...

    def close(self, _: Driver) -> None:
        if self.refusal is not None:
            raise self.refusal


def start(name: str, refusal: Exception | None = None) -> Any:
    options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "lifetime": "detached"}
    actor: Any = ray.remote(Fake).options(**options).remote(refusal)
    ray.get(actor.__ray_ready__.remote())
    return actor


def running() -> list[str]:
    rows: list[Any] = list_named_actors(all_namespaces=True)
    return [row["name"] for row in rows if row["namespace"] == NAMESPACE]


@pytest.fixture
def config(local_ray: str, tmp_path: Path) -> Iterator[Any]:
    config = spec(tmp_path).config
    yield config.model_copy(
        update={"resources": config.resources.model_copy(update={"cluster": "gone"})}
    )
    kill_actors([ray.get_actor(name, namespace=NAMESPACE) for name in running()])


async def test_close_ends_the_actors_if_the_conductor_is_gone(config):
    conductor = start(named.CONDUCTOR)
    rank = start("trainer-0")
    kill_actors([conductor])
    await Cluster(Driver("run", 1), conductor, rank, config).close()
    assert "trainer-0" not in running()


@pytest.mark.parametrize(
    "refusal", [Fenced("another driver has them"), ActorLost("a rank is lost")]
)
async def test_close_raises_the_error_of_the_conductor_and_ends_nothing(config, refusal):
    conductor = start(named.CONDUCTOR, refusal)
    rank = start("trainer-0")
    with pytest.raises(type(refusal)):
        await Cluster(Driver("run", 1), conductor, rank, config).close()
    assert "trainer-0" in running() and named.CONDUCTOR in running()


async def test_close_does_not_end_the_actors_of_a_newer_conductor(config):
    older = start(named.CONDUCTOR)
    rank = start("trainer-0")
    kill_actors([older])
    start(named.CONDUCTOR)
    with pytest.raises(ActorLost):
        await Cluster(Driver("run", 1), older, rank, config).close()
    assert "trainer-0" in running()


async def test_open_cluster_starts_another_conductor_if_the_first_ends_at_this_moment(
    config, tmp_path, monkeypatch
):
    ended = start(named.CONDUCTOR)
    kill_actors([ended])
    conductors = iter([ended, start(named.CONDUCTOR)])
    monkeypatch.setattr(client.named, "conductor", lambda *_: next(conductors))
    start("generator")
    await open_cluster(
        config, epoch=1, home=tmp_path, model_dir="/m", store_root=str(tmp_path / "store")
    )
    assert next(conductors, None) is None
