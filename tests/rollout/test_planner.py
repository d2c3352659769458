"""Plans of a curriculum over a store: the visits that count, equal plans, audit, gc, forks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlpipe.config.data import DataConfig, FilePrompts
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.source import DataSource
from rlpipe.lineage.visits import OUTPUT, rejected_visits, row_visits
from rlpipe.rollout.planner import Planner
from rlpipe.store.audit.verification import check_store
from rlpipe.store.branches import Branches
from rlpipe.store.gc import unreachable
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.row_states import StoredRowStates, row_states_path
from rlpipe.types import Commit, DataState, Plan, Sample, Stage
from tests.data.test_source import LETTERS, rows
from tests.store.lineage import Run, collect

ROWS = 9


def planner(files: Files, branch: str, lag: int = 0) -> Planner:
    data = DataConfig.model_validate(
        {
            "prompts": FilePrompts(type="file", paths=("x.jsonl",)),
            "curriculum": {"difficulty": {"easy": 0.2}},
        }
    )
    rollout = RolloutConfig(rollout_batch_size=4, n_samples_per_prompt=2)
    states = StoredRowStates(files)
    source = DataSource(
        rows(ROWS), LETTERS, data, rollout, branch, async_buffer_size=lag, row_states=states
    )
    return Planner(source, rollout, files)


@dataclass
class CurriculumRun(Run):
    """Plans with a curriculum. Groups that are trained passed all samples."""

    lag: int = 0
    plans: list[Plan] = field(default_factory=list)

    def plan(self, iteration: int, before: DataState) -> Plan:
        made = planner(self.files, self.branch, self.lag).part(iteration, before, 0).plan
        self.plans.append(made)
        return made


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def run(files: Files) -> CurriculumRun:
    run = CurriculumRun(files).start()
    for _ in range(4):
        run.iterate()
    return run


def commit(run: Run, iteration: int) -> Commit:
    return Branches(run.files).read(run.branch, iteration)


def easy_rows(plan: Plan, files: Files) -> set[int]:
    states = StoredRowStates(files).read(plan.after.rows or "")
    return {row for row in range(ROWS) if states.samples[row]}


def trained_rows(run: CurriculumRun, iterations: range) -> set[int]:
    trained = {group for k in iterations for group in commit(run, k).trained}
    groups = (group for plan in run.plans for group in plan.groups)
    return {group.row[0] for group in groups if group.row and group.group_id in trained}


@pytest.mark.parametrize("lag", [0, 2])
def test_a_plan_counts_the_commits_up_to_the_staleness(files: Files, lag: int):
    run = CurriculumRun(files, lag=lag).start()
    for _ in range(5):
        run.iterate()
    for k, plan in enumerate(run.plans):
        assert easy_rows(plan, files) == trained_rows(run, range(max(0, k - lag)))
    kinds = {group.row[2] for plan in run.plans for group in plan.groups if group.row}
    assert kinds == {"easy", "normal"}


def test_a_continued_group_keeps_its_row_and_its_visit_counts_when_it_is_trained(
    run: CurriculumRun,
):
    waiting = commit(run, 0).data.buffer[0].group_id
    row = next(group.row for group in run.plans[0].groups if group.group_id == waiting)
    continued = next(group for group in run.plans[1].groups if group.group_id == waiting)
    assert row is not None
    assert continued.row == row
    assert row[0] not in row_visits(run.files, "run", 0, 1.0)
    assert row_visits(run.files, "run", 1, 1.0)[row[0]] == (2, 2)
    assert row_visits(run.files, "run", 1, 1.5)[row[0]] == (0, 2)


def test_a_plan_is_equal_in_another_process_and_after_a_kill(run: CurriculumRun, files: Files):
    before = commit(run, 3).data
    objects = set(files.list())
    looked_up = planner(files, "run").part(4, before, 0, write=False)
    assert looked_up.digest == ""
    assert set(files.list()) == objects
    written = planner(files, "run").part(4, before, 0)
    assert written.plan == looked_up.plan
    again = planner(files, "run")
    assert again.part(4, before, 0) == written
    assert again.following(written) == planner(files, "run").following(written)
    assert {path.split("/")[0] for path in set(files.list()) - objects} == {"plans", "row_states"}


def test_a_fork_continues_with_the_states_of_its_parent(run: CurriculumRun, files: Files):
    fork = CurriculumRun(files, "fork").start(parent="run/00000001")
    fork.iterate()
    fork.iterate()
    first, second = fork.plans
    assert first.before == commit(run, 1).data
    # Iteration 1 of the parent, and then the fork's own iteration 2.
    assert easy_rows(first, files) == trained_rows(run, range(2))
    assert easy_rows(second, files) >= easy_rows(first, files)
    assert row_visits(files, "fork", 0, 1.0) == row_visits(files, "run", 0, 1.0)
    assert check_store(files).findings == []
    assert unreachable(files, grace_s=-60) == []


def test_states_that_plans_name_are_no_garbage(run: CurriculumRun, files: Files):
    run.iterate(stop_after=Stage.ROLLOUT)
    assert unreachable(files, grace_s=-60) == []
    stored = StoredRowStates(files)
    states = stored.read(run.plans[-1].after.rows or "")
    garbage = stored.keep(type(states)(states.rounds + 7, states.passes, states.samples, 9))
    stored.write(garbage)
    report = check_store(files)
    assert report.findings == []
    assert [n.where for n in report.notes if "row_states/" in n.where] == [
        files.url(row_states_path(garbage))
    ]
    assert collect(files, grace_s=-60) == [row_states_path(garbage)]


def test_the_audit_reads_the_states_of_every_plan(tmp_path: Path):
    files = Files(tmp_path)
    run = CurriculumRun(files).start()
    run.iterate()
    run.iterate()
    lost, changed = (row_states_path(plan.after.rows or "") for plan in run.plans)
    files.delete(lost)
    (tmp_path / changed).chmod(0o644)
    (tmp_path / changed).write_bytes(b"?")
    files.create("row_states/table", b"?")
    found = {finding.where for finding in check_store(files).findings}
    assert found == {files.url(path) for path in (lost, changed, "row_states/table")}


def test_groups_that_a_filter_rejected_are_visits(run: CurriculumRun, files: Files):
    group = run.plans[1].groups[1]
    samples = [Sample(group_id=group.group_id, index=n, reward=float(n)) for n in range(2)]
    scored = {group.group_id: samples, "kept": samples}
    outputs = rejected_visits(scored, {group.group_id: "zero_std"}, 1.0)
    assert outputs == {OUTPUT: {group.group_id: [1, 2]}}
    assert rejected_visits(scored, {}, 1.0) == {}

    @dataclass
    class Filtered(CurriculumRun):
        def nodes(self, plan, digest, newest, stop_after):
            made = super().nodes(plan, digest, newest, stop_after)
            path = f"nodes/rollout/{made[Stage.ROLLOUT]}.json"
            node = Nodes(self.files).get(Stage.ROLLOUT, made[Stage.ROLLOUT])
            dropped = self.fates(plan)[1]
            outputs = {**node.outputs, OUTPUT: {one: [2, 2] for one in dropped}}
            self.files.delete(path)
            Nodes(self.files).commit(node.model_copy(update={"outputs": outputs}))
            return made

    filtered = Filtered(files, "filtered").start()
    filtered.iterate()
    filtered.iterate()
    (dropped,) = commit(filtered, 1).dropped
    rows_of = {group.group_id: group.row for group in filtered.plans[1].groups}
    row = rows_of[dropped]
    assert row is not None
    assert row_visits(files, "filtered", 1, 1.0)[row[0]] == (2, 2)
