"""The tables over a branch, SQL queries, and anomalies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing
from rlpipe.store.audit import anomalies
from rlpipe.store.audit.anomalies import Anomaly, Limits, find_anomalies
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.gc import unreachable
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import rewards_to_table
from rlpipe.store.parquet.shards import data_folder, write_table
from rlpipe.store.tables import scalars
from rlpipe.store.tables.query import run_query
from rlpipe.types import FileRecord, Node, Sample, Stage, Status
from tests.store.lineage import Reward, Run, make_node


def a_run(files: Files, iterations: int, branch: str = "run") -> Run:
    run = Run(files, branch).start()
    for _ in range(iterations):
        run.iterate()
    return run


def names(files: Files, branch: str = "run") -> list[str]:
    return [
        path.rpartition("/")[2][:17] for path in files.list(f"branches/{branch}/scalars/samples")
    ]


def test_every_sample_is_a_row_with_its_outcome(files: Files):
    a_run(files, 2)
    assert scalars.update(files, "run") == 2
    rows = scalars.read(files, "run").to_pylist()
    first = [row for row in rows if row["iteration"] == 0]
    assert [(row["group_id"], row["trained"]) for row in first[::2]] == [
        ("run:00000000", False),
        ("run:00000001", True),
        ("run:00000002", True),
    ]
    assert (
        first[2]["reward"] == 1.0
        and first[2]["advantage"] == 0.0
        and first[2]["response_tokens"] == 3
    )
    assert {row["drop_reason"] for row in rows if row["group_id"] == "run:00000004"} == {"filtered"}
    assert first[0]["advantage"] is None and first[0]["staleness"] == 0
    assert check_branch(files, "run") == []
    assert unreachable(files, grace_s=-60) == []


def test_an_update_adds_new_iterations_and_merges_blocks(
    local_files: Files, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scalars, "BLOCKS", (2, 4))
    run = a_run(local_files, 1)
    assert scalars.update(local_files, "run") == 1
    assert scalars.update(local_files, "run") == 0
    for _ in range(6):
        run.iterate()
        scalars.update(local_files, "run")
    assert names(local_files) == ["00000000-00000004", "00000004-00000006", "00000006-00000007"]
    assert sorted(set(scalars.read(local_files, "run")["iteration"].to_pylist())) == list(range(7))
    assert scalars.read(local_files, "run").num_rows == len(
        run_query(local_files, "run", "select * from samples")
    )


def test_an_update_does_not_list_the_branch_again_and_fills_gaps(tmp_path: Path):
    class Noting(Files):
        listed: list[str]

        def list(self, prefix: str = "") -> Any:
            self.listed.append(prefix)
            return super().list(prefix)

    files = Noting(tmp_path / "store")
    files.listed = []
    run = a_run(files, 3)
    assert scalars.update(files, "run") == 3
    run.iterate()
    run.iterate()
    assert scalars.update(files, "run") == 2
    run.iterate()
    files.listed.clear()
    assert scalars.update(files, "run") == 1
    assert set(files.listed) == {"branches/run/scalars/samples", "branches/run/scalars/metrics"}
    for path in [
        path for path in files.list("branches/run/scalars") if "/00000003-00000005-" in path
    ]:
        files.delete(path)
    assert scalars.update(files, "run") == 2
    assert set(scalars.read(files, "run")["iteration"].to_pylist()) == set(range(6))
    fork = Run(files, "fork").start(parent="run/00000003")
    for number in range(3):
        fork.iterate()
        assert scalars.update(files, "fork") == 1, number


def test_a_table_of_uncommitted_iterations_hides_no_committed_one(local_files: Files):
    run = a_run(local_files, 2)
    scalars.update(local_files, "run")
    for table in scalars.TABLES:
        scalars._write(local_files, "run", table, 500, 501, scalars.TABLES[table].empty_table())
    run.iterate()
    assert scalars.update(local_files, "run") == 1


def test_a_read_computes_missing_rows_and_writes_nothing(
    local_files: Files,
):
    run = a_run(local_files, 3)
    scalars.update(local_files, "run")
    for _ in range(2):
        run.iterate()
    [behind] = [path for path in local_files.list() if "/scalars/metrics/" in path]
    local_files.delete(behind)
    Run(local_files, "fork").start(parent="run/00000003").iterate()
    before = local_files.list()
    rows = [scalars.read(local_files, "fork", table) for table in ("samples", "metrics")]
    assert local_files.list() == before
    for branch in ("run", "fork"):
        scalars.update(local_files, branch)
    assert rows == [scalars.read(local_files, "fork", table) for table in ("samples", "metrics")]
    assert sorted(set(rows[0]["iteration"].to_pylist())) == list(range(5))


def test_one_iteration_in_two_files_counts_once(local_files: Files):
    run = a_run(local_files, 3)
    scalars.update(local_files, "run")
    kept = {path: local_files.read(path) for path in local_files.list("branches/run/scalars")}
    for path in kept:
        local_files.delete(path)
    run.iterate()
    scalars.update(local_files, "run")
    for path, data in kept.items():
        local_files.create(path, data)
    assert names(local_files) == ["00000000-00000003", "00000000-00000004"]
    assert (
        scalars.read(local_files, "run").num_rows
        == scalars.read(local_files, "run")
        .group_by(["iteration", "group_id", "index"])
        .aggregate([])
        .num_rows
    )
    scalars.update(local_files, "run")
    assert names(local_files) == ["00000000-00000004"]


def test_a_fork_has_the_history_of_its_parent_up_to_the_fork(local_files: Files):
    a_run(local_files, 4)
    fork = Run(local_files, "fork").start(parent="run/00000001")
    fork.iterate()
    assert scalars.update(local_files, "fork") == 1
    rows = scalars.read(local_files, "fork")
    assert sorted(
        set(zip(rows["branch"].to_pylist(), rows["iteration"].to_pylist(), strict=True))
    ) == [
        ("fork", 2),
        ("run", 0),
        ("run", 1),
    ]


def test_concurrent_updates_agree(local_files: Files, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scalars, "BLOCKS", (2, 4))
    a_run(local_files, 5)
    threads = [threading.Thread(target=scalars.update, args=(local_files, "run")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    scalars.update(local_files, "run")
    assert names(local_files) == ["00000000-00000004", "00000004-00000005"]


def test_a_damaged_table_is_named_and_can_be_computed_again(local_files: Files):
    a_run(local_files, 2)
    scalars.update(local_files, "run")
    [path] = local_files.list("branches/run/scalars/samples")
    file = Path(local_files.url(path).removeprefix("file://"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ObjectCorrupt, match="do not match its name"):
        scalars.read(local_files, "run")
    local_files.delete(path)
    scalars.update(local_files, "run")
    assert scalars.read(local_files, "run").num_rows == 14


def test_queries_run_over_tables_and_shards(files: Files):
    a_run(files, 3)
    counted = run_query(
        files,
        "run",
        "SELECT iteration, count(*) FILTER (trained) AS n FROM samples GROUP BY 1 ORDER BY 1",
    )
    assert counted.to_pylist() == [
        {"iteration": 0, "n": 4},
        {"iteration": 1, "n": 4},
        {"iteration": 2, "n": 6},
    ]
    joined = (
        "SELECT prompt, advantages FROM texts JOIN batch "
        "USING (branch, iteration, group_id, index) ORDER BY group_id"
    )
    assert run_query(files, "run", joined, range(1)).to_pylist()[0] == {
        "prompt": '"prompt of run:00000001"',
        "advantages": [0.0, 0.0, 0.0],
    }
    assert run_query(files, "run", "SELECT sum(groups_trained) AS n FROM commits").to_pylist() == [
        {"n": 7}
    ]


@pytest.mark.parametrize(
    "question",
    ["nonsense", "SELECT * FROM '/etc/passwd'", "SET threads = 2", "SELECT * FROM nothing"],
)
def test_an_invalid_query_is_refused(local_files: Files, question: str):
    a_run(local_files, 1)
    with pytest.raises(ConfigError, match="sql: "):
        run_query(local_files, "run", question)
    with pytest.raises(ObjectMissing):
        run_query(local_files, "absent", "SELECT 1")


class OddRun(Run):
    """A run whose iteration 1 has an unusual value."""

    odd = "none"

    def stage_files(
        self, node: Node, shards: list[FileRecord], trained: list[str]
    ) -> list[FileRecord]:
        if node.stage is Stage.REWARD and self.odd == "reward_errors" and self.next == 1:
            rows = [
                Reward(group, n, None, {}, "the verifier fell over")
                for group in trained
                for n in range(2)
            ]
            return [
                write_table(
                    self.files,
                    data_folder(node.stage, node.digest),
                    "rewards",
                    rewards_to_table(rows),
                )
            ]
        return super().stage_files(node, shards, trained)

    @property
    def next(self) -> int:
        newest = Branches(self.files).newest(self.branch)
        return newest.iteration + 1 if newest else 0


def test_reward_errors_and_equal_rewards_are_unusual(local_files: Files):
    run = OddRun(local_files)
    run.odd = "reward_errors"
    run.start()
    for _ in range(3):
        run.iterate()
    found = {(one.rule, one.iteration) for one in find_anomalies(local_files, "run")}
    assert ("reward_errors", 1) in found and ("reward_errors", 0) not in found
    assert ("no_signal", 0) in found, "all rewards are 1"


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("truncated", {"status": Status.TRUNCATED}),
        ("failed", {"status": Status.FAILED}),
        ("stale", {"weight_versions": [(3, -1)]}),
        ("empty", {"response_ids": [], "rollout_log_probs": [], "weight_versions": []}),
    ],
)
def test_unusual_samples_are_found(
    local_files: Files, monkeypatch: pytest.MonkeyPatch, rule: str, changes: dict
):
    from tests.store import lineage

    plain = lineage.sample

    def changed(group_id: str, index: int) -> Sample:
        made = plain(group_id, index)
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    monkeypatch.setattr(lineage, "sample", changed)
    a_run(local_files, 1)
    found = {one.rule: one for one in find_anomalies(local_files, "run", Limits(no_signal=1.0))}
    assert set(found) == {rule}
    assert found[rule][1:3] == ("run", 0)


def test_the_configuration_of_the_branch_that_made_an_iteration_decides_its_limits(
    local_files: Files,
):
    """The shared history follows the limits of its own branch: the weights of iteration 3 are 3
    versions newer than its tokens."""
    init = Nodes(local_files).commit(make_node(Stage.INIT, {}, model="tiny")).digest
    for branch, parent, allowed in (
        ("run", None, 3),
        ("fork", "run/00000003", 0),
        ("loose", "fork/00000004", 9),
    ):
        Branches(local_files).create(branch, {"async_buffer_size": allowed}, init, parent)
        for _ in range(4 if branch == "run" else 1):
            Run(local_files, branch).iterate()
    stale = {
        one.iteration: one.branch
        for one in find_anomalies(local_files, "loose")
        if one.rule == "stale"
    }
    assert stale == {4: "fork"}


def test_drift_and_jumps_are_found(local_files: Files, monkeypatch: pytest.MonkeyPatch):
    a_run(local_files, 12)
    plain = scalars.read

    def drifting(files: Files, branch: str, table: str = "samples", **options: bool) -> pa.Table:
        rows = plain(files, branch, table, **options)
        if table == "metrics":
            values = {
                "iteration": list(range(12)),
                "value": [1.0 + 0.1 * (k % 2) for k in range(11)] + [9.0],
            }
            return pa.table({"branch": ["run"] * 12, "name": ["train/grad_norm"] * 12, **values})
        differences = pa.array(
            [0.5 if k == 3 else 1e-4 for k in rows["iteration"].to_pylist()], pa.float32()
        )
        return rows.set_column(
            rows.schema.get_field_index("logprob_difference"), "logprob_difference", differences
        )

    monkeypatch.setattr(scalars, "read", drifting)
    found = find_anomalies(local_files, "run", Limits(no_signal=1.0))
    found = [one for one in found if one.rule != "stale"]
    assert [(one.rule, one.iteration) for one in found] == [("drift", 3), ("grad_norm", 11)]
    assert found[1] == Anomaly("grad_norm", "run", 11, 9.0, found[1].usual)


def test_a_file_that_is_listed_and_written_at_once_does_not_cover_itself(local_files: Files):
    a_run(local_files, 2)
    scalars.update(local_files, "run")
    [part] = scalars.parts_of(local_files, "run", "samples")
    assert scalars._delete_covered(local_files, [part, part]) == [part]
    assert local_files.exists(part.path)


def test_iterations_with_a_gap_between_them_are_separate_files():
    assert list(scalars._chunks([0, 1, 3, 15, 16, 17])) == [[0, 1], [3], [15], [16, 17]]


def test_tokens_that_are_masked_for_their_age_are_not_unusual(local_files: Files):
    a_run(local_files, 1)
    scalars.update(local_files, "run")
    rows = scalars.read(local_files, "run")
    older = rows.set_column(
        rows.schema.get_field_index("staleness"),
        "staleness",
        pa.array([3] * rows.num_rows, pa.int32()),
    )

    _, _, columns = next(anomalies.by_iteration(older))

    def rules(config: dict[str, Any]) -> set[str]:
        return {one.rule for one in anomalies._in_trained("run", 0, columns, config, Limits())}

    assert rules({"async_buffer_size": 2}) == {"stale"}
    assert (
        rules({"async_buffer_size": 3})
        == rules({"rollout": {"mask_offpolicy_in_partial_rollout": True}})
        == set()
    )


def test_groups_of_one_sample_are_not_without_signal():
    def columns(*groups: str) -> dict[str, np.ndarray]:
        number = len(groups)
        values = {
            "status": ["completed"] * number,
            "error": [None] * number,
            "reward": [1.0] * number,
        }
        flags = {"response_tokens": [3] * number, "trained": [True] * number, "group_id": groups}
        return {
            name: np.array(value, object if name in ("group_id", "error") else None)
            for name, value in {**values, **flags}.items()
        }

    assert anomalies.shares(columns("a", "b"))["no_signal"] == 0.0
    assert anomalies.shares(columns("a", "a", "b", "b"))["no_signal"] == 1.0
