"""A GPU is one run's, until that ends (rlpipe.actors.gpu_locks)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlpipe.actors import gpu_locks, local_ray
from rlpipe.actors.gpu_locks import hold, release, visible
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

HOLDS = """
import asyncio, sys, time
from rlpipe.actors.gpu_locks import hold

asyncio.run(hold(sys.argv[1:], who="run other", timeout_s=1))
print("has them", flush=True)
time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Locks of their own, for processes that are started here too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    release()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """Another run, which has GPUs 1 and 2."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, "1", "2"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "has them\n"
    yield process
    process.kill()
    process.wait()


async def test_who_comes_second_is_told_who_has_it_and_takes_none(other: subprocess.Popen[str], caplog):
    with pytest.raises(
        ResourceError, match=f"GPU 2 is another run's(.|\n)*run other, PID {other.pid}(.|\n)*exclusive_gpus=false"
    ):
        await hold(["0", "2"], who="run mine", timeout_s=0.2)
    assert gpu_locks._HELD == {}
    assert [record.message for record in caplog.records] == [
        f"waiting for GPU 2, which is another run's: run other, PID {other.pid}"
    ]


async def test_who_waits_has_it_once_the_other_is_killed(other: subprocess.Popen[str]):
    waiting = asyncio.create_task(hold(["0", "1"], who="run mine", timeout_s=60))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    other.kill()
    await waiting
    assert sorted(gpu_locks._HELD) == ["0", "1"]
    await hold(["1"], who="run mine", timeout_s=0)  # it has it


async def test_who_gives_up_waiting_has_none(other: subprocess.Popen[str]):
    waiting = asyncio.create_task(hold(["0", "1"], who="run mine", timeout_s=60))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert gpu_locks._HELD == {}


def test_gpus_are_called_as_the_process_sees_them(monkeypatch: pytest.MonkeyPatch):
    assert visible(2) == ["0", "1"] and visible(0) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8a,7")
    assert visible(2) == ["5", "GPU-8a"]


@pytest.mark.parametrize(("own", "exclusive", "held"), [(True, True, ["0", "1"]), (True, False, []), (False, True, [])])
async def test_they_are_held_with_a_ray_of_its_own_unless_they_are_shared(own, exclusive, held, monkeypatch):
    monkeypatch.setattr(local_ray, "ray", SimpleNamespace(cluster_resources=lambda: {"GPU": 2.0}))
    monkeypatch.setattr(local_ray, "_own", SimpleNamespace(is_set=lambda: own))
    await local_ray.have_gpus(ResourcesConfig(exclusive_gpus=exclusive), "run mine")
    assert sorted(gpu_locks._HELD) == held
