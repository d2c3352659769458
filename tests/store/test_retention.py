"""Retention: removal of checkpoints and runs, after which the rest can be audited and continued."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlpipe.errors import ConfigError, Fenced, ObjectCorrupt, ObjectMissing
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import COLLECTOR, Epochs
from rlpipe.store.gc import remove, unreachable
from rlpipe.store.nodes import Nodes, node_path
from rlpipe.store.notes import write_note
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import write_data
from rlpipe.store.plans import Plans
from rlpipe.store.retention import Retention, branch_removal, spare_checkpoints
from rlpipe.store.segments import Segments
from rlpipe.store.tables import scalars
from rlpipe.types import DataState, Node, Stage
from tests.store.lineage import Run, make_node
from tools import gc


def checkpoint(files: Files, state: str, **parents: str) -> Node:
    """Write a checkpoint node of a state."""
    record = write_data(files, f"checkpoints/{state[:8]}", "weights.distcp", state.encode())
    return Nodes(files).commit(make_node(Stage.CHECKPOINT, {"weights": state, **parents}, [record]))


def a_run(files: Files, iterations: int = 6) -> list[Node]:
    """Write a run with a checkpoint after every iteration, and return their digests in order."""
    run = Run(files).start()
    made = []
    for _ in range(iterations):
        commit = run.iterate()
        assert commit is not None
        made.append(checkpoint(files, commit.nodes[Stage.TRAIN]))
    return made


def spare(files: Files, made: list[Node], *policy: int) -> list[int]:
    """Return the checkpoints that may be removed."""
    paths = {removal.path for removal in spare_checkpoints(files, Retention(*policy), grace_s=-60)}
    return [
        number
        for number, node in enumerate(made)
        if {node_path(Stage.CHECKPOINT, node.digest), *(record.path for record in node.files)}
        <= paths
    ]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def call(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tools.gc", "--store", str(tmp_path / "store"), *words])
        return gc.main()

    return call


def test_all_but_the_newest_and_regular_checkpoints_are_spare(local_files: Files):
    made = a_run(local_files)
    assert spare(local_files, made, 1) == [0, 1, 2, 3, 4]
    assert spare(local_files, made, 2, 3) == [0, 1, 3]
    assert spare_checkpoints(local_files, Retention(1), grace_s=3600) == []
    with pytest.raises(ConfigError, match="keeps at least one checkpoint"):
        spare_checkpoints(local_files, Retention(0), grace_s=0)


def test_checkpoints_from_which_other_runs_started_stay(local_files: Files):
    made = a_run(local_files)
    Run(local_files, "fork").start(parent="run/00000001").iterate()
    warm = Nodes(local_files).commit(make_node(Stage.INIT, {"start_from": made[3].digest}))
    Branches(local_files).create("warm", {}, warm.digest)
    assert spare(local_files, made, 1) == [0, 2, 4]


def test_segments_keep_their_checkpoints(local_files: Files):
    made = a_run(local_files, 4)
    recorded = Branches(local_files).read("run", 2).nodes[Stage.TRAIN]
    segment = Nodes(local_files).commit(
        make_node(Stage.SEGMENT, {"weights": recorded, "base": made[0].digest})
    )
    replayed = checkpoint(local_files, segment.digest)
    Segments(local_files).record("run", 3, 1, weights=recorded, segment=segment.digest)
    assert spare(local_files, [*made, replayed], 1) == [1, 2]


@pytest.mark.parametrize(("done", "expected"), [(0, [0, 2]), (3, [1, 3])])
def test_checkpoints_of_reference_refreshes_stay(
    done: int, expected: list[int], local_files: Files
):
    init = Nodes(local_files).commit(make_node(Stage.INIT, {}, model="tiny"))
    config = {"start_rollout_id": done, "reference": {"ref_update_interval": 2}}
    Branches(local_files).create("run", config, init.digest)
    run = Run(local_files)
    made = []
    for _ in range(5):
        commit = run.iterate()
        assert commit is not None
        made.append(checkpoint(local_files, commit.nodes[Stage.TRAIN]))
    assert spare(local_files, made, 1) == expected


def test_a_run_without_its_spare_checkpoints_continues_and_has_no_findings(files: Files):
    made = a_run(files, 3)
    paths = [removal.path for removal in spare_checkpoints(files, Retention(1), grace_s=-60)]
    gone = unreachable(files, -60, paths)
    assert set(gone) == set(paths)
    remove(files, gone, lambda: None)
    assert check_branch(files, "run") == []
    assert Nodes(files).find(Stage.CHECKPOINT, made[0].digest) is None
    assert Run(files).iterate() is not None


def test_a_run_in_use_is_not_removed(local_files: Files):
    made = a_run(local_files, 2)
    Run(local_files, "fork").start(parent="run/00000000")
    warm = Nodes(local_files).commit(make_node(Stage.INIT, {"start_from": made[1].digest}))
    Branches(local_files).create("warm", {"debug": {"load_debug_rollout_data": "run"}}, warm.digest)
    trained = Branches(local_files).read("run", 0).nodes[Stage.TRAIN]
    adapted = Nodes(local_files).commit(make_node(Stage.INIT, {"adapter": trained}))
    Branches(local_files).create("adapted", {}, adapted.digest)
    Epochs(local_files).acquire("run", lease_s=60)
    with pytest.raises(ConfigError) as caught:
        branch_removal(local_files, "run")
    for why in (
        "fork: a fork of run/00000000",
        "warm: started from its weights",
        "adapted: started from its weights",
        "warm: trains on its",
        "run: driven by process",
    ):
        assert why in str(caught.value)
    with pytest.raises(ObjectMissing):
        branch_removal(local_files, "absent")


def test_a_removal_that_is_killed_leaves_a_shorter_run(local_files: Files):
    a_run(local_files, 3)
    scalars.update(local_files, "run")
    paths = [removal.path for removal in branch_removal(local_files, "run")]
    tables = len(
        local_files.list("branches/run/scalars") + local_files.list("branches/run/receipts")
    )
    for gone in (tables, tables + 2):
        remove(local_files, paths[:gone], lambda: None)
        newest = Branches(local_files).newest("run")
        assert newest is not None and newest.iteration == 2 + tables - gone
        assert (
            check_branch(local_files, "run") == []
            and local_files.list("branches/run/scalars") == []
        )
    Run(local_files).iterate()
    scalars.update(local_files, "run")
    assert set(scalars.read(local_files, "run")["iteration"].to_pylist()) == {0, 1}, (
        "for the present objects only"
    )
    remove(
        local_files, [removal.path for removal in branch_removal(local_files, "run")], lambda: None
    )
    assert local_files.list("branches") == []


@pytest.mark.parametrize("done", range(10))
def test_a_killed_removal_continues_from_any_point(
    local_files: Files, tool: Callable[..., int], done: int
):
    a_run(local_files, 2)
    write_note(local_files, "run", 5, {Stage.ROLLOUT: "d"})
    local_files.create("gates/run/00000001-0.json", b"{}")
    Plans(local_files).draw(Run(local_files).plan(2, DataState()))
    scalars.update(local_files, "run")
    Epochs(local_files).acquire("run").release()
    paths = [removal.path for removal in branch_removal(local_files, "run")]
    assert len(paths) == 9, (
        "two receipts, two tables, a note, a gate, two commits, the configuration"
    )
    remove(local_files, paths[:done], lambda: None)
    assert tool("--grace", "0s", "--remove", "run", "--delete") == 0
    assert all("/epochs/" in name for name in local_files.list())
    assert tool("--grace", "0s", "--remove", "run", "--delete") == 0, "no object is left to remove"
    assert Epochs(local_files).acquire("run").number == 2, "a suspended driver has an older epoch"


def test_the_rest_of_a_removed_run_is_garbage(local_files: Files, tool: Callable[..., int]):
    a_run(local_files, 2)
    before = local_files.list()
    for name in (
        "rollouts/gone/00000000.json",
        "gates/gone/00000000-0.json",
        "branches/gone/segments/x.json",
    ):
        local_files.create(name, b"{}")
    Plans(local_files).draw(Run(local_files, "gone").plan(0, DataState()))
    kept = Plans(local_files).draw(Run(local_files).plan(2, DataState()))
    assert tool("--grace", "0s", "--delete") == 0
    left = [
        name
        for name in local_files.list()
        if name not in before and not name.startswith("branches/.gc/")
    ]
    assert (
        len(left) == 2
        and f"plans/{kept}/plan.json" in left
        and local_files.read(left[0]).decode() == kept
    )


def test_nothing_is_removed_while_a_run_has_commits_and_no_configuration(
    local_files: Files, tool: Callable[..., int], capsys: pytest.CaptureFixture[str]
):
    a_run(local_files, 2)
    local_files.delete("branches/run/config.json")
    before = local_files.list("nodes")
    assert tool("--grace", "0s", "--delete") == 2
    assert (
        "commits and no configuration" in capsys.readouterr().err
        and local_files.list("nodes") == before
    )
    assert tool("--grace", "0s", "--remove", "run", "--delete") == 0
    assert local_files.list("nodes") == []


def test_the_command_lists_by_default_and_deletes_with_a_flag(
    local_files: Files, tool: Callable[..., int], capsys: pytest.CaptureFixture[str]
):
    a_run(local_files, 3)
    Run(local_files, "fork").start(parent="run/00000002").iterate()
    before = local_files.list()
    assert tool("--remove", "forl") == 2
    assert "did you mean fork?" in capsys.readouterr().err
    assert tool("--grace", "0s") == 0
    output = capsys.readouterr().out
    assert "0 objects can be deleted" in output and "(younger than " in output
    assert tool("--grace", "0s", "--keep-checkpoints", "1", "--list") == 0
    output = capsys.readouterr().out
    assert (
        "checkpoints         2 objects" in output
        and "6 objects can be deleted with --delete" in output
    )
    assert local_files.list() == before
    assert tool("--grace", "0s", "--remove", "run") == 2
    assert "fork: a fork of run/00000002" in capsys.readouterr().err
    assert tool("--grace", "0s", "--remove", "fork", "--remove", "run", "--delete") == 0
    assert [name for name in local_files.list() if not name.startswith("branches/.gc/")] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--grace", "soon"), "not a time"),
        (("--keep-every", "10"), "give --keep-checkpoints too"),
        (("--remove", "absent"), "the run does not exist"),
    ],
)
def test_contradictory_options_are_refused(
    tool: Callable[..., int],
    words: tuple[str, ...],
    expected: str,
    capsys: pytest.CaptureFixture[str],
):
    assert tool(*words) == 2
    assert expected in capsys.readouterr().err


def test_nothing_is_deleted_while_a_run_is_driven(
    local_files: Files, tool: Callable[..., int], capsys: pytest.CaptureFixture[str]
):
    a_run(local_files, 2)
    driven = Epochs(local_files).acquire("run")
    before = local_files.list("nodes")
    assert (
        tool("--grace", "0s") == 0
        and tool("--grace", "0s", "--keep-checkpoints", "1", "--delete") == 2
    )
    assert "InUse: the run run is running" in capsys.readouterr().err
    assert local_files.list("nodes") == before
    driven.release()
    assert tool("--grace", "0s", "--keep-checkpoints", "1", "--delete") == 0
    assert len(local_files.list("nodes")) < len(before)


def test_a_run_that_starts_during_a_collection_is_refused_and_loses_nothing(
    local_files: Files, tool: Callable[..., int], monkeypatch: pytest.MonkeyPatch
):
    a_run(local_files, 1)
    adopted: list[Node] = []
    garbage = Nodes(local_files).commit(
        make_node(Stage.REWARD, {"rollout": "of a run that was removed"})
    )

    def begin(files: Files, path: str) -> None:
        """Start a run just before the object is removed."""
        monkeypatch.setattr(Files, "delete", delete)
        try:
            Epochs(files).acquire("new", takeover=True)
            adopted.append(Nodes(files).get(Stage.REWARD, garbage.digest))
        except Fenced as error:
            refusals.append(error.problem)
        files.delete(path)

    delete = Files.delete
    refusals = list[str]()
    monkeypatch.setattr(Files, "delete", begin)
    assert tool("--grace", "0s", "--delete") == 0
    assert adopted == [] and refusals == ["garbage collection is running on this store (tools.gc)"]
    assert Nodes(local_files).find(Stage.REWARD, garbage.digest) is None
    assert Epochs(local_files).acquire("new").number == 2


def test_a_collector_that_was_replaced_removes_nothing_more(
    local_files: Files,
    tool: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    a_run(local_files, 1)
    garbage = [
        write_data(local_files, "data/reward/old", f"{number}.bin", b"x").path
        for number in range(3)
    ]

    def delete_and_be_replaced(files: Files, path: str) -> None:
        monkeypatch.setattr(Files, "delete", delete)
        files.delete(path)
        Epochs(files)._take(COLLECTOR, takeover=True, released=True)

    delete = Files.delete
    monkeypatch.setattr(Files, "delete", delete_and_be_replaced)
    assert tool("--grace", "0s", "--delete") == 2
    assert "taken over" in capsys.readouterr().err
    assert [local_files.exists(path) for path in garbage] == [False, True, True]


def test_nothing_is_removed_while_a_record_is_unreadable(local_files: Files):
    made = a_run(local_files, 2)
    path = Path(
        local_files.url(node_path(Stage.CHECKPOINT, made[0].digest)).removeprefix("file://")
    )
    path.write_bytes(b"{}")
    with pytest.raises(ObjectCorrupt):
        spare_checkpoints(local_files, Retention(1), grace_s=-60)
