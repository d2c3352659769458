"""Up and down on this machine: what runs is left alone, what died comes back where it was, nobody
else's process is ended."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlpipe.actors.ray import access as ray_access
from rlpipe.errors import ResourceError
from tools import up
from tools.local_prefect import free_port
from tools.place import Place, alone
from tools.up import down, end_if_elsewhere, ours, start, start_s3, told, wait

PAUSES = "import signal; signal.pause()"
SLEEPS = [
    sys.executable,
    "-c",
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PAUSES!r}])",
]
ENDS = [sys.executable, "-c", "raise SystemExit('no such pool')"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "home")
    yield made
    down(made)


def test_a_process_is_known_by_its_number_and_when_it_began(tmp_path: Path):
    place = Place(tmp_path)
    place.keep("ray", os.getpid(), [6379])
    assert place.running("ray") == psutil.Process()
    record = place.folder / "ray.json"
    record.write_text(record.read_text().replace('"started": ', '"started": 9'))
    assert place.running("ray") is None
    assert down(place) == []


def test_a_clock_that_is_set_makes_nothing_another_process(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    start(place, "worker", [sys.executable, "-c", PAUSES], [], {})
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600.0)
    worker = place.running("worker")
    assert worker is not None and down(place) == ["worker"] and not psutil.pid_exists(worker.pid)


def test_a_process_of_another_boot_or_container_is_not_ended(tmp_path: Path):
    place = Place(tmp_path)
    place.keep("ray", os.getpid(), [6379])
    record = place.folder / "ray.json"
    record.write_text(record.read_text().replace('"pid_space": "', '"pid_space": "another '))
    assert place.running("ray") is None and down(place) == []


def test_of_two_that_bring_a_place_up_or_down_the_second_is_told_who_is_at_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["up", "--home", str(place.home), "--down"])
    with alone(place, "make up"):
        assert up.main() == 1
        assert f"found:    make up, PID {os.getpid()}" in capsys.readouterr().err
        monkeypatch.setattr(sys, "argv", ["up", "--home", str(place.home), "--status"])
        assert up.main() == 0, "to look is free"
    monkeypatch.setattr(sys, "argv", ["up", "--home", str(place.home), "--down"])
    assert up.main() == 0
    assert "ended: nothing was running" in capsys.readouterr().out


def test_down_ends_what_a_process_started_too(place: Place):
    start(place, "worker", SLEEPS, [], {})
    worker = place.running("worker")
    assert worker is not None
    wait(place, "worker", lambda: bool(worker.children()))
    below = worker.children()
    assert down(place) == ["worker"]
    assert not any(process.is_running() for process in (worker, *below))
    assert "worker   down" in told(place)


def test_what_does_not_come_up_is_said_with_the_end_of_its_log(place: Place):
    start(place, "prefect", ENDS, [4200], {})
    with pytest.raises(ResourceError, match="no such pool"):
        wait(place, "prefect", lambda: False)


@pytest.mark.integration
def test_the_store_comes_back_at_its_port_with_its_key_which_nobody_else_can_read(place: Place):
    start_s3(place)
    first = place.environment
    key = place.secret
    assert down(place) == ["s3"]
    start_s3(place)
    assert place.environment == first
    assert place.overrides == ["store.root=s3://rlpipe/runs"]
    assert stat.S_IMODE((place.folder / "s3.key").stat().st_mode) == 0o600
    assert key in (place.folder / "s3" / "s3.json").read_text()
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700


def test_a_port_is_kept_until_somebody_else_has_it(tmp_path: Path):
    place = Place(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        place.keep("prefect", os.getpid(), [port])
        assert place.url("prefect") == f"http://127.0.0.1:{port}"
        assert place.environment["PREFECT_API_URL"] == f"http://127.0.0.1:{port}/api"
        assert place.ports("prefect", lambda: [1]) == [1]
    assert place.ports("prefect", lambda: [1]) == [port]


def test_a_server_of_somebody_else_at_the_port_is_not_ours(place: Place, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        start(place, "prefect", SLEEPS, [port], {})
        assert not ours(place, "prefect", port)
        theirs = Place(tmp_path / "theirs")
        theirs.keep("prefect", os.getpid(), [port])
        assert ours(theirs, "prefect", port)


def test_runs_use_what_runs_and_is_not_left_out(tmp_path: Path):
    place = Place(tmp_path)
    place.keep("ray", os.getpid(), [6379])
    place.keep("s3", os.getpid(), [8333])
    assert place.overrides == [
        "store.root=s3://rlpipe/runs",
        "resources.ray_address=127.0.0.1:6379",
    ]
    assert "AWS_ENDPOINT_URL" in place.environment
    assert Path(place.environment[ray_access.TOKEN_PATH]).read_text()
    assert ray_access.settings(place.home).items() <= place.environment.items()
    assert ray_access.TOKEN_PATH in up.exports(
        place
    ) and ray_access.BEYOND_THIS_MACHINE not in up.exports(place)
    without = Place(tmp_path, ["ray", "s3"])
    assert without.overrides == [] and set(without.environment) == {up.HOME_VARIABLE}
    for name in ("ray", "s3"):
        record = place.folder / f"{name}.json"
        record.write_text(record.read_text().replace('"started": ', '"started": 9'))
    assert place.overrides == [] and set(place.environment) == {up.HOME_VARIABLE}


def test_a_worker_whose_servers_are_elsewhere_now_is_ended_and_no_other(place: Place):
    start(place, "worker", SLEEPS, [], {**place.environment, "MORE": "x"})
    end_if_elsewhere(place, "worker")
    assert place.running("worker")
    start(place, "prefect", SLEEPS, [free_port(0)], {})
    end_if_elsewhere(place, "worker")
    assert place.running("prefect") and not place.running("worker")


def test_a_worker_of_another_pool_is_ended(place: Place):
    """A site that got a name has another one, and nobody would take its runs."""
    start(place, "worker", SLEEPS, [], {**place.environment, up.POOL: "rlpipe"})
    end_if_elsewhere(place, "worker", {up.POOL: "rlpipe"})
    assert place.running("worker")
    end_if_elsewhere(place, "worker", {up.POOL: "rlpipe-h200"})
    assert not place.running("worker")


def test_what_would_end_runs_is_refused_and_down_ends_them_also_without_their_worker(place: Place):
    start(place, "worker", SLEEPS, [], place.environment)
    start(place, "prefect", SLEEPS, [free_port(0)], {})
    command = [sys.executable, "-c", PAUSES, up.ENGINE]
    settings = {**os.environ, up.HOME_VARIABLE: str(place.home), "PREFECT__FLOW_RUN_ID": "b9a2"}
    run = subprocess.Popen(command, env=settings)
    other = subprocess.Popen(command, env={**settings, up.HOME_VARIABLE: str(place.home / "other")})
    try:
        assert [process.pid for process in up.under_way(place).values()] == [run.pid]
        with pytest.raises(
            ResourceError,
            match=f"(?s)worker was started for other servers.*flow run b9a2 .PID {run.pid}.*make down",
        ):
            end_if_elsewhere(place, "worker")
        assert place.running("worker")
        up.end(place, "worker")
        down(place)
        assert not psutil.pid_exists(run.pid) and other.poll() is None
    finally:
        for process in (run, other):
            process.kill()
            process.wait()


def test_a_process_that_ended_by_itself_is_no_error(place: Place):
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    known = psutil.Process(process.pid)
    process.wait()
    up._end([known])


def test_deployments_that_are_refused_leave_the_place_up_and_their_exit_code(
    place: Place, monkeypatch, capsys
):
    start(place, "ray", SLEEPS, [6379], {})
    refuses = place.home / "python"
    refuses.write_text("#!/bin/sh\nexit 2\n")
    refuses.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(refuses))
    assert up.declare(place) == 2
    assert "were not declared (exit code 2); up: ray." in capsys.readouterr().err


def test_what_pythonpath_has_is_kept_behind_the_checkout(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", "/opt/Megatron-LM")
    start(place, "worker", SLEEPS, [], {})
    worker = place.running("worker")
    assert (
        worker is not None
        and up.environment_of(worker)["PYTHONPATH"] == f"{up.ROOT}:/opt/Megatron-LM"
    )


def test_a_record_that_cannot_be_read_is_said_with_what_to_do(place: Place):
    file = place.folder / "ray.json"
    file.write_text('{"pid": 1, "created": 1.5, "ports": []}')
    with pytest.raises(
        ResourceError, match=r"ray\.json(.|\n)*pid_space(.|\n)*end that process \(ray\) if it runs"
    ):
        place.running("ray")
    file.unlink()
