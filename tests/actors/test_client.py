"""What a driver does when the conductor is gone (rlpipe.actors.client)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from rlpipe.actors import client as cluster
from rlpipe.actors.client import Cluster, open_cluster
from rlpipe.actors.drivers import Driver
from rlpipe.actors.ray import named
from rlpipe.actors.ray.calls import kill_actors
from rlpipe.errors import ActorLost, Fenced
from tests.actors.test_conductor import spec

pytestmark = pytest.mark.integration
SPACE = named.namespace("gone")


class Fake:
    """Any actor of a run; as a conductor it may refuse."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal

    def open(self, *_: Any) -> None: ...

    def close(self, _: Driver) -> None:
        if self.refusal is not None:
            raise self.refusal


def started(name: str, refusal: Exception | None = None) -> Any:
    options = {"name": name, "namespace": SPACE, "num_cpus": 0, "lifetime": "detached"}
    actor: Any = ray.remote(Fake).options(**options).remote(refusal)
    ray.get(actor.__ray_ready__.remote())
    return actor


def there() -> list[str]:
    rows: list[Any] = list_named_actors(all_namespaces=True)
    return [row["name"] for row in rows if row["namespace"] == SPACE]


@pytest.fixture
def config(local_ray: str, tmp_path: Path) -> Iterator[Any]:
    made = spec(tmp_path).config
    yield made.model_copy(
        update={"resources": made.resources.model_copy(update={"cluster": "gone"})}
    )
    kill_actors([ray.get_actor(name, namespace=SPACE) for name in there()])


async def test_a_run_is_ended_although_its_conductor_is_gone(config):
    conductor = started(named.CONDUCTOR)
    rank = started("trainer-0")
    kill_actors([conductor])
    await Cluster(Driver("run", 1), conductor, rank, config).close()
    assert "trainer-0" not in there()


@pytest.mark.parametrize(
    "refusal", [Fenced("another driver has them"), ActorLost("a rank is lost")]
)
async def test_a_conductor_that_refuses_to_end_them_is_heard(config, refusal):
    conductor = started(named.CONDUCTOR, refusal)
    rank = started("trainer-0")
    with pytest.raises(type(refusal)):
        await Cluster(Driver("run", 1), conductor, rank, config).close()
    assert "trainer-0" in there() and named.CONDUCTOR in there()


async def test_actors_that_a_newer_conductor_has_are_not_ended(config):
    older = started(named.CONDUCTOR)
    rank = started("trainer-0")
    kill_actors([older])
    started(named.CONDUCTOR)
    with pytest.raises(ActorLost):
        await Cluster(Driver("run", 1), older, rank, config).close()
    assert "trainer-0" in there()


async def test_a_conductor_that_ends_just_as_a_driver_comes_is_followed_by_another(
    config, tmp_path, monkeypatch
):
    ended = started(named.CONDUCTOR)
    kill_actors([ended])
    found = iter([ended, started(named.CONDUCTOR)])
    monkeypatch.setattr(cluster.named, "conductor", lambda *_: next(found))
    started("generator")
    await open_cluster(
        config, epoch=1, home=tmp_path, model_dir="/m", store_root=str(tmp_path / "store")
    )
    assert next(found, None) is None
