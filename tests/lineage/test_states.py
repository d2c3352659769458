"""The way to a state: the newest checkpoint before it, and the train nodes since
(rlpipe.lineage.states)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.errors import ObjectMissing
from rlpipe.lineage.stage_inputs import Inputs, checkpoint_inputs, segment_inputs
from rlpipe.lineage.states import Lineage, Lineages, Reference, lineage_to, segment_node, state_node
from rlpipe.store.nodes import Nodes, node_path
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage

INIT = "init-of-the-branch"


def train(nodes: Nodes, before: str, number: int, **config: object) -> str:
    """A train node after `before`."""
    inputs = Inputs(Stage.TRAIN, {"before": before, "advantage": f"batch {number}"}, dict(config))
    return nodes.commit(
        inputs.node(outputs={"state_digest": f"state {number}", "version": number + 1})
    ).digest


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
def test_the_newest_checkpoint_that_is_not_later_is_the_base(
    tmp_path_factory, length: int, saved: set[int]
):
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


def segment(nodes: Nodes, weights: str, base: str) -> str:
    """A segment in place of the state of a train node."""
    restored = {"state_digest": "another", "replayed": 2, "mismatch": weights}
    inputs = segment_inputs(weights, base, "attempt")
    return nodes.commit(
        segment_node(nodes, inputs, restored, version=2, packages={"torch": "2"})
    ).digest


def test_a_segment_is_restored_from_its_own_checkpoint_and_so_is_what_was_trained_from_it(
    nodes: Nodes,
):
    chain = history(nodes, 2)
    made = segment(nodes, chain[2], INIT)
    checkpoint = save(nodes, made)
    after = [train(nodes, made, 3)]
    after.append(train(nodes, after[0], 4))
    assert lineage_to(nodes, made, INIT) == Lineage(Stage.CHECKPOINT, checkpoint, made, INIT)
    assert lineage_to(nodes, after[1], INIT) == Lineage(
        Stage.CHECKPOINT, checkpoint, made, INIT, tuple(after)
    )
    assert lineage_to(nodes, chain[2], INIT).replay == tuple(chain[1:]), (
        "the recorded state is where it was"
    )


def test_a_segment_without_its_checkpoint_is_an_error(nodes: Nodes):
    chain = history(nodes, 2)
    made = segment(nodes, chain[2], INIT)
    with pytest.raises(ObjectMissing, match="checkpoint of a segment"):
        lineage_to(nodes, train(nodes, made, 3), INIT)


def test_a_segment_records_the_replaced_state_and_its_own(nodes: Nodes):
    chain = history(nodes, 2)
    outputs = state_node(nodes, segment(nodes, chain[2], INIT)).outputs
    assert outputs.pop("host")
    assert outputs == {
        "state_digest": "another",
        "recorded": "state 1",
        "version": 2,
        "replayed": 2,
        "first_difference": chain[2],
        "packages": {"torch": "2"},
    }


def test_batches_of_another_configuration_are_not_trained_again_under_this_one(nodes: Nodes):
    parent = train(nodes, INIT, 0, lr=1)
    fork = train(nodes, parent, 1, lr=2)
    with pytest.raises(ObjectMissing, match="forked"):
        lineage_to(nodes, train(nodes, fork, 2, lr=2), INIT)
    checkpoint = save(nodes, parent)
    assert lineage_to(nodes, fork, INIT) == Lineage(
        Stage.CHECKPOINT, checkpoint, parent, INIT, (fork,)
    )


def test_an_unknown_state_is_named(nodes: Nodes):
    with pytest.raises(ObjectMissing, match=r"nodes/train/none\.json"):
        state_node(nodes, "none")


@pytest.fixture
def refreshed(nodes: Nodes) -> list[str]:
    """Seven iterations from recorded first weights."""
    init = nodes.commit(Inputs(Stage.INIT, {}).node(outputs={"version": 0})).digest
    chain = [init]
    for number in range(7):
        chain.append(train(nodes, chain[-1], number))
    return chain


def test_a_refreshed_reference_comes_from_the_checkpoint_of_its_version(
    nodes: Nodes, refreshed: list[str]
):
    reference = save(nodes, refreshed[3])
    newest = save(nodes, refreshed[5])
    lineage = lineage_to(nodes, refreshed[5], refreshed[0], ref_update_interval=3)
    assert lineage == Lineage(
        Stage.CHECKPOINT, newest, refreshed[5], refreshed[0], reference=Reference(reference, 3)
    )
    assert lineage_to(nodes, refreshed[5], refreshed[0]).reference is None
    assert lineage_to(nodes, refreshed[5], refreshed[0], ref_update_interval=6).reference is None, (
        "still the first one"
    )


def test_refreshes_of_the_reference_count_on_from_iterations_of_slime(
    nodes: Nodes, refreshed: list[str]
):
    """After 7 iterations of slime, the weights of versions 2 and 5 are references."""

    def reference(version: int) -> Reference | None:
        return lineage_to(
            nodes, refreshed[version], refreshed[0], ref_update_interval=3, ref_update_offset=1
        ).reference

    saved = {version: save(nodes, refreshed[version]) for version in range(1, 7)}
    assert reference(1) is None, "the first weights"
    second, fifth = Reference(saved[2], 2), Reference(saved[5], 5)
    assert [reference(version) for version in range(2, 7)] == [second] * 3 + [fifth] * 2


def test_a_reference_without_checkpoint_is_rebuilt_by_a_longer_replay(
    nodes: Nodes, refreshed: list[str]
):
    save(nodes, refreshed[5])
    earlier = save(nodes, refreshed[2])
    lineage = lineage_to(nodes, refreshed[6], refreshed[0], ref_update_interval=4)
    assert (lineage.base, lineage.reference, lineage.replay) == (
        earlier,
        None,
        tuple(refreshed[3:7]),
    )
    assert lineage_to(nodes, refreshed[6], refreshed[0], ref_update_interval=3).replay == tuple(
        refreshed[3:7]
    )


def test_a_base_that_is_itself_a_reference_is_loaded_as_both(nodes: Nodes, refreshed: list[str]):
    checkpoint = save(nodes, refreshed[4])
    lineage = lineage_to(nodes, refreshed[5], refreshed[0], ref_update_interval=2)
    assert (lineage.base, lineage.reference, lineage.replay) == (
        checkpoint,
        Reference(checkpoint, 4),
        (refreshed[5],),
    )


def test_a_segment_is_the_reference_in_place_of_the_state_that_was_recorded(
    nodes: Nodes, refreshed: list[str]
):
    restored = {"state_digest": "another", "replayed": 3, "mismatch": refreshed[3]}
    inputs = segment_inputs(refreshed[3], refreshed[0], "attempt")
    made = nodes.commit(segment_node(nodes, inputs, restored, version=3, packages={})).digest
    reference = save(nodes, made)
    later = train(nodes, made, 3)
    newest = save(nodes, later)
    lineage = lineage_to(nodes, later, refreshed[0], ref_update_interval=3)
    assert lineage == Lineage(
        Stage.CHECKPOINT, newest, later, refreshed[0], reference=Reference(reference, 3)
    )


class Counting(Files):
    """How often something was read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = 0

    def read(self, path: str, sha256: str | None = None) -> bytes:
        self.reads += 1
        return super().read(path, sha256)


