"""Segments: states that a replay made, and the state of a branch at a weight version
(store.segments)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rlpipe.errors import ObjectCorrupt
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments, current_state, segment_problem
from rlpipe.types import Stage
from tests.store.lineage import make_node


@pytest.fixture
def segments(tmp_path) -> Segments:
    return Segments(Files(tmp_path))


def test_without_a_segment_the_recorded_state_counts(segments: Segments):
    assert current_state(segments, "run", 3, "train") == "train"
    assert segments.of("run") == []


def test_a_segment_counts_for_its_weight_version_and_the_state_it_replaced(segments: Segments):
    segments.record("run", 3, 1, weights="train", segment="made")
    assert current_state(segments, "run", 3, "train") == "made"
    assert current_state(segments, "run", 3, "other train") == "other train"
    assert current_state(segments, "run", 4, "train") == "train"
    assert current_state(segments, "run2", 3, "train") == "train"


def test_in_one_epoch_the_first_segment_counts(segments: Segments):
    assert segments.record("run", 3, 1, weights="train", segment="first").segment == "first"
    assert segments.record("run", 3, 1, weights="train", segment="second").segment == "first"
    assert current_state(segments, "run", 3, "train") == "first"


def test_the_segment_of_the_newest_epoch_counts_in_any_order(segments: Segments):
    for epoch in (2, 11, 9):
        segments.record("run", 3, epoch, weights="train", segment=f"of {epoch}")
    assert current_state(segments, "run", 3, "train") == "of 11"
    assert [segment.segment for segment in segments.of("run")] == ["of 2", "of 9", "of 11"]


def test_all_racing_writers_of_a_segment_get_the_first_one(segments: Segments):
    def record(number: int) -> str:
        return segments.record("run", 3, 1, weights="train", segment=f"made {number}").segment

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(record, range(16)))) == 1


def node(nodes: Nodes, stage: Stage, **parents: str) -> str:
    return nodes.commit(make_node(stage, parents)).digest


def test_a_valid_segment_replaces_a_state_of_the_branch(tmp_path):
    nodes = Nodes(Files(tmp_path))
    train = node(nodes, Stage.TRAIN, before="init")
    first = node(nodes, Stage.SEGMENT, weights=train, base="init")
    assert segment_problem(nodes, first, {"init", train}) == f"segment {first} has no checkpoint"
    saved = node(nodes, Stage.CHECKPOINT, weights=first)
    assert segment_problem(nodes, first, {"init", train}) is None
    assert "which is not on this branch" in str(segment_problem(nodes, first, {"init"}))
    assert "which is not a checkpoint" in str(segment_problem(nodes, first, {train}))
    assert "is not a segment" in str(segment_problem(nodes, "other", {"init", train}))
    later = node(nodes, Stage.TRAIN, before=first)
    second = node(nodes, Stage.SEGMENT, weights=later, base=saved)
    node(nodes, Stage.CHECKPOINT, weights=second)
    assert segment_problem(nodes, second, {"init", train, later}) is None, (
        "trained again from the first segment"
    )
    assert "which is not on this branch" in str(segment_problem(nodes, second, {"init", later}))


def test_a_changed_pointer_is_corrupt(segments: Segments, tmp_path):
    segments.record("run", 3, 1, weights="train", segment="made")
    (path,) = (tmp_path / "branches/run/segments").iterdir()
    path.write_bytes(path.read_bytes().replace(b"made", b"mode"))
    with pytest.raises(ObjectCorrupt):
        current_state(segments, "run", 3, "train")
