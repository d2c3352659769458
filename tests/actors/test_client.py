"""A driver without a conductor, and before one (rlpipe.actors.client)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from rlpipe.actors import client
from rlpipe.actors.client import Cluster, open_cluster
from rlpipe.actors.drivers import Driver
from rlpipe.actors.engines.engine import EngineSpec
from rlpipe.actors.ray import cluster_gpus, named
from rlpipe.actors.ray.calls import kill_actors
from rlpipe.actors.ray.layout import placed
from rlpipe.actors.specs import ClusterSpec
from rlpipe.config.load import validate
from rlpipe.config.model import BranchModel
from rlpipe.errors import ActorLost, Fenced
from rlpipe.store.epochs import Epoch, Epochs
from rlpipe.store.objects.files import Files
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
    epoch = Epochs(Files(tmp_path / "store")).acquire(config.run)
    await open_cluster(
        config, epoch=epoch, home=tmp_path, model_dir="/m", store_root=str(tmp_path / "store")
    )
    assert next(conductors, None) is None


async def test_all_processes_of_an_epoch_decide_from_the_same_gpus(config, tmp_path, monkeypatch):
    """A process that joins would else see other nodes, and start other actors than the driver."""
    sections = {"rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2}}
    values = config.model_dump(mode="json") | sections | {"advantage": {}, "train": {}}
    values["resources"] |= {"colocate": "auto", "cluster": "gone", "actor_num_gpus_per_node": 1}
    run = validate(values)
    start(named.CONDUCTOR)
    start("generator")
    node = {"NodeManagerAddress": cluster_gpus.get_node_ip_address(), "Resources": {"GPU": 1.0}}
    nodes = [node]
    monkeypatch.setattr(cluster_gpus, "_gpu_nodes", lambda: nodes)
    monkeypatch.setattr(cluster_gpus, "smallest_gpu_mib", lambda: None)
    epochs = Epochs(Files(tmp_path / "store"))

    async def shares_gpus(epoch: Epoch) -> bool:
        root = str(tmp_path / "store")
        cluster = await open_cluster(
            run, epoch=epoch, home=tmp_path, model_dir="/m", store_root=root
        )
        assert cluster.shares_gpus is cluster.config.resources.colocate
        return cluster.shares_gpus

    driver = epochs.acquire(run.run)
    assert await shares_gpus(driver)
    nodes.append(node)
    assert await shares_gpus(epochs.join(run.run, stand_in=False))
    assert await shares_gpus(driver), "also after a recovery"
    driver.release()
    assert not await shares_gpus(epochs.acquire(run.run)), "another start has two GPUs"
    nodes.clear()
    (tmp_path / "other").mkdir()
    other = Epochs(Files(tmp_path / "other"))
    other.acquire(run.run).release()
    assert not await shares_gpus(other.acquire(run.run)), "of another store, with no GPU"


class Engine:
    """Replaces an engine's actor; records the settings of its start."""

    def __init__(self) -> None:
        self.specs: list[EngineSpec] = []

    @property
    def start(self) -> Any:
        return SimpleNamespace(remote=self.specs.append)


@pytest.mark.parametrize(
    ("model_dir", "changes", "starts"),
    [
        ("model", {}, True),
        (None, {}, False),
        ("model", {"warm_start": "first"}, False),
    ],
)
def test_engines_start_early_with_the_settings_of_the_conductor(
    model_dir: str | None,
    changes: dict[str, Any],
    starts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    config = spec(tmp_path).config
    config = config.model_copy(update=changes)
    engines = [Engine(), Engine()]
    monkeypatch.setattr(named, "begin_actors", lambda *_, **__: engines)
    monkeypatch.setattr(client, "as_recorded", lambda config, _home: config)
    monkeypatch.setattr(client, "model_directory_if_present", lambda *_, **__: model_dir)
    client.begin_cluster(config, tmp_path)
    opened = ClusterSpec(placed(config, []).config, str(tmp_path), "model", "store")
    wanted = [EngineSpec.of(opened, config.cluster, None)] if starts else []
    assert [engine.specs for engine in engines] == [wanted, wanted]


@pytest.mark.parametrize(
    ("changes", "is_driven", "begins"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"fork_from": BranchModel(branch="parent")}, False, False),
    ],
)
def test_actors_begin_early_where_no_other_process_needs_them_or_their_cpus(
    changes: dict[str, Any],
    is_driven: bool,
    begins: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    opened = spec(tmp_path)
    config = opened.config.model_copy(update=changes)
    epoch = Epochs(Files(opened.store_root)).acquire(config.run)
    if not is_driven:
        epoch.release()
    begun: list[str] = []

    def begin(cluster: str, *_: Any, **__: Any) -> list[Any]:
        begun.append(cluster)
        return []

    monkeypatch.setattr(named, "begin_actors", begin)
    client.begin_cluster(config, tmp_path)
    assert begun == [config.cluster] * begins
