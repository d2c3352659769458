"""The Prefect server that stays after a run (tools.kept_server)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlpipe.errors import ConfigError
from rlpipe.system import leftovers
from tools.kept_server import KeptServer, idle_s

SERVER = """
import sys, time
from pathlib import Path
from tools import kept_server
kept_server.POLL_S = 0.02
kept_server.end_when_unused(Path(sys.argv[1]), float(sys.argv[2]))
print("runs", flush=True)
time.sleep(300)
"""
USER = """
import sys, time
from pathlib import Path
from tools.kept_server import KeptServer
kept = KeptServer(Path(sys.argv[1]))
kept.use()
print("uses", flush=True)
time.sleep(300)
"""
ENDS_WITHIN_S = 60.0

Program = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def program() -> Iterator[Program]:
    """Start a program in a session of its own; return once it has printed a line."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *words: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_server_is_found_by_its_settings_while_it_runs(tmp_path: Path, program: Program):
    kept = KeptServer(tmp_path / "prefect-1")
    assert kept.find("a") is None and not kept.running
    process = program("import time; print('runs', flush=True); time.sleep(300)")
    kept.keep(process.pid, "http://127.0.0.1:1", "a")
    assert kept.find("a") == "http://127.0.0.1:1"
    assert kept.find("b") is None and kept.running
    process.kill()
    process.wait()
    assert kept.find("a") is None and not kept.running


def test_a_damaged_record_is_no_server(tmp_path: Path):
    kept = KeptServer(tmp_path / "prefect-1")
    for text in ("", "[]", "{}", '{"pid": "x", "pid_space": 1, "started": 2}'):
        (tmp_path / "prefect-1.json").write_text(text)
        assert kept.find("a") is None
        assert kept.end()


def test_a_server_ends_after_its_last_user_has_been_killed(tmp_path: Path, program: Program):
    kept = KeptServer(tmp_path / "prefect-1")
    first, second = (program(USER, kept.path) for _ in range(2))
    server = program(SERVER, kept.path, 0.3)
    kept.keep(server.pid, "http://127.0.0.1:1", "a")
    first.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(timeout=2)
    second.kill()
    server.wait(timeout=ENDS_WITHIN_S)
    assert not (tmp_path / "prefect-1.json").exists()


def test_a_server_without_a_user_stays_for_its_time(tmp_path: Path, program: Program):
    started_s = time.monotonic()
    program(SERVER, tmp_path / "prefect-1", 1.0).wait(timeout=ENDS_WITHIN_S)
    assert time.monotonic() - started_s >= 1.0


def test_only_an_unused_server_is_ended(tmp_path: Path, program: Program):
    kept = KeptServer(tmp_path / "prefect-1")
    user = program(USER, kept.path)
    server = program(SERVER, kept.path, 300)
    kept.keep(server.pid, "http://127.0.0.1:1", "a")
    assert not kept.end()
    assert server.poll() is None
    user.kill()
    user.wait()
    assert kept.end()
    server.wait(timeout=ENDS_WITHIN_S)
    assert not kept.running


def test_the_watch_of_a_killed_server_ends_too(tmp_path: Path, program: Program):
    server = program(SERVER, tmp_path / "prefect-1", 300)
    server.kill()
    server.wait()
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while _group_exists(server.pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _group_exists(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def test_each_home_has_its_own_record_and_other_users_cannot_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leftovers, "FOLDER", str(tmp_path / "private"))
    one, two = (KeptServer.of_home(tmp_path / name) for name in ("one", "two"))
    assert one is not None and two is not None
    assert one.path.parent == tmp_path / "private"
    assert one.path != two.path
    (tmp_path / "private").chmod(0o777)
    assert KeptServer.of_home(tmp_path / "one") is None


def test_the_time_without_a_run_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RLPIPE_PREFECT_IDLE_S")
    assert idle_s() == 300
    monkeypatch.setenv("RLPIPE_PREFECT_IDLE_S", "0")
    assert idle_s() == 0
    for wrong in ("", "-1", "soon", "inf", "nan"):
        monkeypatch.setenv("RLPIPE_PREFECT_IDLE_S", wrong)
        with pytest.raises(ConfigError, match="RLPIPE_PREFECT_IDLE_S"):
            idle_s()
