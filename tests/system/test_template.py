"""A process that is forked from a template is as one that was started (rlpipe.system.template)."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from rlpipe.system import forked
from rlpipe.system.forked import ForkedProcess, fork
from rlpipe.system.template import ROOM

SERVED = """
import sys, threading, time
from pathlib import Path
from rlpipe.system.template import Template, listening
began_s = time.time()
listener = listening(Path(f"{sys.argv[1]}-cheap"))
another = listener.dup()  # as the process has that watches a template
import numpy.random, program
if sys.argv[2] == "thread":
    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
template = Template(listener, began_s)
print("serves", flush=True)
if sys.argv[2] == "late":
    time.sleep(2)
sys.exit(template.serve().run())
"""
PROGRAM = """
import ctypes, json, os, resource, signal, sys, time
import numpy
def main(arguments):
    if arguments[0] == "sleep":
        print("sleeps", flush=True)
        time.sleep(300)
    own = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    own |= {"path": sys.path, "mask": os.umask(0), "main": sys.modules["__main__"].__name__}
    own |= {"leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()]}
    own |= {"limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    own |= {"blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))}
    own |= {"ignored": signal.getsignal(signal.SIGHUP) == signal.SIG_IGN}
    paths = [line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line]
    own |= {"threads": ctypes.CDLL(paths[0]).scipy_openblas_get_num_threads64_()}
    own |= {"number": numpy.random.random(), "files": len(os.listdir("/proc/self/fd"))}
    print(json.dumps(own), flush=True)
    return int(arguments[0])
"""
CLIENT = """
import os, sys, time
from rlpipe.system.forked import fork
nothing = os.open(os.devnull, os.O_RDWR)
streams = (nothing, nothing, nothing)
process = fork("cheap", "program", ["sleep"], environment={}, streams=streams, leads_session=True)
print(process.pid, flush=True)
time.sleep(300)
"""
ENDS_WITHIN_S = 30.0


@pytest.fixture
def template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a template of a cheap program."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv(forked.VARIABLE, str(tmp_path / "t"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def start(kind: str = "") -> subprocess.Popen[str]:
        paths = os.pathsep.join([str(Path(forked.__file__).parents[2]), str(tmp_path)])
        process = subprocess.Popen(
            [sys.executable, "-c", SERVED, str(tmp_path / "t"), kind, " " * 500],
            env={**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", **ROOM},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "serves\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def run(
    output: Path,
    *arguments: str,
    leads_session: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> ForkedProcess | None:
    """Start the cheap program from the template, with its output in a file."""
    with output.open("wb") as file, Path(os.devnull).open("rb") as nothing:
        return fork(
            "cheap",
            "program",
            list(arguments),
            environment={"PATH": "/bin", **variables},
            streams=(nothing.fileno(), file.fileno(), file.fileno()),
            leads_session=leads_session,
        )


def sleeping(output: Path, raylet: str = "") -> ForkedProcess:
    """Start a forked process that sleeps."""
    process = run(output, "sleep", variables={"RAY_RAYLET_PID": raylet})
    assert process is not None
    wait_until(lambda: output.read_text() == "sleeps\n")
    return process


@contextmanager
def changed_limits() -> Iterator[None]:
    """Give this process 200 open files, a blocked and an ignored signal."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGHUP, handler)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def wait_until(reached: Callable[[], bool]) -> None:
    end_s = time.monotonic() + ENDS_WITHIN_S
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_forked_process_has_what_its_client_gives_it(tmp_path: Path, template):
    template()
    with changed_limits():
        process = run(
            tmp_path / "out", "3", "--two", leads_session=True, variables={"TMPDIR": "/x"}
        )
    assert process is not None
    assert process.wait() == process.poll() == process.returncode == 3
    own = json.loads((tmp_path / "out").read_text())
    assert own["arguments"] == ["3", "--two"]
    assert own["environment"] == {"PATH": "/bin", "TMPDIR": "/x"}
    assert own["folder"] == str(Path.cwd()) and own["path"] == sys.path
    assert own["leads"] == [True, True] and own["main"] == "program"
    mask = os.umask(0)
    os.umask(mask)
    assert own["mask"] == mask
    assert (own["limit"], own["blocked"], own["ignored"]) == (200, [signal.SIGUSR1], True)
    # Besides the standard streams: `another`, and the list of files itself.
    assert own["files"] == 5


