"""The audit of iterations without a commit: reprocessed with other filters, rewards or estimators,
or only sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.run import RunConfig
from rlpipe.lineage.rollouts import find
from rlpipe.reprocess.branch import Reprocessor
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes, node_path
from rlpipe.store.notes import note_path, read_note, write_note
from rlpipe.store.objects.files import Files
from rlpipe.types import Node, Stage
from tests.reprocessed import FILTER, History, configuration

ROLLOUT = Stage.ROLLOUT
REWARD = Stage.REWARD
ADVANTAGE = Stage.ADVANTAGE


def reprocessed(
    files: Files, config: RunConfig, run: str, *iterations: int, of: str = "run", **sections: Any
) -> None:
    """Reprocess the branch `run` with these iterations."""
    values = {
        **config.model_dump(mode="json"),
        "run": run,
        "debug": {"load_debug_rollout_data": of},
    }
    for section, own in sections.items():
        values[section] = {**values[section], **own}
    new = RunConfig.model_validate(values)
    parent = f"run/{iterations[0] - 1:08d}" if iterations[0] else None
    Branches(files).create(
        run, new.model_dump(mode="json"), Branches(files).get("run").init, parent
    )

    async def all_of() -> None:
        async with Reprocessor(files, new) as reprocessor:
            for k in iterations:
                stored = find(files, of, k)
                assert stored is not None
                await reprocessor.iteration(stored)

    asyncio.run(all_of())


@pytest.fixture
def config(local_files: Files, tmp_path: Path) -> RunConfig:
    """Return the configuration of a run of four iterations."""
    config = configuration(tmp_path, groups=6)
    History(local_files, config).iterate(4)
    return config


def test_reprocessed_branches_have_no_findings(local_files: Files, config: RunConfig):
    reprocessed(
        local_files, config, "filtered", 0, 1, rollout={"dynamic_sampling_filter_path": FILTER}
    )
    reprocessed(local_files, config, "estimated", 2, 3, advantage={"advantage_estimator": "rloo"})
    reprocessed(
        local_files, config, "again", 3, of="estimated", advantage={"advantage_estimator": "grpo"}
    )
    for run in ("run", "filtered", "estimated", "again"):
        assert check_branch(local_files, run) == []


def flip(files: Files, path: str) -> None:
    file = Path(files.url(path).removeprefix("file://"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def of(files: Files, run: str, k: int, stage: Stage) -> Node:
    return Nodes(files).get(stage, read_note(files, run, k)[stage])


@pytest.mark.parametrize(
    ("damage", "rule", "where"),
    [
        (
            lambda files: flip(files, of(files, "new", 1, REWARD).files[0].path),
            "files",
            "data/reward",
        ),
        (
            lambda files: flip(files, of(files, "new", 1, ADVANTAGE).files[0].path),
            "files",
            "data/advantage",
        ),
        (lambda files: flip(files, note_path("new", 1)), "records", "new/00000001"),
        (
            lambda files: files.delete(node_path(REWARD, read_note(files, "new", 1)[REWARD])),
            "records",
            "new/00000001 reward",
        ),
        (
            lambda files: files.delete(node_path(ROLLOUT, read_note(files, "new", 1)[ROLLOUT])),
            "records",
            "new/00000001 rollout",
        ),
        (
            lambda files: files.delete(
                node_path(REWARD, of(files, "new", 1, ROLLOUT).config["judged_by"])
            ),
            "records",
            "new/00000001 judged by",
        ),
    ],
)
def test_damage_of_a_reprocessed_branch_is_named(
    local_files: Files, config: RunConfig, damage: Callable[[Files], None], rule: str, where: str
):
    reprocessed(
        local_files, config, "new", 0, 1, 2, rollout={"dynamic_sampling_filter_path": FILTER}
    )
    damage(local_files)
    found = check_branch(local_files, "new")
    assert (found[0].rule, where in found[0].where) == (rule, True)
    assert all("/00000001" in one.where or where in one.where for one in found), found
    assert check_branch(local_files, "run") == []


def sampled(files: Files) -> None:
    """Replace the commits of the run by notes, as of a run that only sampled."""
    branches = Branches(files)
    record = branches.get("run")
    commits = [branches.read("run", k) for k in range(4)]
    for name in files.list("branches/run"):
        files.delete(name)
    Branches(files).create(
        "run", {**record.config, "debug": {"debug_rollout_only": True}}, record.init
    )
    for commit in commits:
        write_note(
            files,
            "run",
            commit.iteration,
            {stage: commit.nodes[stage] for stage in (ROLLOUT, REWARD)},
        )


def test_every_group_of_a_run_that_only_sampled_is_accounted_for(
    local_files: Files, config: RunConfig
):
    sampled(local_files)
    told: list[tuple[int, int]] = []
    assert check_branch(local_files, "run", lambda done, total: told.append((done, total))) == []
    assert told == [(k + 1, 4) for k in range(4)]
    node = of(local_files, "run", 1, ROLLOUT)
    lost, *accepted = node.outputs["accepted"]
    path = node_path(ROLLOUT, node.digest)
    local_files.delete(path)
    Nodes(local_files).commit(
        node.model_copy(update={"outputs": {**node.outputs, "accepted": accepted}})
    )
    found = check_branch(local_files, "run")
    assert [tuple(one) for one in found] == [
        ("accounted", "run/00000001", f"{lost} is neither trained nor dropped nor buffered")
    ]


def test_a_rollout_that_is_noted_twice_is_named(local_files: Files, config: RunConfig):
    sampled(local_files)
    again = read_note(local_files, "run", 1)
    local_files.delete(note_path("run", 2))
    write_note(local_files, "run", 2, again)
    found = {(one.rule, one.where) for one in check_branch(local_files, "run")}
    assert {
        ("drawn", "run/00000002"),
        ("cursor", "run/00000002"),
        ("batches", "run/00000002"),
    } <= found


def test_iterations_after_a_missing_one_are_checked_one_by_one(
    local_files: Files, config: RunConfig
):
    reprocessed(local_files, config, "new", 1, 3, reward={"custom_reward_post_process_path": None})
    assert check_branch(local_files, "new") == []
    flip(local_files, of(local_files, "new", 3, REWARD).files[0].path)
    assert [one.rule for one in check_branch(local_files, "new")] == ["files"]


def test_a_source_that_cannot_be_read_is_a_finding(local_files: Files, config: RunConfig):
    reprocessed(local_files, config, "new", 0, 1, advantage={"advantage_estimator": "rloo"})
    local_files.delete("branches/run/config.json")
    local_files.create("branches/run/config.json", b"{}")
    found = check_branch(local_files, "new")
    assert {one.rule for one in found} == {"records"}
    assert any("branches/run/config.json" in one.problem for one in found)
