"""The template process of a home's runs (tools.template)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError

from rlpipe.actors.ray import local_ray
from rlpipe.config.model import ResourcesConfig
from rlpipe.system import forked, leftovers
from rlpipe.system.forked import ForkedProcess
from tests.live_engine import make_model, make_server
from tools import template
from tools.kept_server import TEMPLATE, KeptServer
from tools.local_servers import LocalServers
from tools.template import template_of_run
from tools.up import down


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Programs that are started in place of templates."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(life: list[str], path: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        processes.append(process)
        return process

    monkeypatch.setattr(template, "start", start)
    monkeypatch.setattr(template, "usable", lambda: True)
    monkeypatch.setattr(leftovers, "FOLDER", str(tmp_path / "private"))
    monkeypatch.setenv("RLPIPE_PREFECT_IDLE_S", "100")
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_runs_of_a_home_share_a_template(tmp_path: Path, started, monkeypatch):
    with template_of_run(tmp_path, wanted=True):
        first = os.environ[forked.VARIABLE]
        assert Path(first).parent == tmp_path / "private"
    assert forked.VARIABLE not in os.environ
    monkeypatch.setenv("TERM_PROGRAM", "other")
    with template_of_run(tmp_path, wanted=True), template_of_run(tmp_path, wanted=True):
        assert os.environ[forked.VARIABLE] == first
    assert len(started) == 1 and started[0].poll() is None


def test_a_template_with_another_environment_is_replaced_unless_a_run_uses_it(
    tmp_path: Path, started, monkeypatch
):
    with template_of_run(tmp_path, wanted=True):
        other = KeptServer.of_home(tmp_path, TEMPLATE)
        assert other is not None
        other.use()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with template_of_run(tmp_path, wanted=True):
        assert forked.VARIABLE not in os.environ
    other.leave()
    with template_of_run(tmp_path, wanted=True):
        assert forked.VARIABLE in os.environ
    assert len(started) == 2 and started[0].wait() != 0 and started[1].poll() is None


def test_without_a_time_to_stay_the_template_ends_with_its_run(
    tmp_path: Path, started, monkeypatch
):
    monkeypatch.setenv("RLPIPE_PREFECT_IDLE_S", "0")
    with template_of_run(tmp_path, wanted=True):
        assert started[0].poll() is None
        socket = Path(f"{os.environ[forked.VARIABLE]}-worker")
        socket.touch()
    assert started[0].poll() is not None
    assert not socket.exists()


def test_down_ends_an_unused_template(tmp_path: Path, started):
    with template_of_run(tmp_path, wanted=True):
        socket = Path(f"{os.environ[forked.VARIABLE]}-worker")
        socket.touch()
        assert down(LocalServers(tmp_path)) == [] and socket.exists()
    assert down(LocalServers(tmp_path)) == ["the template of engines and workers"]
    assert not socket.exists()
    assert started[0].poll() is not None


def test_a_run_on_gpus_or_with_little_memory_has_no_template(tmp_path: Path, started, monkeypatch):
    with template_of_run(tmp_path, wanted=False):
        assert forked.VARIABLE not in os.environ
    monkeypatch.undo()
    monkeypatch.setattr(template.metadata, "version", lambda _: "2.13.0+cu129")
    assert not template.usable()
    monkeypatch.setattr(template.metadata, "version", lambda _: "2.13.0+cpu")
    assert template.usable()
    monkeypatch.setattr(template, "MIN_FREE_BYTES", 2**60)
    assert not template.usable()


@pytest.mark.integration
def test_engines_and_workers_are_forked_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_model(tmp_path / "model", seed=0)
    others = _descendants()  # servers and fork servers that other tests share
    with template_of_run(tmp_path, wanted=True):
        server = make_server(tmp_path / "model", tmp_path / "server.log")
        server.start()
        templates = _descendants() - others
        assert isinstance(server.process, ForkedProcess)
        local_ray.connect(ResourcesConfig(), tmp_path, namespace="forked")
        try:
            actor_class: Any = ray.remote(_Actor)
            actor = actor_class.remote()
            pid: Any = ray.get(actor.pid.remote())
            # its parent is a template, and it works as any worker
            assert psutil.Process(pid).ppid() in templates
            assert psutil.Process(pid).environ()["RAY_RAYLET_PID"].isdecimal()
            assert "ray::_Actor" in " ".join(psutil.Process(pid).cmdline())
            psutil.Process(pid).kill()
            with pytest.raises(ActorDiedError):
                ray.get(actor.pid.remote())
            second: Any = ray.get(actor_class.remote().pid.remote())
        finally:
            local_ray.disconnect()
        _wait_until_ended(second)
        server.wait_ready(120)
        parts = psutil.Process(server.process.pid).children(recursive=True)
        assert any("sglang::scheduler" in " ".join(part.cmdline()) for part in parts)
        server.stop()
        assert not server.alive and server.process.returncode == -9
        for part in parts:
            _wait_until_ended(part.pid)
    for pid in templates:
        _wait_until_ended(pid)


class _Actor:
    def pid(self) -> int:
        return os.getpid()


def _descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _wait_until_ended(pid: int) -> None:
    end_s = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s
        time.sleep(0.05)
