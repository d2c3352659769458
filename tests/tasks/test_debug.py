"""Find stored rollouts: of a run that trained, and of a run that only sampled (tasks.debug)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.config.run import DebugConfig
from rlpipe.errors import ConfigError
from rlpipe.lineage.stage_inputs import Inputs
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.notes import write_note
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit, DataState, NodeRef, Stage
from tasks.debug import stored_rollout


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "store")


def rollout(files: Files, plan: str) -> NodeRef:
    node = Nodes(files).commit(
        Inputs(Stage.ROLLOUT, {"plan": plan}).node(files=(), outputs={"plan": plan})
    )
    return NodeRef(stage=Stage.ROLLOUT, digest=node.digest)


def test_a_rollout_of_a_run_that_only_samples_is_found_by_its_first_note(files: Files):
    write_note(files, "sampled", 3, {Stage.ROLLOUT: rollout(files, "a").digest})
    write_note(files, "sampled", 3, {Stage.ROLLOUT: rollout(files, "b").digest})
    assert stored_rollout(files, "sampled", 3).outputs == {"plan": "a"}


def test_a_rollout_of_a_trained_run_is_found_by_its_commit(files: Files):
    Branches(files).create("trained", {}, init="init")
    nodes = {Stage.ROLLOUT: rollout(files, "c").digest}
    Branches(files).commit(
        Commit(
            branch="trained", iteration=0, plans=(), nodes=nodes, data=DataState(), config_digest=""
        )
    )
    assert stored_rollout(files, "trained", 0).outputs == {"plan": "c"}


def test_the_error_names_an_iteration_without_a_rollout(files: Files):
    with pytest.raises(ConfigError, match="no stored rollout") as caught:
        stored_rollout(files, "absent", 7)
    assert caught.value.found == "no iteration 7 of 'absent'"


def test_a_run_with_a_source_of_rollouts_only_trains():
    assert DebugConfig.model_validate({"load_debug_rollout_data": "a"}).debug_train_only


@pytest.mark.parametrize(
    "keys",
    [
        {"debug_train_only": True},
        {"debug_rollout_only": True, "load_debug_rollout_data": "a"},
        {"debug_train_only": False, "load_debug_rollout_data": "a"},
    ],
)
def test_contradicting_debug_settings_are_refused(keys: dict):
    with pytest.raises(ValueError, match="debug_train_only"):
        DebugConfig.model_validate(keys)
