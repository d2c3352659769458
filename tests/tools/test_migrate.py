"""Migrate a real store of format 1 (tools.migrate), written by the last version with that
format.

`tests/stores/README.md` describes its origin. `format_1_settings.json` has the settings that this
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
from tests.test_contracts import configuration
from tools import migrate as tool
from tools.format_one import settings
from tools.migrate import migrate

OLD_SETTINGS = json.loads(Path(__file__).with_name("format_1_settings.json").read_text())


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The old store: the runs `first`, its fork `forked`, and `again`, which reprocessed it."""
    return unpack("format_1", tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def migrated(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The new store. No test changes it."""
    new = Files(tmp_path_factory.mktemp("new") / "store")
    assert migrate(Files(unpacked), new, say=print) == []
    return new


@pytest.fixture
def old(unpacked: Path, tmp_path: Path) -> Path:
    """A copy of the old store, to damage."""
    return Path(shutil.copytree(unpacked, tmp_path / "old"))


@pytest.mark.parametrize("name", sorted(OLD_SETTINGS))
def test_converted_settings_equal_todays_settings(name: str):
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


def test_the_error_names_an_unknown_setting():
    with pytest.raises(ObjectCorrupt, match=r"(?s)a node of train.*cleverness"):
        settings(Stage.TRAIN, {"cleverness": 1})


def test_nodes_without_settings_are_unchanged():
    assert settings(Stage.SEGMENT, {"attempt": "a"}) == {"attempt": "a"}


def test_the_new_store_has_no_findings_and_all_objects(unpacked: Path, migrated: Files):
    report = check_store(migrated)
    assert (report.findings, report.notes) == ([], [])
    assert len(migrated.list()) == len(Files(unpacked).list())
    assert (
        Branches(migrated).names()
        == Branches(Files(unpacked)).names()
        == ["again", "first", "forked"]
    )


def test_no_new_record_contains_a_digest_of_an_old_node(unpacked: Path, migrated: Files):
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
def test_a_continued_run_finds_every_node(migrated: Files, run: str):
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


def test_results_are_unchanged(unpacked: Path, migrated: Files):
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
    """Check that the migration raises and leaves the new store empty."""
    new = Files(old.parent / "refused")
    with pytest.raises(error, match=match):
        migrate(Files(old), new, say=print)
    assert new.list() == []


def newest_commit(old: Path) -> Path:
    return old / "branches" / "first" / "00000002.json"


def reseal(path: Path, **changes: object) -> None:
    """Replace the content of a sealed record, with a valid checksum."""
    content = {
        key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"
    } | changes
    path.write_bytes(canonical({**content, "sha256": digest(content, "x")}, "x") + b"\n")


def test_a_changed_record_is_refused(old: Path):
    path = newest_commit(old)
    path.write_bytes(path.read_bytes().replace(b'"iteration":2', b'"iteration":3'))
    refused(old, ObjectCorrupt, "not a sealed record")


def test_a_commit_that_does_not_match_its_receipt_is_refused(old: Path):
    reseal(newest_commit(old), dropped={"first:00000001": "stale"})
    refused(old, ObjectCorrupt, "receipt does not match")


def test_a_node_with_a_wrong_digest_is_refused(old: Path):
    reseal(next((old / "nodes" / "train").glob("*.json")), config={"lr": 1.0})
    refused(old, ObjectCorrupt, "does not match its content")


@pytest.mark.parametrize(
    "folder", ["nodes/rollout", "nodes/checkpoint", "plans", "branches/first/receipts"]
)
def test_a_missing_record_is_refused(old: Path, folder: str):
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
def test_a_sealed_record_of_another_type_is_refused(old: Path, name: str):
    reseal(old / name, mine=1)
    refused(old, ObjectCorrupt, name)


def test_a_changed_data_file_is_refused(old: Path):
    path = next((old / "checkpoints").rglob("common.pt"))
    path.write_bytes(path.read_bytes()[::-1])
    refused(old, ObjectCorrupt, "not the bytes that were written")


def test_the_audit_finds_a_missing_data_file_and_the_new_store_is_emptied(old: Path):
    next((old / "checkpoints").rglob("common.pt")).unlink()
    new = Files(old.parent / "refused")
    found = migrate(Files(old), new, say=print)
    assert any("common.pt" in line for line in found)
    assert "audit the old store with the version of rlpipe that wrote it" in found[-1]
    assert new.list() == []


def test_an_object_with_an_unknown_name_is_refused(old: Path):
    (old / "notes.txt").write_text("mine")
    refused(old, ObjectCorrupt, r"notes\.txt: unknown name")


def test_a_store_with_a_driven_run_is_refused(old: Path):
    path = max((old / "branches" / "first" / "epochs").rglob("*.json"), key=str)
    holder = {**json.loads(path.read_text())["holder"], "pid_space": "of another machine"}
    reseal(path, released=False, renewed="2999-01-01T00:00:00.000+00:00", holder=holder)
    refused(old, ConfigError, "being driven")


def test_other_readers_of_an_old_store_name_the_migration_command(unpacked: Path):
    with pytest.raises(ObjectCorrupt, match=r"(?s)format 1.*format 2.*rlpipe migrate"):
        Branches(Files(unpacked)).get("first")
    assert any(
        "rlpipe migrate" in finding.problem for finding in check_store(Files(unpacked)).findings
    )


def test_a_store_of_todays_format_is_refused(migrated: Files, tmp_path: Path):
    with pytest.raises(ConfigError, match="only stores of format 1"):
        migrate(migrated, Files(tmp_path / "next"), say=print)


def test_a_non_empty_new_root_and_an_empty_old_root_are_refused(
    unpacked: Path, migrated: Files, tmp_path: Path
):
    before = migrated.list()
    with pytest.raises(ConfigError, match="root of the new store is not empty"):
        migrate(Files(unpacked), migrated, say=print)
    assert migrated.list() == before
    with pytest.raises(ConfigError, match="the store has no run"):
        migrate(Files(tmp_path / "nothing"), Files(tmp_path / "next"), say=print)


def test_gates_segments_and_draws_are_migrated(old: Path, tmp_path: Path):
    """They get the new digests of the nodes that they refer to."""
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
    """Write a segment that replaces a train node, with its checkpoint; return digests of segment
    and base.
    """
    base = json.loads(files.read("branches/first/config.json"))["init"]
    inputs = {"parents": {"weights": train, "base": base}, "config": {"attempt": "a"}, "hooks": {}}
    segment = put_node(files, "segment", inputs, {"state_digest": "s", "version": 3})
    put_node(
        files,
        "checkpoint",
        {"parents": {"weights": segment}, "config": {}, "hooks": {}},
        {"version": 3},
    )
    record = {
        "format": 1,
        "branch": "first",
        "version": 3,
        "epoch": 1,
        "weights": train,
        "segment": segment,
        "created": "",
    }
    path = f"branches/first/segments/00000003-00000001-{train[:12]}.json"
    files.create(path, canonical({**record, "sha256": digest(record, "x")}, "x") + b"\n")
    return segment, base


def put_node(files: Files, stage: str, inputs: dict, outputs: dict) -> str:
    """Write a node of format 1 without a receipt."""
    named = digest({"stage": stage, **inputs}, "x")
    empty = {"files": [], "attempt": "a", "created": "2026-01-01T00:00:00.000+00:00"}
    record = {"format": 1, "stage": stage, "digest": named, **inputs, "outputs": outputs, **empty}
    files.create(
        f"nodes/{stage}/{named}.json",
        canonical({**record, "sha256": digest(record, "x")}, "x") + b"\n",
    )
    return named


def test_two_nodes_with_the_same_new_digest_are_refused(old: Path):
    """They differ only in a key at its default, which the older node lacks."""
    path = next((old / "nodes" / "reward").glob("*.json"))
    record = json.loads(path.read_text())
    less = {key: value for key, value in record["config"].items() if key != "max_error_fraction"}
    put_node(
        Files(old),
        "reward",
        {"parents": record["parents"], "config": less, "hooks": record["hooks"]},
        {"mean": 0.5},
    )
    refused(old, ObjectCorrupt, "two old nodes have the same new digest")


def test_the_command_prints_a_summary(
    unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    to = str(tmp_path / "new")
    monkeypatch.setattr(sys, "argv", ["migrate", "--store", str(unpacked), "--to", to])
    assert tool.main() == 0
    assert "audited, nothing is wrong; 0 notes" in capsys.readouterr().out
    assert tool.main() == 2
    assert "root of the new store is not empty" in capsys.readouterr().err
    assert isinstance(Nodes(Files(to)).get(Stage.INIT, Branches(Files(to)).get("first").init), Node)
