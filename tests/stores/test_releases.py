"""Stores of earlier releases are audited, resumed, replayed and forked by this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe.store.audit.verification import check_store
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import CONTRACTS, Stage
from tests.flows.live_run import LiveRun, run_command
from tests.stores.unpacked import check_names, unpack
from tools.migrate import migrate

RELEASES = ("first_release",)
OLDER = ("format_1",)
"""Stores that must be migrated first."""
RECIPE = "tests/stores/first.yaml"


@pytest.fixture(params=[*RELEASES, *OLDER])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A home with a stored run of three iterations, its fork, and a reprocessed run."""
    folder = tmp_path / "home"
    folder.mkdir()
    if request.param in OLDER:
        old = unpack(request.param, tmp_path)
        assert migrate(Files(old), Files(folder / "store"), say=print) == []
    else:
        unpack(request.param, folder)
    return folder


def check_whole(home: Path) -> None:
    assert check_store(Files(home / "store")).findings == []


def test_a_stored_run_has_no_findings_and_its_nodes_have_the_expected_names(home: Path):
    check_whole(home)
    files = Files(home / "store")
    for run in ("first", "forked"):
        check_names(files, run)
        assert dict.fromkeys(CONTRACTS, 1) == Branches(files).contracts(run)


@pytest.mark.long
@pytest.mark.integration
def test_a_stored_run_continues(home: Path):
    before = Files(home / "store").list()
    with LiveRun(home, "--recipe", RECIPE, "num_rollout=4") as run:
        assert run.finish() == 0, run.output
        assert "3 of 4 iterations are done" in run.output
    files = Files(home / "store")
    assert Branches(files).committed("first") == [0, 1, 2, 3]
    states = [Branches(files).read("first", k).nodes[Stage.TRAIN] for k in (2, 3)]
    assert Nodes(files).get(Stage.TRAIN, states[1]).parents["before"] == states[0]
    gone = sorted(set(before) - set(files.list()))
    assert [path for path in gone if "/scalars/" not in path and "/epochs/" not in path] == []
    check_whole(home)


@pytest.mark.long
@pytest.mark.integration
def test_a_stored_run_is_replayed_to_the_same_states(home: Path, tmp_path: Path):
    """The states are equal bit for bit on the kind of machine that recorded them. On other machines
    the first weights are equal, and all batches can be trained."""
    found = tmp_path / "states.json"
    words = ("replay", "--run", "forked", "--json", str(found))
    ended = run_command(home, *words, timeout_s=240)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    states = json.loads(found.read_text())["states"]
    assert states[0]["stage"] == "init"
    assert states[0]["equal"]
    assert ended.returncode == 0 or states[-1]["stage"] == "train", ended.stdout


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize("home", RELEASES, indirect=True)
def test_a_stored_run_is_forked_from_an_iteration_without_a_checkpoint(home: Path):
    arguments = (
        "--recipe",
        RECIPE,
        "--fork",
        "first@1",
        "--run",
        "other",
        "rollout.rollout_temperature=0.9",
    )
    with LiveRun(home, *arguments) as run:
        assert run.finish() == 0, run.output
    files = Files(home / "store")
    assert Branches(files).get("other").parent == "first/00000001"
    assert Branches(files).committed("other") == [2]
    check_whole(home)
