"""Branches: commits without gaps, written once; forks; races between drivers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rlpipe.errors import ObjectConflict, ObjectMissing, StoreError
from rlpipe.store.branches import Branches, commit_name, parse_commit_name
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, DataState, Stage


def commit(
    iteration: int, branch: str = "run", parent: str | None = "", **changes: object
) -> Commit:
    """Return a commit; by default its parent is the commit before on its branch."""
    if parent == "":
        parent = commit_name(branch, iteration - 1) if iteration else None
    content = {
        "plans": ("p",),
        "nodes": {Stage.TRAIN: f"t{iteration}"},
        "data": DataState(draws=iteration),
        "config_digest": "c",
    }
    return Commit(branch=branch, iteration=iteration, parent=parent, **{**content, **changes})


def started(files: Files, iterations: int, branch: str = "run") -> Branches:
    branches = Branches(files)
    branches.create(branch, {"lr": 1e-6}, "init")
    for iteration in range(iterations):
        branches.commit(commit(iteration, branch))
    return branches


def test_a_branch_starts_empty_and_grows(files: Files):
    branches = started(files, 0)
    assert branches.newest("run") is None
    assert [branches.commit(commit(k)).iteration for k in range(3)] == [0, 1, 2]
    assert branches.config("run") == {"lr": 1e-6}
    newest = Branches(files).newest("run")
    assert newest == branches.read("run", 2)
    assert [c.iteration for c in branches.walk("run")] == [2, 1, 0]
    assert branches.names() == ["run"]


def test_the_newest_commit_is_found_from_a_hint_without_a_listing(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    branches = started(local_files, 4)
    monkeypatch.setattr(Files, "entries", None)
    for hint in range(4):
        newest = branches.newest("run", after=hint)
        assert newest is not None
        assert newest.iteration == 3
    with pytest.raises(ObjectMissing):
        branches.newest("run", after=4)


def test_a_branch_is_created_once_and_found_again(files: Files):
    branches = Branches(files)
    assert branches.find("run") is None
    first = branches.create("run", {"lr": 1e-6}, "init")
    assert Branches(files).create("run", {"lr": 1e-6}, "init") == first
    for config, init in (({"lr": 1e-5}, "init"), ({"lr": 1e-6}, "other")):
        with pytest.raises(ObjectConflict, match=r"another configuration or start"):
            Branches(files).create("run", config, init)
    assert Branches(files).find("run") == first


def test_a_missing_branch_is_named_in_the_error(local_files: Files):
    for attempt in (
        Branches(local_files).newest,
        Branches(local_files).config,
        lambda b: list(Branches(local_files).walk(b)),
    ):
        with pytest.raises(ObjectMissing, match=r"branches/absent/config\.json"):
            attempt("absent")


def test_committing_an_equal_result_again_succeeds(files: Files):
    branches = started(files, 1)
    again = Branches(files).commit(
        commit(0).model_copy(update={"attempt": "second", "epoch": 2, "packages": {"torch": "2"}})
    )
    assert again == branches.read("run", 0)
    assert again.attempt != "second"


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": {Stage.TRAIN: "x"}},
        {"trained": ("g",)},
        {"data": DataState(draws=9)},
        {"plans": ("q",)},
    ],
)
def test_committing_another_result_is_refused(files: Files, change: dict):
    branches = started(files, 1)
    with pytest.raises(ObjectConflict, match="another driver committed") as caught:
        branches.commit(commit(0, **change))
    assert str(list(change)) in str(caught.value)
    assert branches.read("run", 0).nodes == {Stage.TRAIN: "t0"}


def test_one_of_two_racing_drivers_commits_and_the_other_gets_a_conflict(files: Files):
    started(files, 0)

    def drive(driver: int) -> str:
        try:
            return (
                Branches(files)
                .commit(commit(0, nodes={Stage.TRAIN: str(driver)}))
                .nodes[Stage.TRAIN]
            )
        except ObjectConflict:
            return "refused"

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(drive, range(6)))
    assert results.count("refused") == 5
    assert Branches(files).read("run", 0).nodes[Stage.TRAIN] in results


def test_a_gap_is_refused(local_files: Files):
    branches = started(local_files, 2)
    with pytest.raises(ObjectMissing, match=r"00000002\.json"):
        branches.commit(commit(3))
    for wrong in (
        commit(2, parent=None),
        commit(2, parent="run/00000000"),
        commit(0, parent="run/00000001"),
    ):
        with pytest.raises(StoreError, match="not the next commit"):
            branches.commit(wrong)
    assert [c.iteration for c in branches.walk("run")] == [1, 0]


def test_a_fork_continues_its_parent_and_does_not_change_it(files: Files):
    branches = started(files, 4)
    branches.create("fork", {"lr": 1e-5}, "init", parent="run/00000001")
    assert branches.newest("fork") == branches.read("run", 1)
    with pytest.raises(StoreError, match="the iteration is before the first one of its branch"):
        branches.commit(commit(0, "fork"))
    branches.commit(commit(2, "fork", parent="run/00000001"))
    branches.commit(commit(3, "fork"))
    assert [(c.branch, c.iteration) for c in branches.walk("fork")] == [
        ("fork", 3),
        ("fork", 2),
        ("run", 1),
        ("run", 0),
    ]
    assert [c.branch for c in branches.walk("run")] == ["run"] * 4
    with pytest.raises(ObjectMissing):
        branches.create("other", {}, "init", parent="run/00000009")


def test_the_commit_before_an_iteration_is_found_across_a_fork(files: Files):
    branches = started(files, 4)
    branches.create("fork", {"lr": 1e-5}, "init", parent="run/00000001")
    assert branches.parent_name("run", 0) is branches.before("run", 0) is None
    assert branches.parent_name("run", 3) == "run/00000002"
    assert branches.before("run", 3) == branches.read("run", 2)
    assert branches.parent_name("fork", 2) == "run/00000001"
    assert branches.before("fork", 2) == branches.read("run", 1)
    branches.commit(commit(2, "fork", parent="run/00000001"))
    assert branches.before("fork", 3) == branches.read("fork", 2) != branches.read("run", 2)
    with pytest.raises(StoreError, match="the iteration is before the first one of its branch"):
        branches.before("fork", 1)


def test_commit_names_are_read_back():
    assert parse_commit_name(commit_name("a.b-c", 12)) == ("a.b-c", 12)
    for wrong in ("run", "run/1", "run/x", "00000001"):
        with pytest.raises(ValueError, match=r".+"):
            parse_commit_name(wrong)
