"""The audit names files that no writer created, but not those of killed attempts
(rlpipe.store.audit.unexpected_files)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import PurePosixPath

import pytest

from rlpipe.store.audit.findings import Finding
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import rewards_to_table
from rlpipe.store.parquet.shards import ShardWriter, adopt, write_table
from rlpipe.store.plans import Plans
from rlpipe.types import BufferedGroup, DataState, FileRecord, Node, Plan, Sample, Stage
from tests.store.lineage import Reward, Run, group, make_node

ATTEMPT = "0123456789ab"


def timed(group_id: str) -> list[Sample]:
    """Return a group with times, as a sampler writes it."""
    return [replace(sample, t_end_s=time.time()) for sample in group(group_id)]


class TimedRun(Run):
    """A run that writes the finished groups of an iteration first, with times."""

    def plan(self, *arguments) -> Plan:
        plan = super().plan(*arguments)
        waited = {waiting.group_id: waiting.rows for waiting in plan.before.buffer}
        groups = tuple(
            one.model_copy(update={"earlier": waited.get(one.group_id)}) for one in plan.groups
        )
        return plan.model_copy(update={"groups": groups})


@pytest.fixture
def commits(local_files: Files) -> list[Node]:
    """Write a run of three iterations, and return its commits."""
    run = TimedRun(local_files).start()
    made = [run.iterate() for _ in range(3)]
    return [
        Nodes(local_files).get(Stage.ROLLOUT, commit.nodes[Stage.ROLLOUT])
        for commit in made
        if commit is not None
    ]


def copy(files: Files, path: str, to: str) -> str:
    files.create(to, files.read(path))
    return files.url(to)


def found(files: Files) -> list[Finding]:
    return check_branch(files, "run")


def shard_of(files: Files, plan: str, groups: list[list[Sample]], attempt: str = ATTEMPT) -> str:
    return ShardWriter(files, Plans.groups_prefix(plan), 1, attempt).write(groups).path


@pytest.mark.parametrize(
    "name",
    [
        "copy.parquet",
        "../copy.parquet",
        "../groups-old/x.parquet",
        "{name} (1).parquet",
        "old/{name}",
    ],
)
def test_a_shard_with_an_unknown_name_is_named(local_files: Files, commits: list[Node], name: str):
    path = PurePosixPath(commits[1].files[-1].path)
    folder = path.parent.parent if name.startswith("../") else path.parent
    url = copy(
        local_files, str(path), f"{folder}/{name.removeprefix('../').format(name=path.name)}"
    )
    [(rule, where, problem)] = found(local_files)
    assert (rule, where) == ("files", url) and "rlpipe writes no file with such a name" in problem


def test_a_copy_of_a_shard_under_the_name_of_another_attempt_is_named(
    local_files: Files, commits: list[Node]
):
    plan = commits[1].parents["plan"]
    drawn = Plans(local_files).read(plan).groups[-1].group_id
    path = PurePosixPath(shard_of(local_files, plan, [timed(drawn)]))
    assert found(local_files) == [], "another attempt that did not read the first one"
    url = copy(local_files, str(path), f"{path.parent}/{path.name.replace(ATTEMPT, 'f' * 12)}")
    first, second = found(local_files)
    assert {first.where, second.where} == {url, local_files.url(str(path))}
    assert "a copy of the same samples" in first.problem


def test_buffered_and_failed_groups_may_be_written_twice(local_files: Files, commits: list[Node]):
    plan = Plans(local_files).read(commits[1].parents["plan"])
    waited = next(one.group_id for one in plan.groups if one.earlier)
    for groups in ([timed(waited)], [group(plan.groups[-1].group_id)]):  # a failed one has no time
        for attempt in (ATTEMPT, "f" * 12):
            shard_of(local_files, commits[1].parents["plan"], groups, attempt)
    assert found(local_files) == []


class OpenRun(Run):
    """A run with an open group in the buffer, which finishes before the next rollout."""

    def after(self, plan: Plan, digest: str) -> DataState:
        waiting = BufferedGroup(group_id=self.fates(plan)[2], plan=digest)
        return plan.after.model_copy(update={"buffer": (waiting,)})

    def waited(self, plan: Plan) -> list[FileRecord]:
        digest = Plans(self.files).write(plan)
        writer = ShardWriter(self.files, Plans.groups_prefix(digest), plan.iteration)
        return [writer.write([late(waiting.group_id)]) for waiting in plan.before.buffer]


def late(group_id: str) -> list[Sample]:
    return [replace(sample, t_end_s=1.0) for sample in group(group_id)]


def test_two_attempts_may_adopt_a_group_that_finished_after_the_rollout_before(local_files: Files):
    run = OpenRun(local_files).start()
    run.iterate()
    commit = run.iterate()
    assert commit is not None and found(local_files) == []
    [waiting] = Plans(local_files).read(commit.plans[0]).before.buffer
    shard_of(local_files, commit.plans[0], [late(waiting.group_id)])
    assert found(local_files) == []


def test_a_shard_of_another_plan_is_named(local_files: Files, commits: list[Node]):
    path = PurePosixPath(commits[1].files[-1].path)
    folder = Plans.groups_prefix(commits[0].parents["plan"])
    url = copy(local_files, str(path), f"{folder}/{path.name}")
    [(rule, where, problem)] = found(local_files)
    assert (rule, where) == ("files", url) and "which its plan does not draw" in problem


def test_bytes_that_do_not_match_their_name_are_named(local_files: Files, commits: list[Node]):
    path = PurePosixPath(commits[1].files[-1].path)
    local_files.create(
        f"{path.parent}/{ATTEMPT}-00000-{'0' * 16}.parquet", local_files.read(str(path))
    )
    assert [problem.split(":")[0] for _, _, problem in found(local_files)] == [
        "its bytes do not match its name"
    ]


@pytest.mark.parametrize("stage", [Stage.REWARD, Stage.ADVANTAGE, Stage.TRAIN])
def test_a_copy_of_a_node_s_file_is_named(local_files: Files, commits: list[Node], stage: Stage):
    commit = Branches(local_files).read("run", 1)
    path = PurePosixPath(Nodes(local_files).get(stage, commit.nodes[stage]).files[0].path)
    urls = {
        copy(local_files, str(path), f"{path.parent}/{name}{path.suffix}")
        for name in ("copy", f"again-{path.stem[-16:]}")
    }
    reported = found(local_files)
    assert {where for _, where, _ in reported} == urls and {rule for rule, _, _ in reported} == {
        "files"
    }


def test_files_of_a_killed_attempt_are_no_finding(local_files: Files, commits: list[Node]):
    commit = Branches(local_files).read("run", 1)
    folder = f"data/reward/{commit.nodes[Stage.REWARD]}"
    rows = [Reward(one, index, reward=0.5) for one in commit.trained for index in range(2)]
    write_table(local_files, folder, "rewards", rewards_to_table(rows))
    assert found(local_files) == []


def test_an_unexpected_file_of_a_checkpoint_is_named(local_files: Files, commits: list[Node]):
    weights = Branches(local_files).read("run", 1).nodes[Stage.TRAIN]
    prefix = "checkpoints/run/iter_0000002/0123456789ab"
    records = []
    for name in (".metadata", "__0_0.distcp", "critic/.metadata"):
        local_files.create(f"{prefix}/{name}", name.encode())
        size = local_files.size(f"{prefix}/{name}")
        sha256 = local_files.sha256(f"{prefix}/{name}")
        records.append({"path": f"{prefix}/{name}", "size_bytes": size, "sha256": sha256})
    node = make_node(Stage.CHECKPOINT, {"weights": weights})
    Nodes(local_files).commit(Node.model_validate({**node.model_dump(), "files": records}))
    local_files.create(
        "checkpoints/run/iter_0000002/ba9876543210/__0_0.distcp", b"of an upload that was killed"
    )
    assert found(local_files) == []
    url = copy(local_files, f"{prefix}/__0_0.distcp", f"{prefix}/__0_0.distcp.bak")
    assert [where for _, where, _ in found(local_files)] == [url]


@pytest.mark.parametrize(
    "name",
    ["branches/run/00000001.json.bak", "branches/run/old/00000001.json", "rollouts/run/1.json"],
)
def test_an_unexpected_file_among_the_records_of_a_run_is_named(
    local_files: Files, commits: list[Node], name: str
):
    url = copy(local_files, "branches/run/00000001.json", name)
    assert [(rule, where) for rule, where, _ in found(local_files)] == [("records", url)]


def test_shards_of_an_active_iteration_are_not_checked(local_files: Files, commits: list[Node]):
    newest = Branches(local_files).newest("run")
    assert newest is not None
    digest = Plans(local_files).write(TimedRun(local_files).plan(3, newest.data))
    shard_of(local_files, digest, [timed(f"run:{newest.data.draws:08d}")])
    assert len(adopt(local_files, Plans.groups_prefix(digest))) == 1 and found(local_files) == []
