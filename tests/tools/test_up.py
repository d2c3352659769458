"""Start and stop local servers: running ones stay, dead ones restart, foreign processes are left
alone.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlpipe.actors.ray import access as ray_access
from rlpipe.errors import ResourceError
from tools import up
from tools.local_prefect import free_port
from tools.local_servers import LocalServers, exclusive
from tools.up import (
    down,
    end_if_outdated,
    listens_itself,
    session_folders,
    start,
    start_ray,
    start_s3,
    status_text,
    wait,
)

PAUSES = "import signal; signal.pause()"
SLEEPS = [
    sys.executable,
    "-c",
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PAUSES!r}])",
]
ENDS = [sys.executable, "-c", "raise SystemExit('no such pool')"]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[LocalServers]:
    made = LocalServers(tmp_path / "home")
    yield made
    down(made)


def test_a_process_is_identified_by_pid_and_start(tmp_path: Path):
    servers = LocalServers(tmp_path)
    servers.keep("ray", os.getpid(), [6379])
    assert servers.running("ray") == psutil.Process()
    record = servers.folder / "ray.json"
    record.write_text(record.read_text().replace('"started": ', '"started": 9'))
    assert servers.running("ray") is None
    assert down(servers) == []


def test_a_changed_clock_does_not_change_the_identity_of_a_process(
    servers: LocalServers, monkeypatch: pytest.MonkeyPatch
):
    start(servers, "worker", [sys.executable, "-c", PAUSES], [], {})
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600.0)
    worker = servers.running("worker")
    assert worker is not None and down(servers) == ["worker"] and not psutil.pid_exists(worker.pid)


def test_a_process_of_another_boot_or_container_is_not_ended(tmp_path: Path):
    servers = LocalServers(tmp_path)
    servers.keep("ray", os.getpid(), [6379])
    record = servers.folder / "ray.json"
    record.write_text(record.read_text().replace('"pid_space": "', '"pid_space": "another '))
    assert servers.running("ray") is None and down(servers) == []


def test_the_second_of_two_concurrent_commands_is_refused_with_the_pid(
    servers: LocalServers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["up", "--home", str(servers.home), "--down"])
    with exclusive(servers, "make up"):
        assert up.main() == 1
        assert f"found:    make up, PID {os.getpid()}" in capsys.readouterr().err
        monkeypatch.setattr(sys, "argv", ["up", "--home", str(servers.home), "--status"])
        assert up.main() == 0, "to look is free"
    monkeypatch.setattr(sys, "argv", ["up", "--home", str(servers.home), "--down"])
    assert up.main() == 0
    assert "ended: no server was running" in capsys.readouterr().out


def test_down_ends_children_too(servers: LocalServers):
    start(servers, "worker", SLEEPS, [], {})
    worker = servers.running("worker")
    assert worker is not None
    wait(servers, "worker", lambda: bool(worker.children()))
    below = worker.children()
    assert down(servers) == ["worker"]
    assert not any(process.is_running() for process in (worker, *below))
    assert "worker   down" in status_text(servers)


def test_the_state_tells_left_out_servers_from_dead_ones(tmp_path: Path):
    shown = status_text(LocalServers(tmp_path, ["s3"]))
    assert "s3       left out" in shown and "ray      down" in shown


def test_the_error_of_a_failed_start_has_the_end_of_the_log(servers: LocalServers):
    start(servers, "prefect", ENDS, [4200], {})
    with pytest.raises(ResourceError, match="no such pool"):
        wait(servers, "prefect", lambda: False)


def test_a_server_that_is_late_is_shown_and_the_error_says_to_repeat(
    servers: LocalServers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(up, "SHOW_AFTER_S", 0.1)
    monkeypatch.setattr(up, "START_TIMEOUT_S", 1.0)
    start(servers, "prefect", SLEEPS, [4200], {})
    with pytest.raises(ResourceError, match=r"not ready after 1 s(.|\n)*repeat the command"):
        wait(servers, "prefect", lambda: False)
    assert "starting prefect … 0 s" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.integration
def test_a_ray_head_counts_as_started_once_its_raylet_has_joined(servers: LocalServers):
    # A line of an earlier head does not count.
    servers.log("ray").write_bytes(up.RAY_STARTED + b"\n")
    start_ray(servers)
    assert servers.log("ray").read_bytes().count(up.RAY_STARTED) == 2
    assert down(servers) == ["ray"]


@pytest.mark.integration
def test_the_store_restarts_with_its_port_and_private_key(
    servers: LocalServers,
):
    start_s3(servers)
    first = servers.environment
    key = servers.secret
    assert down(servers) == ["s3"]
    start_s3(servers)
    assert servers.environment == first
    assert servers.overrides == ["store.root=s3://rlpipe/runs"]
    assert stat.S_IMODE((servers.folder / "s3.key").stat().st_mode) == 0o600
    assert key in (servers.folder / "s3" / "s3.json").read_text()
    assert stat.S_IMODE(servers.folder.stat().st_mode) == 0o700


def test_a_port_is_kept_while_it_is_free(tmp_path: Path):
    servers = LocalServers(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        servers.keep("prefect", os.getpid(), [port])
        assert servers.url("prefect") == f"http://127.0.0.1:{port}"
        assert servers.environment["PREFECT_API_URL"] == f"http://127.0.0.1:{port}/api"
        assert servers.ports("prefect", lambda: [1]) == [1]
    assert servers.ports("prefect", lambda: [1]) == [port]


def test_another_process_at_the_port_is_not_the_server(servers: LocalServers, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        start(servers, "prefect", SLEEPS, [port], {})
        assert not listens_itself(servers, "prefect", port)
        theirs = LocalServers(tmp_path / "theirs")
        theirs.keep("prefect", os.getpid(), [port])
        assert listens_itself(theirs, "prefect", port)


def test_runs_use_running_servers_except_excluded_ones(tmp_path: Path):
    servers = LocalServers(tmp_path)
    servers.keep("ray", os.getpid(), [6379])
    servers.keep("s3", os.getpid(), [8333])
    assert servers.overrides == [
        "store.root=s3://rlpipe/runs",
        "resources.ray_address=127.0.0.1:6379",
    ]
    assert "AWS_ENDPOINT_URL" in servers.environment
    assert Path(servers.environment[ray_access.TOKEN_PATH]).read_text()
    assert ray_access.settings(servers.home).items() <= servers.environment.items()
    assert ray_access.TOKEN_PATH in up.exports(
        servers
    ) and ray_access.BEYOND_THIS_MACHINE not in up.exports(servers)
    without = LocalServers(tmp_path, ["ray", "s3"])
    assert without.overrides == [] and set(without.environment) == {up.HOME_VARIABLE}
    for name in ("ray", "s3"):
        record = servers.folder / f"{name}.json"
        record.write_text(record.read_text().replace('"started": ', '"started": 9'))
    assert servers.overrides == [] and set(servers.environment) == {up.HOME_VARIABLE}


def test_only_a_worker_with_outdated_addresses_is_ended(servers: LocalServers):
    start(servers, "worker", SLEEPS, [], {**servers.environment, "MORE": "x"})
    end_if_outdated(servers, "worker")
    assert servers.running("worker")
    start(servers, "prefect", SLEEPS, [free_port(0)], {})
    end_if_outdated(servers, "worker")
    assert servers.running("prefect") and not servers.running("worker")


def test_a_worker_of_another_pool_is_ended(servers: LocalServers):
    """A site that gets a name has another pool, and no worker would start its runs."""
    start(servers, "worker", SLEEPS, [], {**servers.environment, up.POOL: "rlpipe"})
    end_if_outdated(servers, "worker", {up.POOL: "rlpipe"})
    assert servers.running("worker")
    end_if_outdated(servers, "worker", {up.POOL: "rlpipe-h200"})
    assert not servers.running("worker")


def test_a_restart_that_would_end_runs_is_refused_and_down_ends_them(
    servers: LocalServers,
):
    start(servers, "worker", SLEEPS, [], servers.environment)
    start(servers, "prefect", SLEEPS, [free_port(0)], {})
    command = [sys.executable, "-c", PAUSES, up.ENGINE]
    settings = {**os.environ, up.HOME_VARIABLE: str(servers.home), "PREFECT__FLOW_RUN_ID": "b9a2"}
    run = subprocess.Popen(command, env=settings)
    other = subprocess.Popen(
        command, env={**settings, up.HOME_VARIABLE: str(servers.home / "other")}
    )
    try:
        assert [process.pid for process in up.running_flow_runs(servers).values()] == [run.pid]
        with pytest.raises(
            ResourceError,
            match=f"(?s)worker has outdated addresses.*flow run b9a2 .PID {run.pid}.*make down",
        ):
            end_if_outdated(servers, "worker")
        assert servers.running("worker")
        up.end(servers, "worker")
        down(servers)
        assert not psutil.pid_exists(run.pid) and other.poll() is None
    finally:
        for process in (run, other):
            process.kill()
            process.wait()


def test_a_process_that_has_ended_is_no_error(servers: LocalServers):
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    known = psutil.Process(process.pid)
    process.wait()
    up._end([known])


def test_refused_deployments_leave_servers_running_and_return_their_exit_code(
    servers: LocalServers, monkeypatch, capsys
):
    start(servers, "ray", SLEEPS, [6379], {})
    refuses = servers.home / "python"
    refuses.write_text("#!/bin/sh\nexit 2\n")
    refuses.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(refuses))
    assert up.declare(servers) == 2
    assert "failed (exit code 2); running servers: ray." in capsys.readouterr().err


def test_deployments_get_the_addresses_of_running_servers(servers: LocalServers, monkeypatch):
    start(servers, "ray", SLEEPS, [6379], {})
    prints = servers.home / "python"
    prints.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > ' + str(servers.home / "arguments"))
    prints.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(prints))
    assert up.declare(servers) == 0
    given = (servers.home / "arguments").read_text().split("--server-overrides\n")[1]
    assert given.splitlines() == ["resources.ray_address=127.0.0.1:6379"]


def test_pythonpath_entries_stay_after_the_checkout(
    servers: LocalServers, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", "/opt/Megatron-LM")
    start(servers, "worker", SLEEPS, [], {})
    worker = servers.running("worker")
    assert (
        worker is not None
        and up.environment_of(worker)["PYTHONPATH"] == f"{up.ROOT}:/opt/Megatron-LM"
    )


def test_the_error_of_a_damaged_record_has_advice(servers: LocalServers):
    file = servers.folder / "ray.json"
    file.write_text('{"pid": 1, "created": 1.5, "ports": []}')
    with pytest.raises(
        ResourceError, match=r"ray\.json(.|\n)*pid_space(.|\n)*end that process \(ray\) if it runs"
    ):
        servers.running("ray")
    file.unlink()


def test_the_printed_command_of_prefect_exists_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert Path(up.shown_prefect()).is_file()
    monkeypatch.chdir(Path(sys.executable).parents[2])
    assert not Path(up.shown_prefect()).is_absolute() and Path(up.shown_prefect()).is_file()


def test_the_session_of_a_ray_head_is_found_in_the_command_lines_of_its_processes(tmp_path: Path):
    child = f"[sys.executable, '-c', 'input()', '--session-dir={tmp_path}/session_1']"
    source = f"import subprocess, sys; subprocess.run({child})"
    head = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE)
    deadline_s = time.monotonic() + 30
    while not (found := session_folders(psutil.Process(head.pid))):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    head.communicate(b"\n")
    assert found == {tmp_path / "session_1"}
