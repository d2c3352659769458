"""A GPU is one run's, until that ends (rlpipe.actors.ray.gpu_locks)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpipe.actors.ray import gpu_locks, local_ray
from rlpipe.actors.ray.gpu_locks import hold, release, visible
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

HOLDS = """
import asyncio, sys, time
from pathlib import Path
from rlpipe.actors import gpu_locks

gpu_locks.FOLDER = Path(sys.argv[1])
asyncio.run(gpu_locks.hold(sys.argv[2:], owner="run other", timeout_s=1))
print("has them", flush=True)
time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Locks of their own, for processes that are started here too."""
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    release()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another run, which has GPUs 1 and 2."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path), "1", "2"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "has them\n"
    yield process
    process.kill()
    process.wait()


async def test_who_comes_second_is_told_who_has_it_and_takes_none(
    other: subprocess.Popen[str], caplog
):
    with pytest.raises(
        ResourceError,
        match=f"GPU 2 is another run's(.|\n)*run other, PID {other.pid}(.|\n)*exclusive_gpus=false",
    ):
        await hold(["0", "2"], owner="run mine", timeout_s=0.2)
    assert gpu_locks._HELD == {}
    assert [record.message for record in caplog.records] == [
        f"waiting for GPU 2, which is another run's: run other, PID {other.pid}"
    ]


async def test_who_waits_has_it_once_the_other_is_killed(other: subprocess.Popen[str]):
    waiting = asyncio.create_task(hold(["0", "1"], owner="run mine", timeout_s=60))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    other.kill()
    await waiting
    assert sorted(gpu_locks._HELD) == ["0", "1"]
    await hold(["1"], owner="run mine", timeout_s=0)  # it has it


async def test_two_flows_of_one_process_share_what_it_has(other: subprocess.Popen[str]):
    both = asyncio.gather(*(hold(["0", "1"], owner="run mine", timeout_s=60) for _ in range(2)))
    await asyncio.sleep(0.2)
    other.kill()
    await asyncio.wait_for(both, 10)
    assert sorted(gpu_locks._HELD) == ["0", "1"]


async def test_what_one_flow_gives_up_is_taken_by_the_other_that_counted_on_it(
    other: subprocess.Popen[str],
):
    first, second = (
        asyncio.create_task(hold(["0", "1"], owner="run mine", timeout_s=60)) for _ in range(2)
    )
    await asyncio.sleep(0.2)
    first.cancel()
    await asyncio.wait([first])
    other.kill()
    await asyncio.wait_for(second, 10)
    assert sorted(gpu_locks._HELD) == ["0", "1"]


def test_two_homes_have_one_folder_of_locks(tmp_path: Path):
    asks = "from rlpipe.actors import gpu_locks; print(gpu_locks.FOLDER)"
    folders = set()
    for home in ("a", "b"):
        (tmp_path / home).mkdir()
        environment = {**os.environ, "TMPDIR": str(tmp_path / home)}
        folders.add(
            subprocess.run(
                [sys.executable, "-c", asks],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert len(folders) == 1


async def test_who_gives_up_waiting_has_none(other: subprocess.Popen[str]):
    waiting = asyncio.create_task(hold(["0", "1"], owner="run mine", timeout_s=60))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert gpu_locks._HELD == {}


def test_gpus_are_called_as_the_process_sees_them(monkeypatch: pytest.MonkeyPatch):
    assert visible(2) == ["0", "1"] and visible(0) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8a,7")
    assert visible(2) == ["5", "GPU-8a"]


@pytest.mark.parametrize(
    ("own", "exclusive", "held"), [(True, True, ["0", "1"]), (True, False, []), (False, True, [])]
)
async def test_they_are_held_with_a_ray_of_its_own_unless_they_are_shared(
    own, exclusive, held, monkeypatch
):
    monkeypatch.setattr(local_ray, "ray", SimpleNamespace(cluster_resources=lambda: {"GPU": 2.0}))
    monkeypatch.setattr(local_ray, "_started_here", SimpleNamespace(is_set=lambda: own))
    await local_ray.claim_gpus(ResourcesConfig(exclusive_gpus=exclusive), "run mine")
    assert sorted(gpu_locks._HELD) == held


async def test_fewer_gpus_than_are_asked_for_are_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(local_ray, "ray", SimpleNamespace(cluster_resources=lambda: {"GPU": 1.0}))
    monkeypatch.setattr(local_ray, "_started_here", SimpleNamespace(is_set=lambda: True))
    with pytest.raises(
        ResourceError,
        match=r"not enough GPUs(.|\n)*1 for the trainer and 1 for the engines(.|\n)*colocate=true",
    ):
        await local_ray.claim_gpus(ResourcesConfig(), "run mine")
    assert gpu_locks._HELD == {}
    await local_ray.claim_gpus(ResourcesConfig(), "run mine", engines=False)
    with pytest.raises(
        ResourceError, match=r"2 for trainer and engines together\n *do: *ask for fewer"
    ):
        await local_ray.claim_gpus(
            ResourcesConfig(colocate=True, actor_num_gpus_per_node=2), "run mine"
        )
    await local_ray.claim_gpus(ResourcesConfig(colocate=True), "run mine")
    assert sorted(gpu_locks._HELD) == ["0"]
