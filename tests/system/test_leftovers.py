"""Files of processes that have ended (rlpipe.system.leftovers)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpipe.system import leftovers


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records of this test alone."""
    folder = tmp_path / "records"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(leftovers, "private_folder", lambda: folder)
    return folder


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until it is killed."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_files_of_a_process_are_removed_after_its_end_and_no_others(records, process, tmp_path):
    mine, folder, other = tmp_path / "shm_1_a", tmp_path / "session", tmp_path / "shm_2_a"
    for path in (mine, other):
        path.touch()
    (folder / "logs").mkdir(parents=True)
    leftovers.record(process.pid, f"{tmp_path}/shm_1_*")
    leftovers.record(process.pid, folder)
    leftovers.sweep()
    assert mine.exists() and folder.exists()
    process.kill()
    process.wait()
    leftovers.sweep()
    assert not mine.exists() and not folder.exists()
    assert other.exists()
    assert list(records.iterdir()) == []


def test_a_process_that_has_ended_but_is_not_awaited_counts_as_ended(records, process, tmp_path):
    (tmp_path / "socket").touch()
    leftovers.record(process.pid, tmp_path / "socket")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    leftovers.sweep()
    assert not (tmp_path / "socket").exists()


def test_a_later_process_with_the_same_pid_keeps_no_files_of_the_earlier_one(records, tmp_path):
    (tmp_path / "old").touch()
    namespace, pid = leftovers._namespace(), os.getpid()
    (records / f"{namespace}-{pid}-1.json").write_text(json.dumps([str(tmp_path / "old")]))
    leftovers.sweep()
    assert not (tmp_path / "old").exists()


def test_processes_of_another_pid_namespace_are_not_judged(records, tmp_path):
    (tmp_path / "theirs").touch()
    (records / "1-999999999-1.json").write_text(json.dumps([str(tmp_path / "theirs")]))
    leftovers.sweep()
    assert (tmp_path / "theirs").exists()


def test_remove_takes_the_files_of_the_given_processes(records, process, tmp_path):
    (tmp_path / "a").touch()
    leftovers.record(process.pid, tmp_path / "a")
    leftovers.remove(process.pid + 1)
    assert (tmp_path / "a").exists()
    leftovers.remove(process.pid)
    assert not (tmp_path / "a").exists()


def test_a_link_is_removed_and_its_target_stays(records, process, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    leftovers.record(process.pid, tmp_path / "link")
    leftovers.remove(process.pid)
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").exists()


def test_mapped_shared_memory_of_a_killed_process_is_removed(records):
    source = """
import mmap, os
path = f"/dev/shm/rlpipe_test_{os.getpid()}"
file = open(path, "w+b")
file.truncate(4096)
memory = mmap.mmap(file.fileno(), 4096)
print(path, flush=True)
input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    leftovers.record_shared_memory([process.pid, 999_999_999])
    process.kill()
    process.communicate()
    assert path.exists()
    leftovers.sweep()
    assert not path.exists()


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_records_in_a_folder_that_others_can_write_are_ignored(tmp_path, monkeypatch, mode):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setattr(leftovers, "FOLDER", str(folder))
    leftovers.record(os.getpid(), tmp_path / "a")
    assert list(folder.iterdir()) == []
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    monkeypatch.setattr(leftovers, "FOLDER", str(link))
    assert leftovers.private_folder() is None
