"""The commit of an iteration: its chain of records and its signature (tasks.checkpoint)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from rlpipe.lineage.stage_inputs import Inputs, checkpoint_inputs
from rlpipe.observe.progress import Progress
from rlpipe.store.chain import leaf_paths
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.store.signatures import read_signature, signature_path
from rlpipe.types import DataState, Stage
from tasks import checkpoint
from tasks.context import RunContext
from tests.tasks.test_begin import config


@pytest.fixture
def ctx(tmp_path: Path) -> RunContext:
    """A run that saves every second iteration, without actors."""
    no_actors: Any = None
    files = Files(tmp_path / "store")
    epoch = Epochs(Files(tmp_path / "store")).acquire("run")
    run = config(num_rollout=9, checkpoint={"save_interval": 2}, evaluation={"datasets": []})
    made = RunContext(
        run, tmp_path, "/m", files, no_actors, Progress("run", 9, stream=io.StringIO()), epoch
    )
    init = made.nodes.commit(Inputs(Stage.INIT, {}, {}).node())
    made.branches.create("run", run.model_dump(mode="json"), init.digest)
    return made


def iteration(ctx: RunContext, k: int) -> dict[Stage, str]:
    """Nodes of an iteration."""
    before = ctx.recorded_before(k)
    after = DataState(draws=k + 1).model_dump(mode="json")
    recorded = {
        Stage.ROLLOUT: ({}, {"plans": [], "dropped": {}, "after": after}),
        Stage.ADVANTAGE: ({}, {"groups": [], "dropped": {}}),
        Stage.TRAIN: ({"before": before}, {}),
    }
    made = {
        stage: Inputs(stage, parents, {"k": k}).node(outputs=outputs)
        for stage, (parents, outputs) in recorded.items()
    }
    return {stage: ctx.nodes.commit(node).digest for stage, node in made.items()}


def test_a_commit_awaits_a_due_checkpoint_and_looks_once_for_any_other(
    ctx: RunContext,
):
    states = []
    for k in range(4):
        nodes = iteration(ctx, k)
        states.append(nodes[Stage.TRAIN])
        checkpoint._record(ctx, k, nodes)
        if k == 2:
            for state in states[1:]:
                ctx.nodes.commit(checkpoint_inputs(state).node())
    made = [ctx.branches.read("run", k) for k in range(4)]
    due = leaf_paths(states[1])[0]
    assert [commit.awaited for commit in made[:3]] == [(), (due,), (due,)]
    assert made[3].awaited == (leaf_paths(states[3])[0],)
    assert set(made[3].leaves) == {due, leaf_paths(states[2])[0]}, (
        "as a run that ends keeps its last weights"
    )


def test_checkpoints_of_a_run_that_continues_slime_are_due_at_slimes_numbers(ctx: RunContext):
    assert [k for k in range(9) if checkpoint.checkpoint_due(ctx, k)] == [1, 3, 5, 7, 8]
    ctx.config = ctx.config.model_copy(update={"start_rollout_id": 3})
    assert [k for k in range(9) if checkpoint.checkpoint_due(ctx, k)] == [0, 2, 4, 6, 8]


def test_a_commit_is_signed_with_the_key_of_the_environment(
    ctx: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint._record(ctx, 0, iteration(ctx, 0))
    assert not ctx.files.exists(signature_path("run", 0))
    key = Ed25519PrivateKey.generate()
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    monkeypatch.setenv("RLPIPE_SIGNING_KEY", str(tmp_path / "key.pem"))
    checkpoint._record(ctx, 1, iteration(ctx, 1))
    signed = read_signature(ctx.files, signature_path("run", 1))
    assert signed.commit == ctx.branches.read_stored("run", 1)[1]
    key.public_key().verify(bytes.fromhex(signed.signature), signed.message())
