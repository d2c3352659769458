"""Planted faults: an audit names each, and none hides another (rlpipe.store.audit.verification)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from s3fs import S3FileSystem

from rlpipe.errors import ObjectCorrupt, ObjectMissing, StoreError
from rlpipe.store.audit.verification import check_branch, check_store
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.gc import remove
from rlpipe.store.objects.files import Files
from rlpipe.store.objects.local import LocalBackend
from rlpipe.store.parquet.shards import ShardWriter
from rlpipe.store.plans import Plans
from rlpipe.store.receipts import receipt_path
from rlpipe.store.retention import branch_removal
from rlpipe.types import Stage
from tests.store.audit.faulty import FAULTS, UNSEEN, Fault, WholeRun, build
from tests.store.lineage import Run, group
from tools import audit


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all kinds of objects."""
    root = tmp_path_factory.mktemp("sound") / "store"
    build(Files(root))
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    """A copy of that store."""
    return Path(shutil.copytree(sound, tmp_path / "store"))


def test_a_sound_store_has_no_findings_and_no_notes(sound: Path):
    for run in (None, "run", "fork", "sampled"):
        report = check_store(Files(sound), run)
        assert (report.findings, report.notes) == ([], []), run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named(root: Path, fault: Fault):
    expected = fault.plant(root)
    report = check_store(Files(root))
    reported = report.notes if fault.noted else report.findings
    assert any(expected in f"{one.where} {one.problem}" for one in reported), (expected, report)
    assert fault.noted == (not report.findings)


@pytest.mark.parametrize("fault", UNSEEN, ids=lambda fault: fault.name)
def test_a_state_that_a_killed_driver_can_leave_is_no_finding(root: Path, fault: Fault):
    fault.plant(root)
    assert check_store(Files(root)).findings == []


TOGETHER = (
    "a file in the root",
    "a folder in place of a configuration",
    "half a commit",
    "a FIFO in place of a node",
    "a link to a device in place of a checkpoint",
    "a huge sparse configuration",
    "a name that is no UTF-8",
    "a lease of another epoch",
    "a node of nothing",
    "an empty draw",
    "delete a receipt",
    "a gate of an unknown run",
)


def test_no_fault_hides_another(root: Path):
    expected = [fault.plant(root) for fault in FAULTS if fault.name in TOGETHER]
    assert len(expected) == len(TOGETHER)
    for run in (None, "run"):
        reported = [f"{one.where} {one.problem}" for one in check_store(Files(root), run).findings]
        assert [name for name in expected if not any(name in one for one in reported)] == []


def test_an_audit_of_one_run_skips_rows_of_others_and_names_unexplained_objects(root: Path):
    shard = next(iter((root / "data/reward").glob("*/*.parquet")))
    (root / "notes.txt").write_text("garbage")
    shard.write_bytes(shard.read_bytes()[::-1])
    reported = {
        run: [one.where for one in check_store(Files(root), run).findings]
        for run in ("run", "fork", "sampled")
    }
    assert all(any("notes.txt" in where for where in found) for found in reported.values())
    assert sum(any(shard.name in where for where in found) for found in reported.values()) in (
        1,
        2,
    ), "the fork's history is the run's"


def test_a_file_without_read_permission_is_named_and_the_rest_is_checked(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    closed = next(iter((root / "nodes/advantage").glob("*.json")))
    (root / "notes.txt").write_text("garbage")
    opened = LocalBackend._open

    def refuse(self: LocalBackend, path: str) -> BinaryIO:
        if path.endswith(closed.name):
            raise PermissionError(13, "Permission denied", path)
        return opened(self, path)

    monkeypatch.setattr(LocalBackend, "_open", refuse)
    reported = [f"{one.where} {one.problem}" for one in check_store(Files(root)).findings]
    assert any(closed.stem in one and "Permission denied" in one for one in reported) and any(
        "notes.txt" in one for one in reported
    )


def test_a_folder_without_list_permission_is_named(root: Path, monkeypatch: pytest.MonkeyPatch):
    scan = os.scandir

    def refuse(path: str | Path):
        if str(path).endswith("nodes/eval"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    (root / "notes.txt").write_text("garbage")
    reported = [f"{one.where} {one.problem}" for one in check_store(Files(root)).findings]
    assert any(
        "nodes/eval" in one and "cannot be listed (Permission denied)" in one for one in reported
    )
    assert any("notes.txt" in one for one in reported)


def test_an_unreachable_store_is_not_damage(root: Path, monkeypatch: pytest.MonkeyPatch):
    def away(_self: object, path: str) -> object:
        raise StoreError("S3 request failed", where=path)

    monkeypatch.setattr(LocalBackend, "_open", away)
    monkeypatch.setattr(LocalBackend, "stat", away)
    with pytest.raises(StoreError, match="request failed"):
        check_store(Files(root))


@pytest.mark.parametrize("stage", [Stage.ROLLOUT, Stage.REWARD, Stage.ADVANTAGE, Stage.TRAIN])
def test_concurrent_work_of_a_driver_is_no_finding(local_files: Files, stage: Stage):
    run = WholeRun(local_files).start().drive(2)
    held = Epochs(local_files).acquire("run")
    run.epoch = held.number
    run.iterate(stop_after=stage)
    newest = Branches(local_files).newest("run")
    assert newest is not None
    digest = Plans(local_files).write(
        Run(local_files).plan(2, newest.data).model_copy(update={"part": 0})
    )
    ShardWriter(local_files, Plans.groups_prefix(digest), 2).write([group("run:00000008")])
    report = check_store(local_files)
    assert (report.findings, report.notes) == ([], [])
    held.release()


def test_a_removed_run_leaves_notes_until_its_objects_are_collected(local_files: Files):
    WholeRun(local_files).start().drive(2)
    WholeRun(local_files, "other").start().drive(2)
    remove(
        local_files,
        [removal.path for removal in branch_removal(local_files, "other")],
        lambda: None,
    )
    report = check_store(local_files)
    assert report.findings == []
    assert {note.rule for note in report.notes} == {"leftover"}
    assert any("only epochs" in note.problem for note in report.notes)


def test_a_commit_writes_the_missing_receipt_of_the_commit_before(local_files: Files):
    run = Run(local_files).start()
    run.iterate()
    run.iterate()
    local_files.delete(receipt_path("run", 1))
    assert check_branch(local_files, "run") == [], "its driver may have been killed there"
    run.iterate()
    assert local_files.exists(receipt_path("run", 1))


def test_an_early_gate_without_a_seal_is_a_note(local_files: Files):
    Run(local_files).start().iterate()
    local_files.create(
        "gates/run/00000000-0123456789abcdef.json",
        b'{"iteration": 0, "broken": [], "asked": 1.5, "resumed": 2.5}',
    )
    report = check_store(local_files)
    assert report.findings == [] and ["no seal" in note.problem for note in report.notes] == [True]


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
    ],
)
def test_only_regular_files_are_read(tmp_path: Path, make: Callable[[Path], object]):
    make(tmp_path / "odd")
    files = Files(tmp_path)
    for read in (files.read, files.sha256, lambda path: files.get_file(path, tmp_path / "local")):
        with pytest.raises(ObjectCorrupt, match="not a regular file"):
            read("odd")
    assert files.list() == []