def test_forked_processes_draw_different_random_numbers(tmp_path: Path, template):
    template()
    numbers = set()
    for number in range(3):
        process = run(tmp_path / "out", str(number))
        assert process is not None and process.wait() == number
        own = json.loads((tmp_path / "out").read_text())
        assert own["leads"] == [True, False]
        numbers.add(own["number"])
    assert len(numbers) == 3


def test_lists_of_processes_show_the_environment_of_a_forked_process(tmp_path: Path, template):
    template()
    process = sleeping(tmp_path / "out", "4711")
    assert psutil.Process(process.pid).environ() == {"PATH": "/bin", "RAY_RAYLET_PID": "4711"}
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, len(os.sched_getaffinity(0))),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "5"}, 5),
        ({"OPENBLAS_NUM_THREADS": "many", "OMP_NUM_THREADS": "4"}, 4),
    ],
)
def test_libraries_have_the_threads_of_the_environment(
    tmp_path: Path, template, variables: dict[str, str], threads: int
):
    template()
    process = run(tmp_path / "out", "0", variables=variables)
    assert process is not None and process.wait() == 0
    assert json.loads((tmp_path / "out").read_text())["threads"] == threads


def test_a_template_with_a_changed_file_or_a_thread_is_not_used(tmp_path: Path, template):
    template("thread")
    assert run(tmp_path / "out", "0") is None
    served = template()
    before = sleeping(tmp_path / "before")
    (tmp_path / "program.py").write_text(PROGRAM.replace("300", "200"))
    began_s = time.monotonic()
    assert run(tmp_path / "out", "0") is None
    assert run(tmp_path / "out", "0") is None
    assert time.monotonic() - began_s < forked.ANSWER_TIMEOUT_S
    # It stays for the processes that it has forked.
    assert served.poll() is None and before.poll() is None
    os.kill(before.pid, signal.SIGTERM)
    assert before.wait() == -signal.SIGTERM
    assert served.wait(ENDS_WITHIN_S) == 0


def test_without_a_template_nothing_is_forked(tmp_path: Path, template, monkeypatch):
    assert run(tmp_path / "out", "0") is None
    served = template()
    served.kill()
    served.wait()
    assert run(tmp_path / "out", "0") is None
    monkeypatch.delenv(forked.VARIABLE)
    assert run(tmp_path / "out", "0") is None


def test_a_template_forks_nothing_for_a_client_that_has_stopped_waiting(
    tmp_path: Path, template, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(forked, "ANSWER_TIMEOUT_S", 0.1)
    served = template("late")
    assert run(tmp_path / "late", "sleep") is None
    monkeypatch.setattr(forked, "ANSWER_TIMEOUT_S", ENDS_WITHIN_S)
    process = sleeping(tmp_path / "out")
    assert len(psutil.Process(served.pid).children()) == 1
    assert not (tmp_path / "late").read_text()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_a_forked_process_outlives_its_template(tmp_path: Path, template):
    served = template()
    process = sleeping(tmp_path / "out")
    served.kill()
    served.wait()
    assert process.poll() is None and process.wait(0.05) is None
    os.kill(process.pid, signal.SIGTERM)
    # Only its parent would know the signal.
    assert process.wait(ENDS_WITHIN_S) == -signal.SIGKILL


def test_a_server_ends_with_its_killed_client(tmp_path: Path, template):
    template()
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    server = psutil.Process(int(client.stdout.readline()))
    client.kill()
    client.wait()
    server.wait(ENDS_WITHIN_S)
