"""The doctor command: each check finds the fault that it is for (tools.doctor)."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path

import pytest

from rlpipe.config.load import load_run
from rlpipe.store.objects.local import LocalBackend
from tools import doctor
from tools.doctor import NOT_OK, NOTE, OK, Line
from tools.local_servers import LocalServers

SMI = """#!/bin/sh
case "$1" in
--query-gpu*) printf '%s\\n' "0, NVIDIA H100, 81559, {used}, 550.54" ;;
*) echo "| NVIDIA-SMI 550.54  Driver Version: 550.54  CUDA Version: {cuda} |" ;;
esac
"""


def states(lines: list[Line]) -> dict[str, str]:
    """Return name → state."""
    return {line.name: line.state for line in lines}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the first entry of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def write_nvidia_smi(folder: Path, *, used: int, cuda: str) -> None:
    file = folder / "nvidia-smi"
    file.write_text(SMI.format(used=used, cuda=cuda))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_the_packages_of_this_environment_are_those_that_were_tested_together():
    lines = list(doctor.packages())
    assert {line.state for line in lines} == {OK}
    assert {"torch", "sglang", "ray", "mbridge"} <= states(lines).keys()


def test_another_version_and_a_missing_package_are_not_ok(monkeypatch: pytest.MonkeyPatch):
    tested = {"ray": "1.0", "nothing-of-this-name": "2.0", "torch": version("torch").split("+")[0]}
    monkeypatch.setattr(doctor, "tested_versions", lambda _: tested)
    monkeypatch.setattr(doctor, "required_packages", lambda: list(tested))
    found = list(doctor.packages())
    assert states(found)["ray"] == states(found)["nothing-of-this-name"] == NOT_OK
    assert states(found)["torch"] == OK
    assert "tested: 1.0" in str(found[0]) and "make setup" in str(found[0])


def test_a_machine_without_gpus_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states(list(doctor.gpus())) == {"GPUs": NOTE}


@pytest.mark.parametrize(
    ("torch_cuda", "driver_cuda", "used", "gpu", "cuda"),
    [
        ("12.8", "12.8", 4, OK, OK),
        ("12.8", "13.0", 4, OK, OK),
        ("13.0", "12.8", 4, OK, NOT_OK),
        (None, "12.8", 4, OK, NOT_OK),
        ("12.8", "12.8", 60000, NOT_OK, OK),
    ],
)
def test_a_used_gpu_an_old_driver_and_a_torch_for_cpus_are_not_ok(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    torch_cuda: str | None,
    driver_cuda: str,
    used: int,
    gpu: str,
    cuda: str,
):
    write_nvidia_smi(path, used=used, cuda=driver_cuda)
    monkeypatch.setattr(doctor, "cuda_of_torch", lambda: torch_cuda)
    assert states(list(doctor.gpus())) == {"GPU 0": gpu, "CUDA": cuda}


def test_the_cuda_version_of_torch_is_read_without_its_import():
    assert (doctor.cuda_of_torch() is None) == ("cpu" in version("torch"))


def test_full_disks_and_small_shared_memory_are_not_ok(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage(10**9, 9 * 10**8, 10**8))
    found = states(list(doctor.memory(tmp_path / "runs")))
    assert [found[name] for name in ("/dev/shm", "disk of runs", "disk of Ray")] == [NOT_OK] * 3
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda _: usage(10**12, 97 * 10**10, 3 * 10**10)
    )
    found = states(list(doctor.memory(tmp_path / "runs")))
    assert found["disk of runs"] == NOT_OK, "Ray needs 5% free"
    assert found["/dev/shm"] == OK


def test_a_low_limit_of_open_files_is_not_ok(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 1024))
    (line,) = doctor.limits()
    assert line.state == NOT_OK and "ulimit -n" in line.do


def test_a_port_of_another_program_is_noted(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {"Prefect": 1, "Ray": port})
        monkeypatch.setattr(doctor, "is_free", lambda host, number: number == 1)
        assert states(list(doctor.ports())) == {"port 1": OK, f"port {port}": NOTE}


def test_a_prefect_server_that_does_not_answer_is_not_ok(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    (line,) = doctor.prefect_server()
    assert line.state == NOT_OK and "prefect server start" in str(line)


def test_running_servers_that_the_shell_does_not_use_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert list(doctor.servers_of_up(tmp_path)) == []
    assert list(tmp_path.iterdir()) == [], "no trace is left"
    servers = LocalServers(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert list(doctor.servers_of_up(tmp_path)) == []
    servers.keep("prefect", os.getpid(), [4200])
    (line,) = doctor.servers_of_up(tmp_path)
    assert line.state == NOTE and line.do == f". {tmp_path}/.up/env"
    for name, value in servers.environment.items():
        monkeypatch.setenv(name, value)
    assert list(doctor.servers_of_up(tmp_path)) == []


def test_a_store_must_be_writable_and_keep_the_first_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert doctor.store(f"{tmp_path}/new/store").state == OK
    assert list(tmp_path.iterdir()) == [], "no trace is left"
    taken = tmp_path / "file"
    taken.touch()
    assert doctor.store(f"{taken}/store").state == NOT_OK
    monkeypatch.setattr(LocalBackend, "create", lambda *_: True)
    line = doctor.store(f"file://{tmp_path}/new")
    assert line.state == NOT_OK and "replaces objects" in line.found


def test_a_recipe_with_a_missing_file_is_not_ok(tmp_path: Path):
    config = load_run("spell_backward", ["run=x", "data.prompts={type: file, paths: [no.jsonl]}"])
    line = doctor.recipe(config, tmp_path)
    assert line.state == NOT_OK and "no.jsonl" in line.found


def test_all_missing_files_of_a_recipe_are_named():
    missing = ["data.prompts={type: file, paths: [no.jsonl, nor.jsonl]}"]
    line = doctor.missing_files("spell_backward", missing)
    assert line is not None and line.state == NOT_OK
    assert "no no.jsonl in" in line.found and "no nor.jsonl in" in line.found
    assert doctor.missing_files("spell_backward", []) is None


@pytest.mark.parametrize(("state", "code"), [(OK, 0), (NOTE, 0), (NOT_OK, 1)])
def test_the_exit_code_is_1_if_something_is_not_ok(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, code: int
):
    monkeypatch.setattr(
        doctor, "lines", lambda *_: iter([Line(state, "thing", "found", "mend it")])
    )
    monkeypatch.setattr(sys, "argv", ["rlpipe doctor"])
    assert doctor.main() == code
    assert capsys.readouterr().out.startswith(f"{state:<6}  thing")


def test_an_unknown_recipe_gives_exit_code_2(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["rlpipe doctor", "no_such"])
    assert doctor.main() == 2
