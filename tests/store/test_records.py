"""Plans and nodes: sealed, found by their digest, first writer wins."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.errors import DataError, ObjectCorrupt, ObjectMissing
from rlpipe.store.nodes import Nodes, input_digest, node_path
from rlpipe.store.notes import Note
from rlpipe.store.objects.files import Files
from rlpipe.store.plans import Plans, plan_path
from rlpipe.store.records import canonical, digest, seal, unseal
from rlpipe.types import DataState, Node, Plan, PlannedGroup, Stage, VersionedRecord
from tests.store.lineage import make_node

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def plan(prompt: str = "p") -> Plan:
    groups = tuple(
        PlannedGroup(group_id=f"run:{n:08d}", prompt=prompt, prompt_ids=(1, n), seeds=(n, 2**62))
        for n in range(3)
    )
    return Plan(
        branch="run",
        iteration=0,
        groups=groups,
        before=DataState(),
        after=DataState(offset=3, draws=3),
    )


@given(outputs=st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_a_record_is_read_as_it_was_written(outputs: dict):
    node = make_node(Stage.TRAIN, {"batch": "d"}).model_copy(update={"outputs": outputs})
    assert unseal(Node, seal(node, "x"), "x") == node


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_of_a_record_is_found(position: int, bit: int):
    data = bytearray(seal(make_node(Stage.TRAIN, {"batch": "d"}, lr=1e-6, steps=12), "x"))
    position %= len(data) - 1  # the last byte is the newline
    data[position] ^= 1 << bit
    with pytest.raises(ObjectCorrupt) as caught:
        unseal(Node, bytes(data), "s3://b/node.json")
    assert caught.value.where == "s3://b/node.json"


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"null", b'"x"', b"{", b'{"sha256": 1}', b"\xff"]
)
def test_other_bytes_than_a_record_are_corrupt(data: bytes):
    with pytest.raises(ObjectCorrupt, match=r"not a readable node|changed"):
        unseal(Node, data, "x")


def test_a_record_of_another_kind_is_refused_by_its_first_wrong_key():
    with pytest.raises(ObjectCorrupt, match="stage: Field required"):
        unseal(Node, seal(Note(branch="run", iteration=0, nodes={}), "x"), "x")
    with pytest.raises(ObjectCorrupt, match="attempt: Extra inputs are not permitted"):
        unseal(DataState, seal(make_node(Stage.TRAIN, {}), "x"), "x")


@pytest.mark.parametrize("found", [1, 3])
@pytest.mark.parametrize("kind", VersionedRecord.__subclasses__(), ids=lambda kind: kind.__name__)
def test_a_record_of_an_unknown_format_is_refused_by_name(kind: type[VersionedRecord], found: int):
    other = {"format": found, "a_later_key": 1}
    data = canonical({**other, "sha256": digest(other, "x")}, "x")
    with pytest.raises(
        ObjectCorrupt,
        match=rf"(?s)rlpipe cannot read the format.*format {found}.*format 2.*migrate",
    ):
        unseal(kind, data, "x")


def test_every_record_has_a_format_and_one_without_has_format_1():
    content = json.loads(seal(make_node(Stage.TRAIN, {"batch": "d"}), "x"))
    assert content.pop("format") == 2
    del content["sha256"]
    with pytest.raises(ObjectCorrupt, match=r"(?s)format 1.*format 2"):
        unseal(Node, canonical({**content, "sha256": digest(content, "x")}, "x"), "x")


@pytest.mark.parametrize("version", [0, 2])
def test_a_node_of_an_unknown_contract_is_refused_by_name(local_files: Files, version: int):
    named = input_digest(Stage.TRAIN, {}, {}, {}, version)
    local_files.create(
        node_path(Stage.TRAIN, named),
        seal(Node(stage=Stage.TRAIN, digest=named, contract=version), "x"),
    )
    with pytest.raises(
        ObjectCorrupt, match=rf"(?s)contract of the stage train.*contract {version}.*1 to 1"
    ):
        Nodes(local_files).find(Stage.TRAIN, named)


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1, 2}, "\ud800", b"x"])
def test_values_that_json_cannot_hold_are_refused(value: object):
    with pytest.raises(DataError, match="cannot be written as JSON"):
        input_digest(Stage.TRAIN, {}, {"x": value}, {})


def test_a_plan_is_named_by_its_content(files: Files):
    plans = Plans(files)
    digest = plans.write(plan())
    assert plans.write(plan()) == digest
    assert plans.write(plan("other")) != digest
    assert plans.read(digest) == plan()
    assert Plans.groups_prefix(digest) == f"plans/{digest}/groups"
    with pytest.raises(ObjectMissing):
        plans.read("0" * 64)


def test_a_changed_plan_is_corrupt(local_files: Files):
    digest = Plans(local_files).write(plan())
    path = Path(local_files.url(plan_path(digest)).removeprefix("file://"))
    path.write_bytes(path.read_bytes().replace(b'"offset":3', b'"offset":4'))
    with pytest.raises(ObjectCorrupt, match="not the bytes that were written"):
        Plans(local_files).read(digest)


@given(config=st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_the_input_digest_does_not_depend_on_the_order_of_keys(config: dict):
    shuffled = dict(reversed(config.items()))
    assert input_digest(Stage.REWARD, {}, config, {}) == input_digest(
        Stage.REWARD, {}, shuffled, {}
    )


def test_the_input_digest_depends_on_every_input():
    inputs = {
        "stage": Stage.REWARD,
        "parents": {"rollout": "a"},
        "config": {"type": "math"},
        "hooks": {"x.py:f": "1"},
    }
    changes = {
        "stage": Stage.TRAIN,
        "parents": {"rollout": "b"},
        "config": {"type": "f1"},
        "hooks": {"x.py:f": "2"},
    }
    changes["contract"] = 2
    digests = {input_digest(**{**inputs, key: value}) for key, value in changes.items()}
    assert len(digests | {input_digest(**inputs)}) == 6
    assert input_digest(Stage.REWARD, {}, {"a": 1}, {}) != input_digest(
        Stage.REWARD, {}, {"a": "1"}, {}
    )


def test_the_input_digest_never_changes():
    """Stored nodes are found by it. Another value would make every stored run unreachable."""
    found = input_digest(
        Stage.ROLLOUT, {"plan": "p"}, {"temperature": 1.0, "n": 8}, {"hook.py:f": "00"}
    )
    assert found == "d45f5a059895c7fbe919fab239776e16f4b9060db1e02b26fc024c3aeb173087"


def test_a_node_is_found_by_its_digest(files: Files):
    nodes = Nodes(files)
    node = make_node(Stage.REWARD, {"rollout": "d"}, type="math")
    assert nodes.find(Stage.REWARD, node.digest) is None
    with pytest.raises(ObjectMissing):
        nodes.get(Stage.REWARD, node.digest)
    kept = nodes.commit(node)
    assert kept.model_copy(update={"attempt": "", "created": ""}) == node
    assert all([kept.attempt, kept.created])
    assert nodes.find(Stage.REWARD, node.digest) == nodes.get(Stage.REWARD, node.digest) == kept
    assert nodes.commit(kept) == kept


def test_all_racing_writers_of_a_node_get_the_first_record(files: Files):
    node = make_node(Stage.REWARD, {"rollout": "d"})
    attempts = [node.model_copy(update={"outputs": {"mean": n / 7}}) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(Nodes(files).commit, attempts))
    assert len({result.attempt for result in results}) == 1
    assert Nodes(files).get(Stage.REWARD, node.digest) == results[0]


def test_a_node_with_a_wrong_digest_is_refused(local_files: Files):
    node = make_node(Stage.REWARD, {"rollout": "d"})
    with pytest.raises(ValueError, match="not that of its inputs"):
        Nodes(local_files).commit(node.model_copy(update={"config": {"type": "math"}}))
    with pytest.raises(DataError, match="cannot be written as JSON"):
        Nodes(local_files).commit(node.model_copy(update={"outputs": {"loss": math.nan}}))
    assert local_files.list() == []


def test_a_node_under_another_name_is_corrupt(local_files: Files):
    node = Nodes(local_files).commit(make_node(Stage.REWARD, {"rollout": "d"}))
    local_files.create(node_path(Stage.REWARD, "0" * 64), seal(node, "x"))
    local_files.create(node_path(Stage.TRAIN, node.digest), seal(node, "x"))
    for stage, name in ((Stage.REWARD, "0" * 64), (Stage.TRAIN, node.digest)):
        with pytest.raises(ObjectCorrupt, match="the record belongs to another node"):
            Nodes(local_files).find(stage, name)


def test_a_record_is_plain_json(local_files: Files):
    digest = Plans(local_files).write(plan())
    content = json.loads(local_files.read(plan_path(digest)))
    assert content["branch"] == "run"
    assert len(content["sha256"]) == 64
