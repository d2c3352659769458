"""A dead Ray is reported by name, its processes end, and another Ray replaces it
(rlpipe.actors.ray.watch)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlpipe.actors import client as clusters
from rlpipe.actors.client import RemoteTrainer
from rlpipe.actors.drivers import Driver
from rlpipe.actors.ray import watch as ray_watch
from rlpipe.actors.ray.calls import call
from rlpipe.actors.ray.watch import RayWatch
from rlpipe.errors import ActorLost

PROGRAM = """
import asyncio, os, subprocess, sys, time
from pathlib import Path
import psutil, ray
from rlpipe.actors.ray import local_ray, watch as ray_watch
from rlpipe.actors.ray.calls import call
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ActorLost, ResourceError

victim, home, joined = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "joined"

class Works:
    def start(self):
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        self.child = subprocess.Popen(command, start_new_session=True)
        return os.getpid(), self.child.pid

    def hang(self):
        time.sleep(600)

def actor():
    identity = {"name": "works", "namespace": "dies", "lifetime": "detached"}
    return ray.remote(Works).options(**identity, num_cpus=0, max_concurrency=2).remote()

def seconds_since(start):
    return round(time.monotonic() - start, 1)

def one_line(error):
    return str(error).replace(chr(10), " ")

def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

async def main():
    head, address = None, None
    if joined:
        code = (
            "import sys, time, ray; from pathlib import Path; "
            "from rlpipe.actors.ray import local_ray, watch as ray_watch; "
            "from rlpipe.config.model import ResourcesConfig; ray_watch.watch_own = lambda: None; "
            "local_ray.connect(ResourcesConfig(), Path(sys.argv[1]), namespace='head'); "
            "print(local_ray.address(), flush=True); time.sleep(600)"
        )
        command = [sys.executable, "-c", code, str(home)]
        head = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        address = head.stdout.readline().strip()
    resources = ResourcesConfig(ray_address=address)
    local_ray.connect(resources, home, namespace="dies")
    works = actor()
    pids = ray.get(works.start.remote())
    waiting = asyncio.ensure_future(call(works.hang.remote(), where="works.hang", deadline_s=600))
    await asyncio.sleep(1)
    servers = psutil.Process(head.pid if head else os.getpid()).children(recursive=True)
    killed = [process for process in servers if process.name() == victim]
    assert killed, [process.name() for process in servers]
    for process in killed:
        process.kill()
    start = time.monotonic()
    try:
        await waiting
    except ActorLost as error:
        print("lost after", seconds_since(start), one_line(error), flush=True)
    watch = ray_watch.current()
    while watch.lost is None and time.monotonic() - start < 60:
        await asyncio.sleep(0.1)
    print("known after", seconds_since(start), one_line(watch.lost), flush=True)
    try:
        local_ray.connect(resources, home, namespace="dies")
        again = actor()
        print("again", ray.get(again.start.remote()) != pids, flush=True)
    except ResourceError as error:
        print("refused", one_line(error), flush=True)
    if not joined:
        left = [pid for pid in pids if is_running(pid)]
        print("left", left, flush=True)
    local_ray.disconnect()
    for process in [*servers, *([head] if head else [])]:
        try:
            process.kill()
        except psutil.Error:
            pass

asyncio.run(main())
"""


def output_after_kill(victim: str, home: Path, kind: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, victim, str(home), kind],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@pytest.mark.integration
@pytest.mark.parametrize("victim", ["raylet", pytest.param("gcs_server", marks=pytest.mark.long)])
def test_a_killed_own_ray_is_reported_and_started_again_without_left_over_processes(
    victim: str, tmp_path: Path
):
    output = output_after_kill(victim, tmp_path, "own")
    assert float(output["lost"].split()[1]) < 20
    assert float(output["known"].split()[1]) < 20
    assert (
        f"the run's own Ray: Ray has died   found:    its {victim}: killed by SIGKILL"
        in output["known"]
    )
    assert output["again"] == "True"
    assert output["left"] == "[]"


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_killed_joined_ray_is_reported(victim: str, tmp_path: Path):
    output = output_after_kill(victim, tmp_path, "joined")
    assert float(output["known"].split()[1]) < 30
    assert "the Ray at 127.0.0.1:" in output["known"]
    assert {"raylet": "its raylet of this node", "gcs_server": "its GCS server"}[victim] in output[
        "known"
    ]
    if victim == "gcs_server":
        assert "the Ray in use has died: the Ray at 127.0.0.1:" in output["refused"]


def watch(failures: list[str]) -> RayWatch:
    return RayWatch(lambda: failures[0] if failures else None, name="a Ray", leave=lambda: None)


async def test_waiting_calls_fail_when_ray_dies_and_later_calls_fail_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    failures: list[str] = []
    watched = watch(failures)
    monkeypatch.setattr(ray_watch, "_current", watched)
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(call(never, where="rank 0", deadline_s=600))  # pyright: ignore[reportArgumentType]
    trainer = RemoteTrainer(Driver("run", 1), None)  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(0.1)
    assert not waiting.done()
    failures.append("its raylet: killed by SIGKILL")
    with pytest.raises(
        ActorLost, match=r"(?s)a Ray: Ray has died.*SIGKILL.*while waiting for rank 0"
    ):
        await asyncio.wait_for(waiting, 10)
    monkeypatch.setattr(ray_watch, "_current", watch([]))
    with pytest.raises(ActorLost, match="Ray has died"):
        await trainer.held()
    ray_watch.stop()
    assert clusters.ray_watch is ray_watch


async def test_calls_return_results_while_ray_is_alive(monkeypatch: pytest.MonkeyPatch):
    watched = watch([])
    monkeypatch.setattr(ray_watch, "_current", watched)
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    answer.set_result(4)
    assert await call(answer, where="rank 0", deadline_s=10) == 4  # pyright: ignore[reportArgumentType]
    assert watched._waiting == set()
    ray_watch.stop()
    assert not watched._thread.is_alive()


def test_processes_that_a_raylet_left_running_are_killed():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    worker = subprocess.Popen(command, env={ray_watch.RAYLET_VARIABLE: "4711"})
    other = subprocess.Popen(command, env={ray_watch.RAYLET_VARIABLE: "4712"})
    time.sleep(0.2)
    try:
        ray_watch.end_workers(4711)
        assert worker.poll() is not None
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
