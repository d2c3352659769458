"""One run holds a GPU until its process ends (rlpipe.actors.ray.gpu_locks)."""

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
from rlpipe.actors.ray import gpu_locks

gpu_locks.FOLDER = Path(sys.argv[1])
asyncio.run(gpu_locks.hold(sys.argv[2:], owner="run other", timeout_s=1))
print("locked", flush=True)
time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Separate locks for each test and its processes."""
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    release()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another run, which holds GPUs 1 and 2."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path), "1", "2"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


async def test_a_second_run_gets_an_error_with_the_owner_and_locks_no_gpu(
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


async def test_a_waiting_run_locks_the_gpu_once_the_owner_is_killed(other: subprocess.Popen[str]):
    waiting = asyncio.create_task(hold(["0", "1"], owner="run mine", timeout_s=60))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    other.kill()
    await waiting
    assert sorted(gpu_locks._HELD) == ["0", "1"]
    await hold(["1"], owner="run mine", timeout_s=0)  # held already


async def test_two_flows_of_one_process_share_its_locks(other: subprocess.Popen[str]):
    both = asyncio.gather(*(hold(["0", "1"], owner="run mine", timeout_s=60) for _ in range(2)))
    await asyncio.sleep(0.2)
    other.kill()
    await asyncio.wait_for(both, 10)
    assert sorted(gpu_locks._HELD) == ["0", "1"]


async def test_a_gpu_that_one_flow_releases_is_locked_by_the_other_flow_of_the_process(
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


def test_two_homes_use_the_same_locks(tmp_path: Path):
    program = "from rlpipe.actors.ray import gpu_locks; print(gpu_locks.FOLDER)"
    folders = set()
    for home in ("a", "b"):
        (tmp_path / home).mkdir()
        environment = {**os.environ, "TMPDIR": str(tmp_path / home)}
        folders.add(
            subprocess.run(
                [sys.executable, "-c", program],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert len(folders) == 1


async def test_a_cancelled_wait_leaves_no_gpu_locked(other: subprocess.Popen[str]):
    waiting = asyncio.create_task(hold(["0", "1"], owner="run mine", timeout_s=60))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert gpu_locks._HELD == {}


def test_gpus_have_the_names_of_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch):
    assert visible(2) == ["0", "1"] and visible(0) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8a,7")
    assert visible(2) == ["5", "GPU-8a"]


@pytest.mark.parametrize(
    ("own", "exclusive", "held"), [(True, True, ["0", "1"]), (True, False, []), (False, True, [])]
)
async def test_gpus_of_an_own_ray_are_locked_unless_exclusive_gpus_is_false(
    own, exclusive, held, monkeypatch
):
    monkeypatch.setattr(local_ray, "ray", SimpleNamespace(cluster_resources=lambda: {"GPU": 2.0}))
    monkeypatch.setattr(local_ray, "_started_here", SimpleNamespace(is_set=lambda: own))
    await local_ray.claim_gpus(ResourcesConfig(exclusive_gpus=exclusive), "run mine")
    assert sorted(gpu_locks._HELD) == held


async def test_too_few_gpus_are_an_error_before_anything_starts(monkeypatch):
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
