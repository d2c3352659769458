"""The way to a state: the newest checkpoint before it, and the train nodes since (rlpipe.lineage)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.errors import ObjectMissing
from rlpipe.inputs import Inputs, checkpoint_inputs
from rlpipe.lineage import Lineage, lineage_to
from rlpipe.store.files import Files
from rlpipe.store.nodes import Nodes, node_path
from rlpipe.types import Stage

INIT = "init-of-the-branch"


def train(nodes: Nodes, before: str, number: int) -> str:
    """A train node after `before`."""
    return nodes.commit(Inputs(Stage.TRAIN, {"before": before, "advantage": f"batch {number}"}).node()).digest


def history(nodes: Nodes, length: int) -> list[str]:
    """A chain of train nodes; the init node's digest, then theirs."""
    chain = [INIT]
    for number in range(length):
        chain.append(train(nodes, chain[-1], number))
    return chain


def save(nodes: Nodes, weights: str) -> str:
    return nodes.commit(checkpoint_inputs(weights).node()).digest


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(Files(tmp_path / "store"))


def test_the_first_weights_are_their_own_base(nodes: Nodes):
    lineage = lineage_to(nodes, INIT, INIT)
    assert lineage == Lineage(Stage.INIT, INIT, INIT, INIT)
    assert lineage.target == INIT


def test_without_a_checkpoint_everything_since_the_first_weights_is_trained_again(nodes: Nodes):
    chain = history(nodes, 3)
    lineage = lineage_to(nodes, chain[3], INIT)
    assert (lineage.base_stage, lineage.base, lineage.base_state) == (Stage.INIT, INIT, INIT)
    assert lineage.replay == tuple(chain[1:])
    assert lineage.target == chain[3]


def test_a_checkpoint_of_the_state_itself_needs_no_replay(nodes: Nodes):
    chain = history(nodes, 2)
    checkpoint = save(nodes, chain[2])
    lineage = lineage_to(nodes, chain[2], INIT)
    assert lineage == Lineage(Stage.CHECKPOINT, checkpoint, chain[2], INIT)
    assert lineage.target == chain[2]


@settings(max_examples=25)
@given(st.integers(0, 6), st.sets(st.integers(1, 6)))
def test_the_newest_checkpoint_that_is_not_later_is_the_base(tmp_path_factory, length: int, saved: set[int]):
    nodes = Nodes(Files(tmp_path_factory.mktemp("store")))
    chain = history(nodes, 6)
    checkpoints = {number: save(nodes, chain[number]) for number in saved}
    base = max((number for number in saved if number <= length), default=0)
    lineage = lineage_to(nodes, chain[length], INIT)
    assert lineage.base == checkpoints.get(base, INIT)
    assert lineage.base_stage == (Stage.CHECKPOINT if base else Stage.INIT)
    assert (lineage.base_state, lineage.init) == (chain[base], INIT)
    assert lineage.replay == tuple(chain[base + 1 : length + 1])
    assert lineage.target == chain[length]


def test_a_gap_in_the_history_is_named(tmp_path: Path):
    nodes = Nodes(Files(tmp_path / "store"))
    chain = history(nodes, 3)
    Files(tmp_path / "store").delete(node_path(Stage.TRAIN, chain[2]))
    with pytest.raises(ObjectMissing) as caught:
        lineage_to(nodes, chain[3], INIT)
    assert caught.value.where == f"nodes/train/{chain[2]}.json"
    assert chain[3] in str(caught.value.found)


def test_a_history_that_does_not_begin_with_these_first_weights_is_refused(nodes: Nodes):
    chain = history(nodes, 2)
    with pytest.raises(ObjectMissing, match=f"nodes/train/{INIT}.json"):
        lineage_to(nodes, chain[2], "init-of-another-branch")
