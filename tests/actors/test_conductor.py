"""Drivers of a cluster, and the order of calls to its ranks (rlpipe.actors.conductor, drivers).

The conductor runs in the test's process; trainer ranks are real actors of a small class. The run is
supervised and needs no engines, which test_fleet tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from rlpipe.actors.conductor import Conductor
from rlpipe.actors.drivers import Driver
from rlpipe.actors.specs import ClusterSpec
from rlpipe.config.load import validate
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ActorLost, DataError, DeadlineExceeded, Fenced, ResourceError
from rlpipe.lineage.states import Lineage
from rlpipe.store.engine_targets import EngineTargets
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage
from tests.actors.engines.fake_engines import FakeGenerator, find_or_start, renew
from tests.actors.trainer.fake_ranks import renew as renew_rank
from tests.actors.trainer.fake_ranks import start

pytestmark = pytest.mark.integration


class FakeActors:
    """Two ranks and a generator. With `kept` they live after the conductor closes."""

    kept = False

    def __init__(self, _cluster: str, resources: ResourcesConfig, _cwd: str) -> None:
        self.resources = resources
        self.placement = SimpleNamespace(remove=lambda: None, on_gpus=False)

    def trainer(self, rank: int) -> Any:
        return start(rank)

    def generator(self) -> Any:
        return find_or_start(FakeGenerator, "conductor-generator")

    def reserve(self, *, engines: int, kept_engines: int) -> None:
        assert not engines
        if self.resources.trainer_ranks > 2:
            raise ResourceError("the cluster has not enough room")

    def all_actors(self) -> list[Any]:
        if self.kept:
            return []
        return [self.generator(), *(self.trainer(rank) for rank in range(2))]


def spec(folder: Path, run: str = "run") -> ClusterSpec:
    config = {
        "run": run,
        "num_rollout": 1,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": "/m"}},
        "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
        "rollout": {"type": "dataset", "rollout_batch_size": 2},
        "reward": {"function": {"type": "none"}},
        "advantage": {"advantage_estimator": "none"},
        "train": {"loss": {"type": "sft"}},
        "resources": {"actor_num_gpus_per_node": 2, "start_timeout_s": 60},
    }
    return ClusterSpec(validate(config), str(folder), "/m", str(folder / "store"))


FIRST = Driver("run", 1)
SECOND = Driver("run", 2)


@pytest.fixture
async def conductor(local_ray: str, tmp_path: Path) -> AsyncIterator[Conductor]:
    """A conductor, open for the first driver; the next test has the same actors, made new."""
    make: Any = FakeActors
    conductor = Conductor("tests", str(Path.cwd()), make)
    await conductor.open(FIRST, spec(tmp_path))
    yield conductor
    assert conductor._driver is not None
    actors: Any = conductor._actors
    actors.kept = True
    await conductor.close(conductor._driver)
    for rank in range(2):
        renew_rank(start(rank))
    renew(actors.generator())


async def calls_of_ranks(conductor: Conductor, driver: Driver) -> list[list[str]]:
    logs = await conductor.collective(driver, "log", 60, {})
    return [[line for line in log if not line.startswith("setup")] for log in logs]


async def test_calls_of_several_processes_reach_all_ranks_in_one_order_without_overlap(
    conductor: Conductor,
):
    names = [f"{number}" for number in range(8)]
    await asyncio.gather(
        *(
            conductor.collective(FIRST, "note", 60, {"name": name, "seconds": 0.02})
            for name in names
        )
    )
    logs = await calls_of_ranks(conductor, FIRST)
    assert logs[0] == logs[1]
    assert logs[0] == [line for name in names for line in (f"begin {name}", f"end {name}")]


async def test_an_older_driver_of_the_run_is_refused_after_a_newer_one_opened_the_cluster(
    conductor: Conductor, tmp_path: Path
):
    await conductor.open(SECOND, spec(tmp_path))
    for refused in (
        conductor.collective(FIRST, "note", 60, {"name": "x"}),
        conductor.held(FIRST),
        conductor.ensure(FIRST, Lineage(Stage.INIT, "i", "i", "i"), 60),
        conductor.trouble(FIRST),
        conductor.open(FIRST, spec(tmp_path)),
        conductor.close(FIRST),
    ):
        with pytest.raises(Fenced, match="another process uses the actors") as caught:
            await refused
        assert caught.value.found == "run run in epoch 2"
    assert await calls_of_ranks(conductor, SECOND) == [[], []]


async def test_a_call_that_waited_is_refused_if_a_newer_driver_came_meanwhile(
    conductor: Conductor, tmp_path: Path
):
    long = asyncio.create_task(
        conductor.collective(FIRST, "note", 60, {"name": "long", "seconds": 1.0})
    )
    await asyncio.sleep(0.2)
    waiting = asyncio.create_task(conductor.collective(FIRST, "note", 60, {"name": "late"}))
    await asyncio.sleep(0)
    await conductor.open(SECOND, spec(tmp_path))
    await long
    with pytest.raises(Fenced):
        await waiting
    assert (await calls_of_ranks(conductor, SECOND))[0] == ["begin long", "end long"]


async def test_another_run_takes_over_the_cluster_after_the_first_run(
    conductor: Conductor, tmp_path: Path
):
    other = Driver("other", 1)
    await conductor.open(other, spec(tmp_path, "other"))
    with pytest.raises(Fenced, match="run other in epoch 1"):
        await conductor.held(FIRST)
    assert await conductor.held(other) != "state"


async def test_another_run_is_refused_while_the_first_run_has_a_driver(
    conductor: Conductor, tmp_path: Path
):
    at_work = Epochs(Files(tmp_path / "store")).acquire("run", takeover=False)
    with pytest.raises(Fenced, match="another run uses the cluster's actors") as caught:
        await conductor.open(Driver("other", 1), spec(tmp_path, "other"))
    assert (caught.value.where, caught.value.found) == (
        "resources.cluster=tests",
        "run run in epoch 1, at work",
    )
    assert await conductor.held(FIRST) != "state"
    at_work.release()
    await conductor.open(Driver("other", 1), spec(tmp_path, "other"))


async def until_gone(name: str) -> None:
    """Wait until there is no actor of this name."""
    async with asyncio.timeout(60):
        while name in list_named_actors():  # noqa: ASYNC110 - Ray has no event for it
            await asyncio.sleep(0.05)
    with pytest.raises(ValueError, match=name):
        ray.get_actor(name)


async def test_actors_without_a_driver_end_after_keep_idle_s_and_start_again_at_the_next_open(
    conductor: Conductor, tmp_path: Path
):
    def rank() -> Any:
        return ray.get_actor("trainer-0")

    idle = spec(tmp_path)
    resources = idle.config.resources.model_copy(update={"keep_idle_s": 0.5})
    idle = replace(idle, config=idle.config.model_copy(update={"resources": resources}))
    driven = Epochs(Files(tmp_path / "store")).acquire("run")
    await conductor.open(FIRST, idle)
    await conductor.collective(FIRST, "train", 60, {"key": "a"})
    await asyncio.sleep(1.2)
    assert await conductor.held(FIRST) == "a"
    driven.release()
    for _ in range(6):
        await asyncio.sleep(0.2)
        assert await conductor.held(FIRST) == "a"
    await until_gone("trainer-0")
    assert (
        "no driver of run run for 0.5 s"
        in (tmp_path / "run" / "logs" / "conductor.log").read_text()
    )
    await conductor.open(FIRST, idle)
    assert rank() and await conductor.held(FIRST) != "a"


async def test_a_driver_on_another_cluster_or_a_log_that_cannot_be_written_keeps_no_actors_here(
    conductor: Conductor, tmp_path: Path
):
    idle = spec(tmp_path)
    resources = idle.config.resources.model_copy(update={"keep_idle_s": 0.5})
    idle = replace(idle, config=idle.config.model_copy(update={"resources": resources}))
    (tmp_path / "run").write_text("a file instead of the folder of logs")
    Epochs(Files(tmp_path / "store")).acquire("run").release()
    await conductor.open(FIRST, idle)
    elsewhere = Epochs(Files(tmp_path / "store")).acquire("run")
    assert elsewhere.number == SECOND.epoch
    await until_gone("trainer-0")
    elsewhere.release()
    await conductor.open(SECOND, idle)


async def test_open_waits_for_working_ranks_only_if_their_spec_changes(
    conductor: Conductor, tmp_path: Path
):
    long = asyncio.create_task(
        conductor.collective(FIRST, "note", 60, {"name": "long", "seconds": 1.0})
    )
    await asyncio.sleep(0.2)
    await conductor.open(FIRST, spec(tmp_path))
    assert not long.done()
    other = spec(tmp_path)
    other = replace(other, config=other.config.model_copy(update={"deterministic": True}))
    await conductor.open(FIRST, other)
    assert long.done()
    await long


async def test_a_call_that_waits_too_long_names_the_running_call(conductor: Conductor):
    long = asyncio.create_task(
        conductor.collective(FIRST, "note", 60, {"name": "long", "seconds": 1.0})
    )
    await asyncio.sleep(0.2)
    with pytest.raises(DeadlineExceeded) as caught:
        await conductor.collective(FIRST, "note", 0.3, {"name": "late"})
    assert (caught.value.where, caught.value.found) == ("trainer.note", "trainer.note is running")
    await long


async def test_open_restarts_ranks_that_died(conductor: Conductor, tmp_path: Path):
    with pytest.raises(ActorLost):
        await conductor.collective(FIRST, "train", 60, {"key": "a", "dies": 1})
    assert await conductor.held(FIRST) != "a"
    await conductor.open(FIRST, spec(tmp_path))
    assert await calls_of_ranks(conductor, FIRST) == [[], []]
    assert await conductor.ensure(FIRST, Lineage(Stage.INIT, "i", "b", "i"), 60) is not None
    assert await conductor.held(FIRST) == "b"


async def test_ranks_that_a_dead_caller_left_in_different_calls_are_restarted(
    conductor: Conductor, tmp_path: Path
):
    """One rank waits in a collective; the other rank never received the call."""
    ranks = [ray.get_actor(f"trainer-{rank}") for rank in range(2)]
    ranks[0].train.remote("a", dies=9)
    await asyncio.sleep(0.3)
    async with asyncio.timeout(60):
        await conductor.open(FIRST, spec(tmp_path))
        assert await calls_of_ranks(conductor, FIRST) == [[], []]


async def test_ranks_keep_their_state_if_another_layout_does_not_fit(
    conductor: Conductor, tmp_path: Path
):
    await conductor.collective(FIRST, "train", 60, {"key": "a"})
    fits = spec(tmp_path)
    wide = fits.config.resources.model_copy(update={"actor_num_gpus_per_node": 3})
    with pytest.raises(ResourceError, match="not enough room"):
        await conductor.open(
            FIRST, replace(fits, config=fits.config.model_copy(update={"resources": wide}))
        )
    await conductor.open(FIRST, fits)
    assert await conductor.held(FIRST) == "a"


async def test_open_raises_the_error_of_an_actor_and_succeeds_once_the_error_is_gone(
    conductor: Conductor, tmp_path: Path
):
    generator = find_or_start(FakeGenerator, "conductor-generator")
    await generator.become.remote(wrong=True)
    with pytest.raises(DataError, match=r"a\.jsonl:3: no prompt"):
        await conductor.open(FIRST, spec(tmp_path))
    await generator.become.remote(wrong=False)
    await conductor.open(FIRST, spec(tmp_path))


async def test_the_conductor_reports_what_a_start_waits_for(
    conductor: Conductor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[list[str]] = []
    loop = asyncio.get_running_loop()

    def reserve(*, engines: int, kept_engines: int) -> None:
        seen.append(asyncio.run_coroutine_threadsafe(conductor.starting(), loop).result(10))

    monkeypatch.setattr(conductor._actors, "reserve", reserve)
    await conductor.open(FIRST, spec(tmp_path))
    assert seen == [["CPUs and GPUs of the run"]]
    assert await conductor.starting() == []


def with_engines(folder: Path, configured: int) -> ClusterSpec:
    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 2}
    config = {
        "run": "run",
        "num_rollout": 1,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": "/m"}},
        "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
        "rollout": rollout,
        "reward": {"function": {"type": "math"}},
        "resources": {"rollout_num_gpus": configured},
    }
    return ClusterSpec(validate(config), str(folder), "/m", str(folder / "store"))


@pytest.mark.parametrize(
    ("requested", "present", "first", "kept"),
    [(None, [], 2, 2), (4, [], 2, 4), (1, [], 1, 2), (1, [0, 1, 2], 1, 3)],
)
async def test_a_start_waits_for_the_configured_engines_at_most(
    tmp_path: Path, requested: int | None, present: list[int], first: int, kept: int
):
    conductor = Conductor("tests", str(Path.cwd()))
    if requested is not None:
        EngineTargets(Files(tmp_path / "store")).request("run", requested, configured=2)
    if present:
        engines = [SimpleNamespace(number=number) for number in present]
        other: Any = SimpleNamespace(engines=engines, spec=SimpleNamespace(devices=None))
        conductor._state.fleet = other
    assert await conductor._decide_engines(with_engines(tmp_path, 2)) == kept
    assert conductor._first_engines == first