def answer(find: Any, state: str) -> Lineage | str:
    try:
        return find(state)
    except ObjectMissing as error:
        return str(error.where)


def test_the_lineage_of_the_next_state_costs_the_same_at_any_distance(tmp_path: Path):
    files = Counting(tmp_path / "store")
    nodes = Nodes(files)
    lineages = Lineages(nodes, INIT)
    chain = history(nodes, 1)
    costs = []
    save(nodes, chain[1])
    lineages.to(chain[1])
    for number in range(1, 30):
        chain.append(train(nodes, chain[-1], number))
        before = files.reads
        assert [lineages.to(chain[-1]).replay, lineages.to(chain[-1]).replay] == [
            tuple(chain[2:])
        ] * 2
        costs.append(files.reads - before)
    assert max(costs) <= 5 and len(set(costs[1:])) == 1


ACTS = st.one_of(
    st.tuples(st.just("train"), st.integers(0, 30), st.sampled_from([1, 1, 1, 2])),
    st.tuples(st.just("save"), st.integers(0, 30), st.booleans()),
    st.tuples(st.just("ask"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("publish"), st.just(0), st.just(0)),
)
"""What is done, to which state so far, and with which learning rate, or whether a segment takes
that state's place first."""


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTS, max_size=30), st.sampled_from([None, 2, 3]))
def test_lineages_give_the_same_answers_as_a_full_walk(
    tmp_path_factory, acts: Any, interval: int | None
):
    """Over histories with forks of another configuration, checkpoints, segments and refreshed
    references."""
    nodes = Nodes(Files(tmp_path_factory.mktemp("store")))
    init = nodes.commit(Inputs(Stage.INIT, {}).node(outputs={"version": 0})).digest
    lineages = Lineages(nodes, init, ref_update_interval=interval)
    states = [init]
    versions = {init: 0}

    def known(state: str, version: int) -> str:
        states.append(state)
        versions[state] = version
        return state

    for number, (act, which, how) in enumerate([*acts, ("publish", 0, 0)]):
        chosen = states[-1] if which > len(states) else states[which % len(states)]
        if act == "train":
            inputs = Inputs(
                Stage.TRAIN, {"before": chosen, "advantage": f"batch {number}"}, {"lr": how}
            )
            outputs = {"state_digest": f"state {number}", "version": versions[chosen] + 1}
            known(nodes.commit(inputs.node(outputs=outputs)).digest, versions[chosen] + 1)
        elif act == "save" and chosen != init:
            if how and nodes.find(Stage.TRAIN, chosen):
                restored = {"state_digest": f"other {number}", "replayed": 1, "mismatch": chosen}
                inputs = segment_inputs(chosen, init, str(number))
                made = segment_node(nodes, inputs, restored, version=versions[chosen], packages={})
                chosen = known(nodes.commit(made).digest, versions[chosen])
            save(nodes, chosen)
            lineages.forget()
        for asked in [chosen] if act == "ask" else states[-1:] if act == "publish" else []:
            expected = answer(
                lambda state: lineage_to(nodes, state, init, ref_update_interval=interval), asked
            )
            assert answer(lineages.to, asked) == expected


def test_checkpoints_that_other_processes_record_or_remove_leave_every_lineage_right(
    nodes: Nodes,
):
    chain = history(nodes, 3)
    lineages = Lineages(nodes, INIT)
    first = save(nodes, chain[1])
    assert lineages.to(chain[2]).base == first
    second = save(nodes, chain[2])
    assert lineages.to(chain[3]) == Lineage(
        Stage.CHECKPOINT, first, chain[1], INIT, tuple(chain[2:])
    ), "longer, and as good"
    nodes._files.delete(node_path(Stage.CHECKPOINT, first))
    assert lineages.to(chain[3]) == Lineage(Stage.CHECKPOINT, second, chain[2], INIT, (chain[3],))
    chain.append(train(nodes, chain[3], 4))
    third = save(nodes, chain[4])
    assert lineages.to(chain[4]) == Lineage(Stage.CHECKPOINT, third, chain[4], INIT), (
        "its own is looked for"
    )
