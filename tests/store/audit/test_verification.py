"""The audit has no findings about a good branch, and names every fault of a broken one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlpipe.store.audit.verification import check_branch, check_store
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes, node_path
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import data_folder, write_table
from rlpipe.store.plans import Plans, plan_path
from rlpipe.store.records import seal
from rlpipe.types import Commit, DataState, Plan, Stage
from tests.store.lineage import Run, batch_table, make_node


def rules(files: Files, branch: str = "run") -> set[str]:
    return {finding.rule for finding in check_branch(files, branch)}


def test_a_good_branch_and_its_fork_have_no_findings(files: Files):
    run = Run(files).start()
    for _ in range(4):
        run.iterate()
    fork = Run(files, "fork").start(parent="run/00000001")
    fork.iterate()
    fork.iterate()
    assert check_branch(files, "run") == []
    assert check_branch(files, "fork") == []
    assert [c.iteration for c in Branches(files).walk("fork")] == [3, 2, 1, 0]


def waits(commit: Commit, **changes: object) -> DataState:
    """Return the state after a commit with another entry in its buffer."""
    return commit.data.model_copy(
        update={"buffer": (commit.data.buffer[0].model_copy(update=changes),)}
    )


class BrokenRun(Run):
    """A run whose iteration 2 has a fault."""

    def __init__(
        self, files: Files, commit: Callable | None = None, plan: Callable | None = None
    ) -> None:
        super().__init__(files)
        self.change_commit = commit
        self.change_plan = plan

    def commit_of(self, plan: Plan, *arguments) -> Commit:
        commit = super().commit_of(plan, *arguments)
        return (
            commit.model_copy(update=self.change_commit(commit))
            if self.change_commit and plan.iteration == 2
            else commit
        )

    def plan(self, iteration: int, *arguments) -> Plan:
        plan = super().plan(iteration, *arguments)
        return (
            plan.model_copy(update=self.change_plan(plan))
            if self.change_plan and iteration == 2
            else plan
        )


@pytest.mark.parametrize(
    ("change", "rule", "problem"),
    [
        (
            lambda c: {"trained": c.trained[1:]},
            "accounted",
            "neither trained nor dropped nor buffered",
        ),
        (
            lambda c: {"data": c.data.model_copy(update={"buffer": ()})},
            "accounted",
            "neither trained nor dropped nor buffered",
        ),
        (lambda c: {"dropped": {c.trained[0]: "stale"}}, "accounted", "accounted for 2 times"),
        (lambda c: {"trained": (*c.trained, c.trained[0])}, "accounted", "accounted for 2 times"),
        (
            lambda c: {"trained": (*c.trained, "run:00000001")},
            "batches",
            "was trained in run/00000000 already",
        ),
        (lambda c: {"trained": (*c.trained, "run:00000001")}, "accounted", "never drawn"),
        (
            lambda c: {"trained": (*c.trained, "run:99999999")},
            "rows",
            "trained without rows in any rollout",
        ),
        (
            lambda c: {"trained": c.trained[1:], "dropped": {c.trained[0]: "stale"}},
            "batches",
            "batch rows and commit differ",
        ),
        (lambda c: {"data": c.data.model_copy(update={"offset": 0})}, "cursor", "the plan ends at"),
        (
            lambda c: {"data": c.data.model_copy(update={"offset": 0})},
            "cursor",
            "the rollout ends at",
        ),
        (
            lambda c: {"data": waits(c, rows="0" * 64)},
            "rows",
            "is buffered, and its recorded rows do not exist",
        ),
        (lambda c: {"data": waits(c, plan="0" * 64)}, "rows", "which is not on this branch"),
        (lambda c: {"data": waits(c, oldest=5)}, "cursor", "the rollout ends at"),
        (lambda c: {"plans": (*c.plans, c.plans[0])}, "cursor", "part 1 starts at"),
        (lambda c: {"plans": (*c.plans, c.plans[0])}, "drawn", "planned 2 times"),
        (lambda c: {"plans": (*c.plans, c.plans[0])}, "records", "the rollout names the plans"),
        (
            lambda c: {"trained": (*c.trained, c.data.buffer[0].group_id)},
            "batches",
            "was trained but not accepted",
        ),
        (lambda c: {"plans": ("0" * 64,)}, "records", "the object does not exist"),
        (
            lambda c: {"nodes": {**c.nodes, Stage.SYNC: "0" * 64}},
            "records",
            "the object does not exist",
        ),
    ],
)
def test_a_false_commit_is_found(local_files: Files, change: Callable, rule: str, problem: str):
    run = BrokenRun(local_files, commit=change).start()
    for _ in range(4):
        run.iterate()
    findings = check_branch(local_files, "run")
    assert any(rule == found.rule and problem in found.problem for found in findings), findings
    assert all("00000002" in found.where or "00000003" in found.where for found in findings), (
        findings
    )


def test_a_group_that_is_drawn_twice_is_found(local_files: Files):
    def draw_again(plan: Plan) -> dict:
        again = plan.groups[-1].model_copy(update={"group_id": "run:00000001"})
        return {"groups": (*plan.groups, again)}

    run = BrokenRun(local_files, plan=draw_again).start()
    for _ in range(3):
        run.iterate()
    found = [(f.rule, f.where, f.problem) for f in check_branch(local_files, "run")]
    assert ("drawn", "run/00000002", "run:00000001 was drawn before") in found
    assert ("batches", "run/00000002", "run:00000001 was trained in run/00000000 already") in found


def test_a_drop_of_the_rollout_that_the_commit_omits_is_found(local_files: Files):
    run = BrokenRun(
        local_files, commit=lambda c: {"dropped": dict.fromkeys(c.dropped, "another reason")}
    ).start()

    def fates(plan):
        trained, dropped, buffered = Run.fates(run, plan)
        return trained[1:], {**dropped, trained[0]: "dull"}, buffered

    run.fates = fates  # type: ignore[method-assign]
    for _ in range(3):
        run.iterate()
    found = [
        finding
        for finding in check_branch(local_files, "run")
        if "the commit does not" in finding.problem
    ]
    assert [(finding.rule, finding.where) for finding in found] == [("accounted", "run/00000002")]


def test_a_commit_of_a_driver_that_was_replaced_is_found(local_files: Files):
    run = BrokenRun(local_files, commit=lambda c: {"epoch": 7}).start()
    for _ in range(3):
        run.iterate()
    newest = Branches(local_files).read("run", 2)
    late = newest.model_copy(update={"iteration": 3, "parent": "run/00000002", "epoch": 0})
    local_files.create("branches/run/00000003.json", seal(late, "late"))
    epochs = [finding for finding in check_branch(local_files, "run") if finding.rule == "epochs"]
    found = [
        (finding.where, finding.problem)
        for finding in epochs
        if "is missing" not in finding.problem
    ]
    assert len(epochs) == 1 + 7, "none of these epochs was ever acquired"
    assert found == [("run/00000003", "its epoch is 0, after a commit of epoch 7")]


def test_a_skipped_prompt_is_found(local_files: Files):
    skip = BrokenRun(
        local_files, plan=lambda p: {"before": p.before.model_copy(update={"offset": 99})}
    ).start()
    for _ in range(3):
        skip.iterate()
    assert rules(local_files) == {"cursor"}


def test_a_batch_that_trains_another_group_is_found(local_files: Files):
    run = Run(local_files).start()
    run.stage_files = lambda node, shards, trained: (  # type: ignore[method-assign]
        Run.stage_files(run, node, shards, trained)
        if node.stage is not Stage.ADVANTAGE
        else [
            write_table(
                local_files,
                data_folder(node.stage, node.digest),
                "batch",
                batch_table([*trained, "run:00000000"]),
            )
        ]
    )
    run.iterate()
    assert [(f.rule, f.problem) for f in check_branch(local_files, "run")] == [
        ("batches", "batch rows and commit differ in ['run:00000000']")
    ]


def test_a_node_with_a_parent_on_another_branch_is_found(local_files: Files):
    stranger = Nodes(local_files).commit(make_node(Stage.TRAIN, {"batch": "d" * 64}))
    run = BrokenRun(
        local_files, commit=lambda c: {"nodes": {**c.nodes, Stage.TRAIN: stranger.digest}}
    ).start()
    for _ in range(3):
        run.iterate()
    assert [(f.rule, f.where) for f in check_branch(local_files, "run")] == [
        ("records", "run/00000002 train")
    ]


def test_every_object_that_is_damaged_or_missing_is_found(tmp_path: Path):
    files = Files(tmp_path / "store")
    run = Run(files).start()
    run.iterate()
    run.iterate()
    paths = [path for path in files.list() if not path.endswith("config.json")]
    assert len(paths) == 2 * 12 + 1
    for path in paths:
        file = tmp_path / "store" / path
        good = file.read_bytes()
        middle = len(good) // 2
        file.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        assert check_branch(files, "run") != [], f"a flipped bit in {path} was not seen"
        file.unlink()
        assert check_branch(files, "run") != [] or "/receipts/" in path, f"{path} was not missed"
        file.write_bytes(good)
    assert check_branch(files, "run") == []


def test_a_damaged_file_is_named_with_its_rule(local_files: Files):
    run = Run(local_files).start()
    commit = run.iterate()
    assert commit is not None
    batch = Nodes(local_files).get(Stage.ADVANTAGE, commit.nodes[Stage.ADVANTAGE]).files[0]
    local_files.delete(batch.path)
    assert ("files", local_files.url(batch.path)) in {
        (f.rule, f.where) for f in check_branch(local_files, "run")
    }
    local_files.delete(node_path(Stage.REWARD, commit.nodes[Stage.REWARD]))
    local_files.delete(plan_path(commit.plans[0]))
    found = {(f.rule, f.where) for f in check_branch(local_files, "run")}
    assert {("records", "run/00000000 reward"), ("records", "run/00000000")} <= found
    assert (
        Plans.groups_prefix(commit.plans[0])
        in Nodes(local_files).get(Stage.ROLLOUT, commit.nodes[Stage.ROLLOUT]).files[0].path
    )


@pytest.mark.parametrize(("source", "problems"), [("run", 0), ("another", 2)])
def test_a_branch_may_train_on_the_rollouts_of_the_one_that_it_names(
    files: Files, source: str, problems: int
) -> None:
    run = Run(files).start()
    commits = [run.iterate(), run.iterate()]
    branches = Branches(files)
    branches.create(
        "again", {"debug": {"load_debug_rollout_data": source}}, branches.get("run").init
    )
    for commit in commits:
        assert commit is not None
        parent = branches.parent_name("again", commit.iteration)
        branches.commit(commit.model_copy(update={"branch": "again", "parent": parent}))
    assert [finding.rule for finding in check_branch(files, "again")] == ["cursor"] * problems


def test_an_open_iteration_of_a_run_that_loads_rollouts_is_explained(files: Files) -> None:
    commit = Run(files).start().iterate()
    assert commit is not None
    branches = Branches(files)
    init = Nodes(files).commit(make_node(Stage.INIT, {}, model="another"))
    branches.create("again", {"debug": {"load_debug_rollout_data": "run"}}, init.digest)
    nodes = Nodes(files)
    made = {"rollout": commit.nodes[Stage.ROLLOUT]}
    made["reward"] = nodes.commit(make_node(Stage.REWARD, {**made}, function="other")).digest
    batch = nodes.commit(make_node(Stage.ADVANTAGE, {**made, "before": init.digest}))
    nodes.commit(make_node(Stage.TRAIN, {"advantage": batch.digest, "before": init.digest}))
    assert check_store(files).findings == []
    nodes.commit(make_node(Stage.ADVANTAGE, {**made, "before": "0" * 64}))
    nodes.commit(make_node(Stage.REWARD, {}, function="of no rollout"))
    assert [finding.rule for finding in check_store(files).findings] == ["unexplained"] * 2
