"""The Prefect server of a run (tools.local_prefect)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rlpipe.errors import ResourceError
from rlpipe.store.holders import ended
from tools import local_prefect as local_prefect_module
from tools.kept_server import KeptServer
from tools.local_prefect import _start, answers, listens, local_prefect, url_of_profile
from tools.prefect_server import POLL, poll_less

LISTENS = (
    "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
    "print(s.getsockname()[1], flush=True); time.sleep(60)"
)


def test_the_process_that_listens_at_a_port_is_recognised():
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        assert listens(os.getpid(), port)
        child = subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            theirs = int(child.stdout.readline())
            assert listens(child.pid, theirs) and not listens(child.pid, port)
            assert listens(os.getpid(), theirs), "what a process has started listens for it"
        finally:
            child.kill()
            child.wait()
        assert not listens(child.pid, theirs)
    assert not listens(os.getpid(), port)


PROFILES = """active = "mine"
[profiles.ephemeral]
PREFECT_SERVER_ALLOW_EPHEMERAL_MODE = "true"
[profiles.mine]
PREFECT_API_URL = "http://10.0.0.1:4200/api"
"""


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prefect profiles. The active one names a server."""
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    (tmp_path / "prefect").mkdir()
    path = tmp_path / "prefect" / "profiles.toml"
    path.write_text(PROFILES)
    return path


def test_the_server_of_the_active_profile_is_used(
    profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tools.local_prefect.keep_caches_in", lambda _: None)
    monkeypatch.setattr("tools.local_prefect.SETTINGS", {})
    monkeypatch.setattr("tools.local_prefect.check_reachable", lambda _: None)
    with local_prefect(tmp_path / "home") as url:
        assert url == "http://10.0.0.1:4200/api"
        assert os.environ["PREFECT_HOME"] == str(profiles.parent), (
            "where Prefect reads the same profile"
        )


def test_a_profile_without_a_server_gives_no_url(profiles: Path, monkeypatch: pytest.MonkeyPatch):
    assert url_of_profile() == "http://10.0.0.1:4200/api"
    monkeypatch.setenv("PREFECT_PROFILE", "ephemeral")
    assert url_of_profile() is None
    monkeypatch.delenv("PREFECT_PROFILE")
    for unlike in (
        "active = [",
        "profiles = 1",
        "active = []",
        'active = "mine"\nprofiles.mine.PREFECT_API_URL = 4',
    ):
        profiles.write_text(unlike)
        assert url_of_profile() is None
    profiles.unlink()
    assert url_of_profile() is None


def test_prefect_reads_the_same_url_from_a_profile(profiles: Path):
    code = (
        "from prefect.settings import get_current_settings; print(get_current_settings().api.url)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == url_of_profile()


def test_an_unreachable_configured_server_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tools.local_prefect.keep_caches_in", lambda _: None)
    monkeypatch.setattr("tools.local_prefect.SETTINGS", {})
    for url in ("http://127.0.0.1:9/api", "http://nowhere.invalid/api", "nowhere"):
        monkeypatch.setenv("PREFECT_API_URL", url)
        with (
            pytest.raises(
                ResourceError,
                match=f"PREFECT_API_URL: the configured Prefect server does not answer(.|\n)*{url}",
            ),
            local_prefect(tmp_path),
        ):
            pass
    with socket.create_server(("127.0.0.1", 0)) as server:
        for who, output in (
            ("", b"HTTP/1.0 401 Unauthorized\r\n\r\n"),
            ("me:secret@", b"SSH-2.0-OpenSSH\r\n"),
        ):
            monkeypatch.setenv(
                "PREFECT_API_URL", f"http://{who}127.0.0.1:{server.getsockname()[1]}/api"
            )
            answering = threading.Thread(target=_answer, args=(server, output))
            answering.start()
            with local_prefect(
                tmp_path
            ):  # who is not let in, or does not understand, has reached it
                answering.join()
    with (
        pytest.raises(ResourceError, match=r"http://127\.0\.0\.1:\d+/api: ") as raised,
        local_prefect(tmp_path),
    ):
        pass
    assert "secret" not in str(raised.value)


def _answer(server: socket.socket, what: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(what)


def test_the_worker_of_the_background_services_polls_less(monkeypatch: pytest.MonkeyPatch):
    # Prefect reads its settings at import, and other tests of this file set them.
    from docket import Docket

    workers: Any = import_module("prefect.server.api.background_workers")
    monkeypatch.setattr(workers, "Worker", workers.Worker)
    poll_less()
    worker = workers.Worker(Docket(url="memory://"))
    assert worker.minimum_check_interval == worker.scheduling_resolution == POLL


def test_the_server_of_a_run_has_no_services_for_deployments_unless_the_user_sets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, *, env, **_: environments.append(env) or command
    )
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_FOREMAN_ENABLED", "true")
    monkeypatch.delenv("PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED", raising=False)
    _start(tmp_path, "http://127.0.0.1:1", ["1"])
    assert environments[0]["PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED"] == "false"
    assert environments[0]["PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED"] == "false"
    assert environments[0]["PREFECT_SERVER_SERVICES_FOREMAN_ENABLED"] == "true"


TWICE = """
import sys
from pathlib import Path
from tools.local_prefect import local_prefect
with local_prefect(Path(sys.argv[1])) as url:
    print(url)
"""


@pytest.mark.integration
def test_the_next_run_of_a_home_uses_the_same_server_and_other_settings_replace_it(tmp_path: Path):
    environment = {**os.environ, "RLPIPE_PREFECT_IDLE_S": "100"}
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        environment.pop(name, None)
    environment["PREFECT_HOME"] = str(tmp_path / "no_profile")

    def run(**also: str) -> tuple[str, dict[str, Any]]:
        url = subprocess.run(
            [sys.executable, "-c", TWICE, str(tmp_path)],
            env={**environment, **also},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
        assert answers(f"{url}/health"), "the server stays"
        return url, json.loads(record.read_text())

    kept = KeptServer.of_home(tmp_path)
    assert kept is not None
    record = kept.path.with_suffix(".json")
    try:
        first = run()
        assert run() == first
        _, second = run(PREFECT_SERVER_LOGGING_LEVEL="ERROR")
        earlier = first[1]
        assert second["pid"] != earlier["pid"]
        # It may be a zombie: its parent has ended, and init reaps it at a time of its own.
        assert ended(earlier["pid"], earlier["started"])
    finally:
        assert kept.end()
    assert not kept.running


def test_a_server_whose_port_another_server_took_gets_another_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other server is still starting: it listens, but answers nothing yet."""
    started: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = iter([taken])  # free when the server chose it
        free = local_prefect_module.free_port
        monkeypatch.setattr(
            local_prefect_module, "free_port", lambda preferred: next(ports, free(preferred))
        )
        monkeypatch.setattr(
            local_prefect_module, "_start", lambda _folder, url, _life: started.append(url)
        )
        monkeypatch.setattr(
            local_prefect_module, "_wait", lambda _server, url: not url.endswith(f":{taken}")
        )
        monkeypatch.setattr(local_prefect_module, "_end", lambda _server: None)
        monkeypatch.setenv("PREFECT_API_URL", "")
        _, url = local_prefect_module.start_server(
            tmp_path, [], lambda: started.append("meanwhile")
        )
    assert started == [f"http://127.0.0.1:{taken}", "meanwhile", url, "meanwhile"]
    assert not url.endswith(f":{taken}")
