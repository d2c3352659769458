"""A store of format 1 becomes one of today (tools.migrate): a real one, made by the last version of
rlpipe that wrote format 1.

`tests/stores/README.md` says how it was made. `format_1_settings.json` has the settings that this
version gave every stage of the configurations of `tests/test_contracts.py`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from rlpipe.config.load import validate_stored
from rlpipe.errors import ConfigError, ObjectCorrupt, ObjectMissing
from rlpipe.lineage.stage_inputs import (
    advantage_inputs,
    eval_inputs,
    init_inputs,
    reward_inputs,
    rollout_inputs,
    train_inputs,
)
from rlpipe.store.audit.verification import check_store
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.notes import read_note
from rlpipe.store.objects.files import Files
from rlpipe.store.records import canonical, digest
from rlpipe.types import Node, Stage
from tests.stores.unpacked import check_names, unpack
from tests.test_contracts import CONFIGURATIONS, configuration
from tools import migrate as tool
from tools.migrate import migrate, settings

OLD_SETTINGS = json.loads(Path(__file__).with_name("format_1_settings.json").read_text())


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The old store: the runs `first`, its fork `forked`, and `again`, which reprocessed it."""
    return unpack("format_1", tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def migrated(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The new store, which no test changes."""
    new = Files(tmp_path_factory.mktemp("new") / "store")
    assert migrate(Files(unpacked), new, say=print) == []
    return new


@pytest.fixture
def old(unpacked: Path, tmp_path: Path) -> Path:
    """A copy of the old store, to damage."""
    return Path(shutil.copytree(unpacked, tmp_path / "old"))


@pytest.mark.parametrize("name", sorted(CONFIGURATIONS))
def test_settings_of_format_1_are_those_that_are_made_today(name: str):
    config = configuration(name)
    old = OLD_SETTINGS[name]
    today = [
        init_inputs(config, "model", None),
        rollout_inputs(config, "model", "plan"),
        reward_inputs(config, "rollout"),
        advantage_inputs(config, "rollout", "reward", "before"),
        train_inputs(config, "advantage", "before"),
        *(eval_inputs(config, dataset, "weights") for dataset in config.evaluation.datasets),
    ]
    assert {str(one.stage): settings(one.stage, old[one.stage]) for one in today} == {
        str(one.stage): json.loads(json.dumps(one.config)) for one in today
    }


def test_a_setting_that_format_1_never_had_is_refused_by_name():
    with pytest.raises(ObjectCorrupt, match=r"(?s)a node of train.*cleverness"):
        settings(Stage.TRAIN, {"cleverness": 1})


def test_nodes_without_settings_keep_what_they_have():
    assert settings(Stage.SEGMENT, {"attempt": "a"}) == {"attempt": "a"}


def test_the_new_store_has_nothing_wrong_and_no_object_less(unpacked: Path, migrated: Files):
    report = check_store(migrated)
    assert (report.findings, report.notes) == ([], [])
    assert len(migrated.list()) == len(Files(unpacked).list())
    assert (
        Branches(migrated).names()
        == Branches(Files(unpacked)).names()
        == ["again", "first", "forked"]
    )


def test_no_new_record_has_a_digest_of_an_old_node(unpacked: Path, migrated: Files):
    digests = {path.stem for path in (unpacked / "nodes").rglob("*.json")}
    assert len(digests) > 30
    records = [
        path for path in migrated.list() if path.endswith(".json") and not path.startswith("data/")
    ]
    assert [
        path
        for path in records
        for old in digests
        if old in path or old.encode() in migrated.read(path)
    ] == []


@pytest.mark.parametrize("run", ["first", "forked"])
def test_every_node_has_the_name_that_the_run_asks_for_when_it_goes_on(migrated: Files, run: str):
    check_names(migrated, run)


def test_a_reprocessed_run_has_its_nodes(migrated: Files):
    branches = Branches(migrated)
    config = validate_stored(branches.config("again"))
    contracts = branches.contracts("again")
    for k in branches.committed("first"):
        commit = branches.read("first", k)
        nodes = read_note(migrated, "again", k)
        assert nodes[Stage.REWARD] == commit.nodes[Stage.REWARD]
        batch = Nodes(migrated).get(Stage.ADVANTAGE, nodes[Stage.ADVANTAGE])
        asked = advantage_inputs(
            config, nodes[Stage.ROLLOUT], nodes[Stage.REWARD], batch.parents["before"], contracts
        )
        assert (batch.config, batch.parents["scored"]) == (
            asked.config,
            commit.nodes[Stage.ADVANTAGE],
        )


def test_results_are_kept_as_they_were(unpacked: Path, migrated: Files):
    def outputs(folder: Path) -> list[str]:
        told = [json.loads(path.read_text()) for path in (folder / "nodes").rglob("*.json")]
        kept = ("stage", "outputs", "attempt", "created")
        return sorted(
            json.dumps([node[key] for key in kept], sort_keys=True)
            for node in told
            if node["stage"] != "rollout"
        )

    assert outputs(unpacked) == outputs(Path(migrated.root.removeprefix("file://")))


def refused(
    old: Path, error: type[Exception] | tuple[type[Exception], ...], match: str | None = None
) -> None:
    """The migration raises this, and nothing of a new store is left."""
    new = Files(old.parent / "refused")
    with pytest.raises(error, match=match):
        migrate(Files(old), new, say=print)
    assert new.list() == []


def newest_commit(old: Path) -> Path:
    return old / "branches" / "first" / "00000002.json"


def reseal(path: Path, **changes: object) -> None:
    """Another content of a sealed record, with its right checksum."""
    content = {
        key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"
    } | changes
    path.write_bytes(canonical({**content, "sha256": digest(content, "x")}, "x") + b"\n")


def test_a_record_that_was_changed_ends_it(old: Path):
    path = newest_commit(old)
    path.write_bytes(path.read_bytes().replace(b'"iteration":2', b'"iteration":3'))
    refused(old, ObjectCorrupt, "not a sealed record")


def test_a_commit_that_its_receipt_does_not_fit_ends_it(old: Path):
    reseal(newest_commit(old), dropped={"first:00000001": "stale"})
    refused(old, ObjectCorrupt, "receipt does not fit")


def test_a_node_whose_name_is_not_that_of_its_inputs_ends_it(old: Path):
    reseal(next((old / "nodes" / "train").glob("*.json")), config={"lr": 1.0})
    refused(old, ObjectCorrupt, "this is another node")


@pytest.mark.parametrize(
    "folder", ["nodes/rollout", "nodes/checkpoint", "plans", "branches/first/receipts"]
)
def test_a_record_that_is_gone_ends_it(old: Path, folder: str):
    sorted((old / folder).rglob("*.json"))[0].unlink()
    refused(old, (ObjectCorrupt, ObjectMissing))


@pytest.mark.parametrize(
    "name",
    [
        "branches/first/config.json",
        "branches/first/00000001.json",
        "branches/first/epochs/00000001.json",
    ],
)
def test_a_sealed_record_of_something_else_ends_it(old: Path, name: str):
    reseal(old / name, mine=1)
    refused(old, ObjectCorrupt, name)


def test_a_data_file_with_other_bytes_ends_it(old: Path):
    path = next((old / "checkpoints").rglob("common.pt"))
    path.write_bytes(path.read_bytes()[::-1])
    refused(old, ObjectCorrupt, "not the bytes that were written")


def test_a_data_file_that_is_gone_is_found_by_the_audit_and_nothing_is_kept(old: Path):
    next((old / "checkpoints").rglob("common.pt")).unlink()
    new = Files(old.parent / "refused")
    found = migrate(Files(old), new, say=print)
    assert any("common.pt" in line for line in found)
    assert "audit it with the rlpipe that wrote it" in found[-1]
    assert new.list() == []


def test_an_object_that_no_writer_names_ends_it(old: Path):
    (old / "notes.txt").write_text("mine")
    refused(old, ObjectCorrupt, r"notes\.txt: no writer gives")


def test_a_run_that_is_being_driven_ends_it(old: Path):
    path = max((old / "branches" / "first" / "epochs").rglob("*.json"), key=str)
    holder = {**json.loads(path.read_text())["holder"], "pid_space": "of another machine"}
    reseal(path, released=False, renewed="2999-01-01T00:00:00.000+00:00", holder=holder)
    refused(old, ConfigError, "being driven")


def test_an_old_store_is_refused_everywhere_else_with_the_command_that_migrates_it(unpacked: Path):
    with pytest.raises(ObjectCorrupt, match=r"(?s)format 1.*format 2.*python -m tools\.migrate"):
        Branches(Files(unpacked)).get("first")
    assert any(
        "tools.migrate" in finding.problem for finding in check_store(Files(unpacked)).findings
    )


def test_a_store_of_today_is_refused(migrated: Files, tmp_path: Path):
    with pytest.raises(ConfigError, match="only stores of format 1"):
        migrate(migrated, Files(tmp_path / "next"), say=print)


def test_a_new_root_that_is_not_empty_and_an_old_one_that_is_are_refused(
    unpacked: Path, migrated: Files, tmp_path: Path
):
    before = migrated.list()
    with pytest.raises(ConfigError, match="needs an empty root"):
        migrate(Files(unpacked), migrated, say=print)
    assert migrated.list() == before
    with pytest.raises(ConfigError, match="no run in this store"):
        migrate(Files(tmp_path / "nothing"), Files(tmp_path / "next"), say=print)


def test_what_is_open_is_carried_over(old: Path, tmp_path: Path):
    """Opened gates, pointers to segments, drawn plans: with the new names of the nodes that they
    are about."""
    files = Files(old)
    train = json.loads(newest_commit(old).read_text())["nodes"]["train"]
    gate = {"format": 1, "iteration": 2, "broken": ["x"], "asked": 1.0, "resumed": 2.0}
    path = f"gates/first/00000002-{train[:16]}.json"
    files.create(path, canonical({**gate, "sha256": digest(gate, "x")}, "x") + b"\n")
    state, base = make_segment(files, train)
    new = Files(tmp_path / "new")
    assert migrate(files, new, say=print) == []
    moved = Branches(new).read("first", 2).nodes[Stage.TRAIN]
    assert new.exists(f"gates/first/00000002-{moved[:16]}.json")
    [pointer] = [json.loads(new.read(name)) for name in new.list("branches/first/segments")]
    segment = Nodes(new).get(Stage.SEGMENT, pointer["segment"])
    assert (pointer["weights"], segment.parents["weights"]) == (moved, moved)
    assert segment.parents["base"] == Branches(new).get("first").init
    assert {state, base}.isdisjoint({segment.digest, *segment.parents.values()})


def make_segment(files: Files, train: str) -> tuple[str, str]:
    """A segment in place of a train node, with its checkpoint, as format 1 had them: its digest and
    that of its base."""
    base = json.loads(files.read("branches/first/config.json"))["init"]
    inputs = {"parents": {"weights": train, "base": base}, "config": {"attempt": "a"}, "hooks": {}}
    segment = put_node(files, "segment", inputs, {"state_digest": "s", "version": 3})
    put_node(
        files,
        "checkpoint",
        {"parents": {"weights": segment}, "config": {}, "hooks": {}},
        {"version": 3},
    )
    said = {
        "format": 1,
        "branch": "first",
        "version": 3,
        "epoch": 1,
        "weights": train,
        "segment": segment,
        "created": "",
    }
    path = f"branches/first/segments/00000003-00000001-{train[:12]}.json"
    files.create(path, canonical({**said, "sha256": digest(said, "x")}, "x") + b"\n")
    return segment, base


def put_node(files: Files, stage: str, inputs: dict, outputs: dict) -> str:
    """A node of format 1, without a receipt."""
    named = digest({"stage": stage, **inputs}, "x")
    empty = {"files": [], "attempt": "a", "created": "2026-01-01T00:00:00.000+00:00"}
    said = {"format": 1, "stage": stage, "digest": named, **inputs, "outputs": outputs, **empty}
    files.create(
        f"nodes/{stage}/{named}.json", canonical({**said, "sha256": digest(said, "x")}, "x") + b"\n"
    )
    return named


def test_two_nodes_that_have_one_name_now_end_it(old: Path):
    """They differed in nothing but a key at its default, which one of them did not have yet."""
    path = next((old / "nodes" / "reward").glob("*.json"))
    said = json.loads(path.read_text())
    less = {key: value for key, value in said["config"].items() if key != "max_error_fraction"}
    put_node(
        Files(old),
        "reward",
        {"parents": said["parents"], "config": less, "hooks": said["hooks"]},
        {"mean": 0.5},
    )
    refused(old, ObjectCorrupt, "two nodes of the old store have one name now")


def test_the_command_says_what_it_did(
    unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    to = str(tmp_path / "new")
    monkeypatch.setattr(sys, "argv", ["migrate", "--store", str(unpacked), "--to", to])
    assert tool.main() == 0
    assert "audited, nothing wrong; 0 notes" in capsys.readouterr().out
    assert tool.main() == 2
    assert "needs an empty root" in capsys.readouterr().err
    assert isinstance(Nodes(Files(to)).get(Stage.INIT, Branches(Files(to)).get("first").init), Node)
