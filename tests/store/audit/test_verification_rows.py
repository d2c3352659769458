"""The audit of rows and files: unplanned rows, rows of no rollout, and a history with a gap."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rlpipe.errors import ObjectCorrupt
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes, node_path
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.arrays import from_ragged, ragged
from rlpipe.store.parquet.rows import rewards_to_table
from rlpipe.store.parquet.shards import ShardWriter, data_folder, write_data, write_table
from rlpipe.store.plans import Plans
from rlpipe.store.records import seal
from rlpipe.store.segments import Segments
from rlpipe.types import FileRecord, Node, Stage
from tests.store.lineage import Reward, Run, batch_table, group, make_node


class ForeignRun(Run):
    """A run whose stages have foreign rows."""

    stage = Stage.ROLLOUT

    def stage_files(
        self, node: Node, shards: list[FileRecord], trained: list[str]
    ) -> list[FileRecord]:
        usual = super().stage_files(node, shards, trained)
        if node.stage is not self.stage:
            return usual
        folder = data_folder(node.stage, node.digest)
        if node.stage is Stage.ROLLOUT:
            return [
                *usual,
                ShardWriter(self.files, Plans.groups_prefix("0" * 64), 0).write(
                    [group("stranger")]
                ),
            ]
        if node.stage is Stage.REWARD:
            return [
                *usual,
                write_table(self.files, folder, "more", rewards_to_table([Reward(trained[0], 7)])),
            ]
        table = batch_table(trained)
        tokens, offsets = ragged(table["tokens"])
        changed = from_ragged(np.concatenate([[9], tokens[1:]]), offsets, pa.int32())
        place = table.schema.get_field_index("tokens")
        return [
            write_table(
                self.files,
                folder,
                "batch",
                table.set_column(place, table.schema.field("tokens"), changed),
            )
        ]


@pytest.mark.parametrize(
    ("stage", "found"),
    [
        (Stage.ROLLOUT, "row stranger/0: its group was not planned"),
        (Stage.REWARD, "row run:00000001/7: no such row in the rollout"),
        (Stage.ADVANTAGE, "row run:00000001/0: its tokens are not those of the rollout"),
    ],
)
def test_a_foreign_row_is_found_and_named(local_files: Files, stage: Stage, found: str):
    run = ForeignRun(local_files)
    run.stage = stage
    run.start().iterate()
    findings = check_branch(local_files, "run")
    assert ("foreign", f"run/00000000 {stage}", found) in [tuple(finding) for finding in findings]
    assert {finding.rule for finding in findings} == {"foreign"}


def test_a_flipped_byte_of_a_shard_is_found_and_named(local_files: Files):
    run = Run(local_files).start()
    for _ in range(3):
        run.iterate()
    commit = Branches(local_files).read("run", 1)
    shard = Nodes(local_files).get(Stage.ROLLOUT, commit.nodes[Stage.ROLLOUT]).files[0]
    path = Path(local_files.url(shard.path).removeprefix("file://"))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(bytes(data))
    found = [finding for finding in check_branch(local_files, "run") if finding.rule == "files"]
    assert {finding.where for finding in found} == {local_files.url(shard.path)}
    assert "sha256" in found[0].problem


def test_a_deleted_commit_is_named_and_what_follows_is_still_checked(local_files: Files):
    run = Run(local_files).start()
    for _ in range(4):
        run.iterate()
    local_files.delete("branches/run/00000001.json")
    newest = Branches(local_files).read("run", 3)
    local_files.delete(node_path(Stage.TRAIN, newest.nodes[Stage.TRAIN]))
    found = [(finding.rule, finding.where) for finding in check_branch(local_files, "run")]
    assert found == [("records", "run/00000001"), ("records", "run/00000003 train")]


def test_a_checkpoint_and_an_evaluation_of_the_weights_are_checked(local_files: Files):
    commit = Run(local_files).start().iterate()
    assert commit is not None
    weights = commit.nodes[Stage.TRAIN]
    kept = write_data(local_files, "checkpoints/run/iter_0000001", "weights.distcp", b"weights")
    measured = write_data(local_files, "data/eval/e", "figures.json", b"{}")
    Nodes(local_files).commit(make_node(Stage.CHECKPOINT, {"weights": weights}, [kept]))
    Nodes(local_files).commit(
        make_node(Stage.EVAL, {"weights": weights}, [measured], dataset="heldout")
    )
    assert check_branch(local_files, "run") == []
    for record in (kept, measured):
        path = Path(local_files.url(record.path).removeprefix("file://"))
        path.write_bytes(path.read_bytes()[::-1])
    assert {finding.where for finding in check_branch(local_files, "run")} == {
        local_files.url(kept.path),
        local_files.url(measured.path),
    }


def test_a_segment_without_its_node_is_found(local_files: Files):
    commit = Run(local_files).start().iterate()
    assert commit is not None
    Segments(local_files).record("run", 1, 1, weights=commit.nodes[Stage.TRAIN], segment="5" * 64)
    assert [(f.rule, f.where) for f in check_branch(local_files, "run")] == [
        ("records", "segments of run: version 1")
    ]


@pytest.mark.parametrize(
    "change",
    [{"iteration": 1}, {"branch": "other"}, {"parent": "run/00000002"}, {"parent": "nowhere"}],
)
def test_a_commit_under_the_name_of_another_is_corrupt(local_files: Files, change: dict):
    run = Run(local_files).start()
    for _ in range(3):
        run.iterate()
    path = "branches/run/00000002.json"
    commit = Branches(local_files).read("run", 2).model_copy(update=change)
    local_files.delete(path)
    local_files.create(path, seal(commit, path))
    with pytest.raises(ObjectCorrupt, match="another commit"):
        Branches(local_files).read("run", 2)
    assert [(f.rule, f.where) for f in check_branch(local_files, "run")] == [
        ("records", "run/00000002")
    ]


def test_a_branch_under_another_name_is_corrupt(local_files: Files):
    Run(local_files).start()
    local_files.create("branches/copy/config.json", local_files.read("branches/run/config.json"))
    with pytest.raises(ObjectCorrupt, match="another branch"):
        Branches(local_files).get("copy")


@pytest.mark.parametrize(
    "outputs", [{"accepted": 7}, {"dropped": ["a"]}, {"plans": {"a": 1}}, {"after": None}]
)
def test_malformed_outputs_are_a_finding(local_files: Files, outputs: dict):
    commit = Run(local_files).start().iterate()
    assert commit is not None
    path = node_path(Stage.ROLLOUT, commit.nodes[Stage.ROLLOUT])
    content = json.loads(local_files.read(path))
    content.pop("sha256")
    local_files.delete(path)
    local_files.create(path, seal(Node.model_validate({**content, "outputs": outputs}), path))
    assert any(
        "the outputs of the rollout are malformed" in finding.problem
        for finding in check_branch(local_files, "run")
    )


def test_progress_is_reported_for_every_iteration(local_files: Files):
    run = Run(local_files).start()
    for _ in range(3):
        run.iterate()
    told: list[tuple[int, int]] = []
    check_branch(local_files, "run", lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
