"""Notes of iterations without a commit (rlpipe.store.notes), and garbage collection with notes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rlpipe.config.run import RunConfig
from rlpipe.errors import ObjectCorrupt, ObjectMissing
from rlpipe.lineage.rollouts import find
from rlpipe.reprocess.branch import Reprocessor
from rlpipe.store.branches import Branches
from rlpipe.store.gc import unreachable
from rlpipe.store.nodes import node_path
from rlpipe.store.notes import note_path, noted_iterations, read_note, write_note
from rlpipe.store.objects.files import Files
from rlpipe.store.records import digest
from rlpipe.types import RECORD_FORMAT, Stage
from tests.reprocessed import FILTER, History, configuration


def test_the_first_note_wins_and_is_returned(local_files: Files):
    assert write_note(local_files, "run", 3, {Stage.ROLLOUT: "a"}) == {Stage.ROLLOUT: "a"}
    assert write_note(local_files, "run", 3, {Stage.ROLLOUT: "b"}) == {Stage.ROLLOUT: "a"}
    assert read_note(local_files, "run", 3) == {Stage.ROLLOUT: "a"}
    assert noted_iterations(local_files, "run") == [3]
    with pytest.raises(ObjectMissing):
        read_note(local_files, "run", 4)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"rollout": "a"}', "\xff", '{"rollout":' * 100_000]
)
def test_a_malformed_note_is_named(local_files: Files, text: str):
    local_files.create(note_path("run", 0), text.encode("latin-1"))
    with pytest.raises(ObjectCorrupt, match="not a readable note record") as caught:
        read_note(local_files, "run", 0)
    assert "delete it and run" in str(caught.value)


@pytest.mark.parametrize("nodes", [{"rollout": 1}, {"sleep": "a"}])
def test_a_sealed_note_with_other_keys_is_named(local_files: Files, nodes: dict[str, object]):
    content = {"format": RECORD_FORMAT, "branch": "run", "iteration": 0, "nodes": nodes}
    local_files.create(
        note_path("run", 0), json.dumps({**content, "sha256": digest(content, "x")}).encode()
    )
    with pytest.raises(ObjectCorrupt, match="not a readable note record"):
        read_note(local_files, "run", 0)


def test_any_changed_byte_of_a_note_is_found(local_files: Files, tmp_path: Path):
    write_note(local_files, "run", 0, {Stage.ROLLOUT: "ab" * 32})
    file = tmp_path / "store" / note_path("run", 0)
    good = file.read_bytes()
    for place in range(len(good) - 1):  # the last is the end of the line
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(ObjectCorrupt):
            read_note(local_files, "run", 0)


def test_a_note_under_another_name_is_named(local_files: Files):
    write_note(local_files, "run", 0, {Stage.ROLLOUT: "a"})
    for run, k in (("run", 1), ("other", 0)):
        local_files.create(note_path(run, k), local_files.read(note_path("run", 0)))
        with pytest.raises(ObjectCorrupt, match="the note belongs to another iteration"):
            read_note(local_files, run, k)


def test_objects_that_notes_name_are_not_collected(local_files: Files, tmp_path: Path):
    config = configuration(tmp_path, groups=6)
    History(local_files, config).iterate()
    values = config.model_dump(mode="json")
    values["rollout"]["dynamic_sampling_filter_path"] = FILTER
    new = RunConfig.model_validate({**values, "run": "new"})
    stored = find(local_files, "run", 0)
    assert stored is not None

    async def reprocess() -> None:
        async with Reprocessor(local_files, new) as reprocessor:
            await reprocessor.iteration(stored)

    asyncio.run(reprocess())
    nodes = read_note(local_files, "new", 0)
    judged = json.loads(local_files.read(node_path(Stage.ROLLOUT, nodes[Stage.ROLLOUT])))["config"][
        "judged_by"
    ]
    new_ones = {node_path(stage, digest) for stage, digest in nodes.items()} | {
        node_path(Stage.REWARD, judged)
    }
    assert new_ones <= set(unreachable(local_files, -60)), "the branch does not exist yet"
    Branches(local_files).create("new", values, Branches(local_files).get("run").init)
    assert unreachable(local_files, -60) == []
