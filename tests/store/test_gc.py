"""Garbage collection removes unreachable objects, and none that a crashed run could still use."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rlpipe.errors import ObjectCorrupt, ObjectMissing
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.gc import unreachable
from rlpipe.store.nodes import Nodes, node_path
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import ShardWriter, adopt, write_data
from rlpipe.store.plans import Plans
from rlpipe.store.receipts import node_receipt_path
from rlpipe.store.segments import Segments
from rlpipe.types import Stage
from tests.store.audit.test_unexpected_files import OpenRun, late
from tests.store.lineage import Run, collect, group, make_node


def a_run(files: Files, iterations: int = 2) -> Run:
    run = Run(files).start()
    for _ in range(iterations):
        run.iterate()
    return run


def test_no_object_of_a_run_or_its_fork_is_garbage(files: Files):
    a_run(files, 3)
    Run(files, "fork").start(parent="run/00000000").iterate()
    assert unreachable(files, grace_s=-60) == []


def test_only_unreachable_objects_are_removed(files: Files):
    run = a_run(files)
    before = files.list()
    newest = Branches(files).newest("run")
    assert newest is not None
    late = ShardWriter(files, Plans.groups_prefix(newest.plans[0]), 1).write(
        [group("run:00000005")]
    )
    data = write_data(files, "data/reward/old", "rewards.parquet", b"x")
    node = Nodes(files).commit(make_node(Stage.REWARD, {"rollout": "gone"}, [data]))
    foreign = "notes/readme.txt"
    files.create(foreign, b"not ours to remove")
    garbage = [node_path(Stage.REWARD, node.digest), late.path, data.path]
    assert unreachable(files, grace_s=-60) == garbage
    assert len(files.list()) == len(before) + 4
    assert collect(files, grace_s=-60) == garbage
    assert files.list() == sorted([*before, foreign])
    assert check_branch(files, "run") == []
    assert run.iterate() is not None


def test_the_ancestors_of_a_reachable_node_stay(local_files: Files):
    nodes = Nodes(local_files)
    weights = write_data(local_files, "checkpoints/elsewhere/iter_0000003", "weights.bin", b"1")
    checkpoint = nodes.commit(make_node(Stage.CHECKPOINT, {}, [weights], iteration=3))
    trained = nodes.commit(make_node(Stage.TRAIN, {"checkpoint": checkpoint.digest}))
    init = nodes.commit(make_node(Stage.INIT, {"state": trained.digest}))
    Branches(local_files).create("warm", {}, init.digest)
    assert unreachable(local_files, grace_s=-60) == []


def test_objects_younger_than_the_grace_period_stay(files: Files):
    a_run(files)
    write_data(files, "data/reward/new", "rewards.parquet", b"x")
    assert unreachable(files, grace_s=3600) == []
    assert len(unreachable(files, grace_s=-60)) == 1


@pytest.mark.parametrize("stage", [Stage.ROLLOUT, Stage.REWARD, Stage.ADVANTAGE, Stage.TRAIN])
def test_an_iteration_that_crashed_long_ago_can_still_be_finished(files: Files, stage: Stage):
    run = a_run(files)
    run.iterate(stop_after=stage)
    before = files.list()
    assert collect(files, grace_s=-60) == []
    assert files.list() == before
    nodes = {path: files.read(path) for path in files.list("nodes")}
    run.iterate()
    assert {path: files.read(path) for path in nodes} == nodes, (
        "finished nodes were adopted, not made again"
    )
    assert check_branch(files, "run") == []


def test_finished_groups_of_an_active_rollout_stay(local_files: Files):
    run = a_run(local_files)
    newest = Branches(local_files).newest("run")
    assert newest is not None
    digest = Plans(local_files).write(run.plan(2, newest.data))
    ShardWriter(local_files, Plans.groups_prefix(digest), 2).write([group("run:00000006")])
    assert unreachable(local_files, grace_s=-60) == []
    assert [groups for _, groups in adopt(local_files, Plans.groups_prefix(digest))] == [
        ["run:00000006"]
    ]


def test_groups_that_finish_after_their_rollout_stay_for_the_next_one(local_files: Files):
    commit = OpenRun(local_files).start().iterate()
    assert commit is not None
    [waiting] = commit.data.buffer
    writer = ShardWriter(local_files, Plans.groups_prefix(waiting.plan), commit.iteration)
    writer.write([late(waiting.group_id)])
    assert unreachable(local_files, grace_s=-60) == []


def test_all_parts_and_cut_groups_of_a_plan_stay_while_its_iteration_is_open(
    local_files: Files,
):
    run = a_run(local_files)
    newest = Branches(local_files).newest("run")
    assert newest is not None
    ahead = [
        run.plan(iteration, newest.data).model_copy(update={"part": part})
        for iteration in (2, 3)
        for part in (0, 1)
    ]
    for plan in ahead:
        digest = Plans(local_files).write(plan)
        ShardWriter(local_files, Plans.groups_prefix(digest), 2).write([group("run:00000006")])
        ShardWriter(local_files, Plans.cut_prefix(digest), 2).write([group("run:00000007")])
    assert unreachable(local_files, grace_s=-60) == []
    run.iterate()
    gone = unreachable(local_files, grace_s=-60)
    part_1 = Plans(local_files).find(ahead[1])
    assert len(gone) == 5, "iteration 2 is committed with part 0 and other rows, 3 is still open"
    assert [path for path in gone if path.endswith("plan.json")] == [f"plans/{part_1}/plan.json"]


def test_a_plan_of_a_committed_iteration_that_no_commit_names_is_removed(local_files: Files):
    run = a_run(local_files)
    first = Branches(local_files).read("run", 0)
    digest = Plans(local_files).write(run.plan(1, first.data.model_copy(update={"offset": 77})))
    strange = Plans(local_files).write(
        run.plan(1, first.data).model_copy(update={"branch": "absent"})
    )
    shard = ShardWriter(local_files, Plans.groups_prefix(digest), 1).write([group("x")])
    assert set(unreachable(local_files, grace_s=-60)) == {
        f"plans/{d}/plan.json" for d in (digest, strange)
    } | {shard.path}


def test_temporary_files_of_killed_writers_are_removed_after_the_grace_period(local_files: Files):
    a_run(local_files)
    directory = Path(local_files.root.removeprefix("file://"))
    left = directory / "data" / ("x.parquet.tmp-" + "0" * 32)
    left.write_bytes(b"half")
    assert unreachable(local_files, grace_s=60) == []
    long_ago = time.time() - 120
    os.utime(left, (long_ago, long_ago))
    assert collect(local_files, grace_s=60) == [f"data/{left.name}"]
    assert not left.exists()


def test_nothing_is_removed_while_a_record_is_unreadable(local_files: Files):
    a_run(local_files)
    write_data(local_files, "data/reward/old", "rewards.parquet", b"x")
    newest = Branches(local_files).newest("run")
    assert newest is not None
    path = Path(
        local_files.url(node_path(Stage.ADVANTAGE, newest.nodes[Stage.ADVANTAGE])).removeprefix(
            "file://"
        )
    )
    path.write_bytes(path.read_bytes().replace(b"batch-", b"batch_"))
    before = local_files.list()
    with pytest.raises(ObjectCorrupt):
        collect(local_files, grace_s=-60)
    assert local_files.list() == before


def test_nothing_is_removed_while_a_record_that_a_commit_names_is_lost(local_files: Files):
    """Its files still exist. With the record from a copy the run is complete again."""
    a_run(local_files)
    newest = Branches(local_files).newest("run")
    assert newest is not None
    path = node_path(Stage.ADVANTAGE, newest.nodes[Stage.ADVANTAGE])
    kept = local_files.read(path)
    local_files.delete(path)
    with pytest.raises(ObjectMissing, match=path):
        collect(local_files, grace_s=-60)
    local_files.create(path, kept)
    assert collect(local_files, grace_s=-60) == [] and check_branch(local_files, "run") == []


def test_checkpoints_and_evaluations_are_removed_only_with_their_weights(local_files: Files):
    a_run(local_files, 1)
    newest = Branches(local_files).newest("run")
    nodes = Nodes(local_files)
    assert newest is not None
    lost = nodes.commit(make_node(Stage.TRAIN, {"before": "nothing"})).digest

    def leaf(stage: Stage, weights: str) -> list[str]:
        """Write a node about these weights and its file, and return both names."""
        folder = (
            f"checkpoints/run/{weights[:8]}"
            if stage is Stage.CHECKPOINT
            else f"data/eval/{weights[:8]}"
        )
        record = write_data(local_files, folder, "file.bin", f"{stage} {weights}".encode())
        digest = nodes.commit(make_node(stage, {"weights": weights}, [record])).digest
        return [node_path(stage, digest), node_receipt_path(stage, digest), record.path]

    init = Branches(local_files).get("run").init
    stays = [
        leaf(stage, weights)
        for stage in (Stage.CHECKPOINT, Stage.EVAL)
        for weights in (newest.nodes[Stage.TRAIN], init)
    ]
    goes = [
        leaf(stage, weights)
        for stage in (Stage.CHECKPOINT, Stage.EVAL)
        for weights in (lost, "never heard of")
    ]
    expected = {node_path(Stage.TRAIN, lost), *(path for pair in goes for path in pair)}
    assert set(collect(local_files, grace_s=-60)) == expected
    assert {path for pair in stays for path in pair} <= set(local_files.list())


def test_a_segment_stays_with_its_ancestors(local_files: Files):
    a_run(local_files, 1)
    newest = Branches(local_files).newest("run")
    nodes = Nodes(local_files)
    assert newest is not None
    base = nodes.commit(make_node(Stage.CHECKPOINT, {"weights": "lost"}))
    parents = {"weights": newest.nodes[Stage.TRAIN], "base": base.digest}
    segment = nodes.commit(make_node(Stage.SEGMENT, parents))
    paths = [node_path(Stage.CHECKPOINT, base.digest), node_path(Stage.SEGMENT, segment.digest)]
    receipt = node_receipt_path(Stage.CHECKPOINT, base.digest)
    assert unreachable(local_files, grace_s=-60) == [receipt, *sorted(paths)], (
        "a receipt is removed before its node"
    )
    Segments(local_files).record(
        "run", 1, 1, weights=newest.nodes[Stage.TRAIN], segment=segment.digest
    )
    assert unreachable(local_files, grace_s=-60) == []


def test_an_evaluation_with_a_lost_object_is_removed(local_files: Files):
    a_run(local_files, 1)
    init = Branches(local_files).get("run").init
    nodes = Nodes(local_files)
    kept = nodes.commit(make_node(Stage.EVAL, {"weights": init}))
    lost = nodes.commit(make_node(Stage.EVAL, {"weights": init, "judge": "lost"}))
    goes = [node_receipt_path(Stage.EVAL, lost.digest), node_path(Stage.EVAL, lost.digest)]
    assert (
        unreachable(local_files, grace_s=-60) == goes
        and node_path(Stage.EVAL, kept.digest) not in goes
    )
