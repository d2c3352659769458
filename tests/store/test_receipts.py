"""Receipts of commits: the audit names a lost commit, but not one that never existed
(rlpipe.store.receipts)."""

from __future__ import annotations

import pytest

from rlpipe.errors import ObjectConflict, ObjectCorrupt, StoreError
from rlpipe.store.audit.findings import Finding
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.gc import unreachable
from rlpipe.store.objects.files import Files
from rlpipe.store.receipts import Receipt, Receipts, receipt_path
from rlpipe.store.tables import scalars
from rlpipe.types import Stage
from tests.store.lineage import Run


def a_run(files: Files, iterations: int = 3) -> Run:
    run = Run(files).start()
    for _ in range(iterations):
        run.iterate()
    return run


def commit_path(k: int, branch: str = "run") -> str:
    return f"branches/{branch}/{k:08d}.json"


def found(files: Files, branch: str = "run") -> list[tuple[str, str]]:
    return [(finding.rule, finding.where) for finding in check_branch(files, branch)]


def test_lost_newest_commits_are_named(files: Files):
    a_run(files)
    files.delete(commit_path(2))
    assert check_branch(files, "run") == [
        Finding(
            "records",
            "run/00000002",
            "its commit is gone: a receipt or the tables of the run show that it was committed",
        )
    ]
    files.delete(commit_path(1))
    assert found(files) == [("records", "run/00000001"), ("records", "run/00000002")]
    files.delete(commit_path(0))
    assert found(files) == [("records", f"run/0000000{k}") for k in range(3)]


def test_a_fork_without_its_only_commit_is_named_and_its_parent_has_no_findings(local_files: Files):
    a_run(local_files)
    Run(local_files, "fork").start(parent="run/00000001").iterate()
    local_files.delete(commit_path(2, "fork"))
    assert found(local_files, "fork") == [("records", "fork/00000002")]
    assert found(local_files) == []


def test_tables_show_a_lost_commit_without_a_receipt(local_files: Files):
    a_run(local_files)
    scalars.update(local_files, "run")
    for path in (commit_path(2), receipt_path("run", 2)):
        local_files.delete(path)
    findings = check_branch(local_files, "run")
    assert [one.where for one in findings if one.rule == "records"] == ["run/00000002"]
    assert {one.rule for one in findings} == {"records", "tables"}


@pytest.mark.parametrize(
    "name", ["00000000-00000009-{}", "00000000-99999999-{}", "00000000-00000009-0123456789abcdef"]
)
def test_table_names_with_too_many_iterations_are_no_evidence_of_commits(
    local_files: Files, name: str
):
    a_run(local_files)
    scalars.update(local_files, "run")
    (path,) = local_files.list("branches/run/scalars/samples")
    copy = name.format(path[-24:-8])
    local_files.create(f"branches/run/scalars/samples/{copy}.parquet", local_files.read(path))
    assert {one.rule for one in check_branch(local_files, "run")} <= {"tables"}
    theirs = path.replace("/run/", "/fork/")
    Run(local_files, "fork").start(parent="run/00000000")
    local_files.create(theirs, local_files.read(path))
    assert {one.rule for one in check_branch(local_files, "fork")} == {"tables"}


@pytest.mark.parametrize("stage", [Stage.ROLLOUT, Stage.TRAIN])
def test_an_iteration_that_was_killed_before_its_commit_is_no_finding(
    local_files: Files, stage: Stage
):
    run = a_run(local_files)
    run.iterate(stop_after=stage)
    assert check_branch(local_files, "run") == [] and unreachable(local_files, grace_s=-60) == []


@pytest.mark.parametrize("committed", [True, False])
def test_a_driver_that_was_killed_around_a_commit_leaves_no_finding(
    local_files: Files, monkeypatch: pytest.MonkeyPatch, committed: bool
):
    run = a_run(local_files)
    create = Files.create

    def killed(self: Files, path: str, data: bytes) -> bool:
        if path == (receipt_path("run", 3) if committed else commit_path(3)):
            raise StoreError("killed", where=path)
        return create(self, path, data)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "create", killed)
        with pytest.raises(StoreError, match="killed"):
            run.iterate()
    assert local_files.exists(commit_path(3)) is committed and not local_files.exists(
        receipt_path("run", 3)
    )
    assert check_branch(local_files, "run") == []
    run.iterate()
    assert (
        Branches(local_files).committed("run")[-1] == 3 + committed
        and check_branch(local_files, "run") == []
    )


def test_an_equal_commit_writes_the_missing_receipt(local_files: Files):
    a_run(local_files)
    local_files.delete(receipt_path("run", 2))
    branches = Branches(local_files)
    branches.commit(branches.read("run", 2).model_copy(update={"attempt": "later", "created": ""}))
    assert Receipts(local_files).find("run", 2) == Receipt.of(branches.read("run", 2))


def test_a_lost_commit_can_be_committed_again_with_an_equal_result(local_files: Files):
    run = a_run(local_files)
    local_files.delete(commit_path(2))
    assert run.iterate() is not None, "its nodes exist"
    run.iterate()
    assert check_branch(local_files, "run") == []


def test_a_lost_commit_cannot_be_replaced_by_another_result(local_files: Files):
    a_run(local_files)
    branches = Branches(local_files)
    other = branches.read("run", 2).model_copy(
        update={"trained": ("another",), "attempt": "", "created": ""}
    )
    local_files.delete(commit_path(2))
    with pytest.raises(
        ObjectConflict, match="committed before with another result, and that commit is gone"
    ) as caught:
        branches.commit(other)
    assert receipt_path("run", 2) in str(caught.value) and not local_files.exists(commit_path(2))
    local_files.delete(receipt_path("run", 2))
    assert branches.commit(other).trained == ("another",)


def test_a_commit_that_replaced_another_is_named(local_files: Files):
    a_run(local_files)
    theirs = local_files.read(receipt_path("run", 2))
    branches = Branches(local_files)
    other = branches.read("run", 2).model_copy(
        update={"config_digest": "1" * 64, "attempt": "", "created": ""}
    )
    for path in (commit_path(2), receipt_path("run", 2)):
        local_files.delete(path)
    branches.commit(other)
    local_files.delete(receipt_path("run", 2))
    local_files.create(receipt_path("run", 2), theirs)
    assert [(one.where, one.problem) for one in check_branch(local_files, "run")] == [
        ("run/00000002", "another commit was here before: its receipt does not match this commit")
    ]


def test_a_receipt_of_another_iteration_is_corrupt(local_files: Files):
    a_run(local_files)
    local_files.create(receipt_path("run", 7), local_files.read(receipt_path("run", 2)))
    with pytest.raises(ObjectCorrupt, match="the receipt belongs to another record"):
        Receipts(local_files).find("run", 7)