@pytest.fixture
def tool(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tools.audit", "verify", "--store", str(root), *words])
        return audit.main()

    return call


def test_the_command_takes_all_runs_or_one(
    root: Path, tool: Callable[..., int], capsys: pytest.CaptureFixture[str]
):
    assert tool() == 0 and f"{root}: nothing is wrong" in capsys.readouterr().out
    (root / "branches/sampled/config.json").write_bytes(b"{")
    os.mkfifo(root / "branches/run/a\nb")
    (root / "nodes/\udcff").write_bytes(b"")
    for words in ((), ("--run", "run"), ("--run", "sampled")):
        assert tool(*words) == 1
        reported = capsys.readouterr().out
        assert (
            "branches/sampled/config.json" in reported
            and "run/a\\nb" in reported
            and "nodes/\\udcff" in reported
        )


@pytest.mark.parametrize(
    "words",
    [("--run", "absent"), ("--run", ""), ("--run", "run@x"), ("--store", "/nowhere/at/all")],
)
def test_wrong_usage_is_exit_code_2(tool: Callable[..., int], words: tuple[str, ...]):
    assert tool(*words) == 2


def test_an_empty_folder_is_not_a_store(tmp_path: Path):
    with pytest.raises(ObjectMissing, match="the store is empty"):
        check_store(Files(tmp_path))


@pytest.mark.integration
def test_faults_on_s3_are_named(s3_root: str, monkeypatch: pytest.MonkeyPatch):
    files = Files(s3_root)
    build(files)
    assert check_store(files).findings == []
    shard = next(path for path in files.list("plans") if path.endswith(".parquet"))
    content = files.read(shard)
    node = files.list("nodes/train")[0]
    for path in (
        shard,
        node,
        files.list("receipts/checkpoint")[0],
        files.list("branches/run/epochs")[0],
    ):
        files.delete(path)
    files.create(shard, content[:-1] + b"0")
    files.create("notes.txt", b"garbage")
    files._backend.create("nodes/a\nb.json", b"x")
    _list_too(files, monkeypatch, "nodes//x.json", "nodes/train/")
    reported = [f"{one.where} {one.problem}" for one in check_store(files).findings]
    for name in (
        shard,
        node.rpartition("/")[2][:64],
        "epochs/00000001",
        "notes.txt",
        "nodes//x.json",
        "nodes/train/",
        "a\\nb",
    ):
        assert any(name in one for one in reported), (name, reported)


def _list_too(files: Files, monkeypatch: pytest.MonkeyPatch, *keys: str) -> None:
    """Add keys to the listing of a store. S3 allows keys with empty parts; the test server renames
    them."""
    backend: Any = files._backend
    listed: Any = S3FileSystem.call_s3
    found = [
        {"Key": backend._prefix + key, "Size": 1, "LastModified": datetime.now(UTC)} for key in keys
    ]

    def call(self: Any, method: str, **arguments: Any) -> Any:
        page = listed(self, method, **arguments)
        if method == "list_objects_v2":
            below = [one for one in found if one["Key"].startswith(arguments["Prefix"])]
            page["Contents"] = [*page.get("Contents", []), *below]
        return page

    monkeypatch.setattr(S3FileSystem, "call_s3", call)
