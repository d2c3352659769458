"""Reward processes on nodes of a Ray cluster (rlpipe.actors.reward_workers)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rlpipe.actors import reward_workers
from rlpipe.actors.ray.calls import kill_actors
from rlpipe.actors.reward_workers import process_workers
from rlpipe.config.data import RewardConfig
from rlpipe.errors import ResourceError
from rlpipe.rewards.reward_rows import score
from rlpipe.rewards.workers import ProcessWorker
from rlpipe.types import Sample, Status
from tests.soak.spot.nodes import RayNode

CPU = {"kind": "cpu"}
REWARD = """
import os, signal, time
from pathlib import Path

FOLDER = Path(__file__).parent


def score(sample):
    (FOLDER / f"{{sample.response}}-{{os.getpid()}}").touch()
    if sample.response == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if sample.response == "raises":
        raise ValueError("no")
    while sample.response == "slow" and not (FOLDER / "go").exists():
        time.sleep(0.01)
    return {value}
"""


class CpuNodes:
    """Ray nodes with the label `CPU`, in the order of their start."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.running: list[RayNode] = []

    def add(self, num_cpus: int = 2) -> int:
        """Add a node; return the pid of its process."""
        head = ray.get_runtime_context().gcs_address
        self.running.append(RayNode(self._home, CPU, num_cpus, head))
        return self.running[-1].process.pid

    def kill_first(self) -> None:
        self.running.pop(0).kill()


def samples(*responses: str) -> list[Sample]:
    return [
        Sample(
            group_id=f"g{number}",
            index=0,
            prompt="p",
            prompt_ids=[1],
            response=response,
            response_ids=[2],
            status=Status.COMPLETED,
        )
        for number, response in enumerate(responses)
    ]


def config(folder: Path, *, value: float = 1.0, **keys: Any) -> RewardConfig:
    (folder / "reward.py").write_text(REWARD.format(value=value))
    function = {"type": "python", "path": f"{folder / 'reward.py'}:score"}
    return RewardConfig.model_validate(
        {"function": function, "workers": 2, "worker_labels": CPU, "max_error_fraction": 1, **keys}
    )


async def rewards(config: RewardConfig, *responses: str) -> list[Any]:
    rows = await score(samples(*responses), config, process=process_workers(config))
    return [row.reward if row.error is None else row.error for row in rows]


def calls_of(folder: Path) -> Counter[str]:
    """How often the function was called for each response."""
    return Counter(path.name.rpartition("-")[0] for path in folder.glob("*-*"))


def node_of(folder: Path, response: str) -> list[int]:
    """The pids of the processes above the one that scored this response, once there is one."""
    end_s = time.monotonic() + 60
    while not (found := list(folder.glob(f"{response}-*"))) and time.monotonic() < end_s:
        time.sleep(0.02)
    scorer = psutil.Process(int(found[-1].name.rpartition("-")[2]))
    return [process.pid for process in scorer.parents()]


@pytest.fixture
def cpu_nodes(local_ray: str, ray_home: Path) -> Iterator[CpuNodes]:
    """Nodes with the label in a cluster whose first node has another one."""
    nodes = CpuNodes(ray_home)
    yield nodes
    kill_actors([host for hosts in reward_workers._idle.values() for host in hosts])
    reward_workers._idle.clear()
    for node in nodes.running:
        node.end()
    end_s = time.monotonic() + 120
    while sum(node["Alive"] for node in ray.nodes()) > 1:
        # Ray still places actors on a node that was killed, until it misses the node's heartbeats
        assert time.monotonic() < end_s, ray.nodes()
        time.sleep(0.1)


@pytest.mark.integration
async def test_processes_run_on_labelled_nodes_and_calls_survive_the_loss_of_one(
    cpu_nodes: CpuNodes, tmp_path: Path
):
    reward = config(tmp_path)
    first = cpu_nodes.add()
    assert await rewards(reward, *"abcd") == [1.0] * 4
    scored = asyncio.create_task(rewards(reward, "slow", "raises", "dies", "e"))
    above = await asyncio.to_thread(node_of, tmp_path, "slow")
    assert first in above
    cpu_nodes.add()
    cpu_nodes.kill_first()
    (tmp_path / "go").touch()
    slow, raises, dies, last = await scored
    assert (slow, last) == (1.0, 1.0)
    assert "ValueError: no" in raises and "killed" in dies
    calls = calls_of(tmp_path)
    assert calls["slow"] == 2, "repeated after the loss of the node"
    assert calls["raises"] == 1


@pytest.mark.integration
async def test_each_stage_has_the_function_as_it_is_then_and_hosts_stay(
    cpu_nodes: CpuNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cpu_nodes.add(num_cpus=1)
    reward = config(tmp_path, workers=1)
    assert await rewards(reward, "a") == [1.0]
    ((host,),) = reward_workers._idle.values()
    assert await rewards(config(tmp_path, workers=1, value=2.0), "b") == [2.0]
    assert [[host]] == list(reward_workers._idle.values())
    late = config(tmp_path, workers=1, sample_timeout_s=0.5)
    (found,) = await rewards(late, "slow")
    assert "0.5 s" in found
    monkeypatch.setattr(reward_workers, "MAX_LOST", 1)
    cpu_nodes.add(num_cpus=1)
    cpu_nodes.kill_first()
    assert await rewards(config(tmp_path, workers=1), "c") == [1.0], "the idle host has vanished"


@pytest.mark.integration
async def test_a_cluster_without_room_is_an_error_that_names_the_labels(
    local_ray: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reward_workers, "ROOM_TIMEOUT_S", 0.5)
    with pytest.raises(ResourceError, match=r"no room(.|\n)*'kind': 'cpu'(.|\n)*reward.workers"):
        await rewards(config(tmp_path), "a")


async def test_without_labels_processes_are_here_and_labels_need_processes(tmp_path: Path):
    assert process_workers(config(tmp_path, worker_labels=None)) is ProcessWorker
    with pytest.raises(ValueError, match="set workers to the number of processes"):
        config(tmp_path, workers=0)
