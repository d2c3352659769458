"""PPO on the trainer ranks: critic-only iterations, a refreshed reference, bit-exact replay.

Once with a critic that shares the policy's ranks, and once with a critic in its own rank, where one
of the two ranks is killed between optimizer steps.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpipe.actors.trainer.group import STATUS
from rlpipe.actors.trainer.replay import replay
from rlpipe.algorithms.values import gae
from rlpipe.batch.files import read_batch
from rlpipe.config.run import RunConfig
from rlpipe.errors import ActorLost, TrainerError
from rlpipe.lineage.stage_inputs import advantage_inputs, checkpoint_inputs, train_inputs
from rlpipe.lineage.states import lineage_to
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Node, Stage
from tests.actors.trainer.trained import Trained, configuration, sampled_rows, tiny_model, trained

pytestmark = [pytest.mark.integration, pytest.mark.long]
ITERATIONS = 3
CRITIC_ONLY = 1
"""Iterations that train only the critic."""
POLICY, CRITIC = 0, 1
"""Numbers of the ranks of the run with a critic rank."""
SLOW = """
import time
from pathlib import Path


def wait(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    while step_id == 1 and Path("{marker}").exists():
        time.sleep(0.05)
"""


def ppo(model: str, run: str = "ppo", **sections: Any) -> RunConfig:
    """The configuration, with a refreshed reference of weight version 2."""
    estimator = {"advantage_estimator": "ppo", "gamma": 0.9, "lambd": 0.8, "reference": True}
    critic = {"num_critic_only_steps": CRITIC_ONLY, "optimizer": {"lr": 2e-3}}
    return configuration(
        model,
        run,
        advantage=estimator,
        critic=critic,
        start_rollout_id=1,
        reference={"ref_update_interval": 3},
        **sections,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, local_ray: str) -> Path:
    """Home with the run `ppo`: three iterations, restored from batches and from a checkpoint."""
    home = tmp_path_factory.mktemp("home")
    asyncio.run(history(home, tiny_model(home / "model")))
    return home


async def history(home: Path, model: str) -> None:
    config = ppo(model)
    async with trained(config, Files(home / "store"), home) as run:

        async def scored(before: str, k: int) -> Node:
            return await batch_of(run, before, k)

        await run.begin()
        await run.iterate(2, scored)
        await check_restore(run, replayed=2)
        await run.checkpoint()
        await run.iterate(1, scored)
        state = (await run.trainer.call("status", deadline_s=60))[0]["held"]
        before = await scored(state, ITERATIONS)
        await run.checkpoint()
        await check_restore(run, replayed=0)
        assert (await scored(state, ITERATIONS)).files == before.files, (
            "critic and reference are restored"
        )
        assert before.outputs["reference_version"] == 2


async def batch_of(run: Trained, before: str, k: int) -> Node:
    """Score the batch of an iteration; return its advantage node."""
    rollout, reward = sampled_rows(run.files, k)
    inputs = advantage_inputs(run.config, rollout, reward, before)
    arguments = {
        "key": inputs.digest,
        "before": before,
        "version": k,
        "rollout": rollout,
        "reward": reward,
    }
    answer = (await run.trainer.call("advantage", deadline_s=60, **arguments))[0]
    return run.nodes.commit(inputs.node(files=tuple(answer["files"]), outputs=answer["outputs"]))


async def check_restore(run: Trained, *, replayed: int) -> None:
    """Check that the newest state is restored from the last checkpoint and `replayed` batches."""
    branch = run.config.run
    newest = run.branches.newest(branch)
    assert newest is not None
    state = newest.nodes[Stage.TRAIN]
    lineage = lineage_to(
        run.nodes,
        state,
        run.branches.get(branch).init,
        ref_update_interval=3,
        ref_update_offset=1,
    )
    await run.trainer.initialise(lineage.init, None, deadline_s=60)
    answer = await run.trainer.ensure(lineage, deadline_s=60)
    assert answer is not None
    assert (answer["replayed"], answer["mismatch"]) == (replayed, None)
    assert answer["state_digest"] == run.nodes.get(Stage.TRAIN, state).outputs["state_digest"]


async def test_a_replay_gives_the_same_bits_with_the_critic(home: Path):
    result = await replay(Files(home / "store"), "ppo", home=home, on_state=lambda _: None)
    assert result.equal
    assert [(state.stage, state.version) for state in result.states] == [
        ("init", 0),
        ("train", 1),
        ("train", 2),
        ("train", 3),
    ]


def test_batches_have_values_and_returns_of_gae_and_the_critic_only_flag(
    home: Path,
):
    files = Files(home / "store")
    nodes = Nodes(files)
    values = []
    for commit in reversed(list(Branches(files).walk("ppo"))):
        node = nodes.get(Stage.ADVANTAGE, commit.nodes[Stage.ADVANTAGE])
        batch = read_batch(files, node)
        assert (
            batch.values is not None and batch.returns is not None and batch.advantages is not None
        )
        assert node.outputs["critic_only"] == (commit.iteration < CRITIC_ONLY)
        assert np.allclose(batch.advantages + batch.values, batch.returns, atol=1e-6)
        assert node.outputs["reference_version"] == commit.iteration // 2 * 2
        assert batch.reference_log_probs is not None and batch.proximal_log_probs is not None
        assert np.array_equal(batch.reference_log_probs, batch.proximal_log_probs) == (
            commit.iteration in (0, 1, 2)
        )
        assert "rollout/explained_variance" in node.outputs["metrics"]
        values.append(batch.values)
        last = batch.response_offsets[1:] - 1
        rewards = np.zeros(batch.num_response_tokens)
        rewards[last] = (batch.advantages + batch.values)[last]
        again = gae(
            rewards,
            batch.values,
            batch.response_lengths,
            gamma=0.9,
            lambd=0.8,
            mask=batch.loss_mask,
        )
        assert np.allclose(again.advantages, batch.advantages, atol=1e-5)
        steps = nodes.get(Stage.TRAIN, commit.nodes[Stage.TRAIN]).outputs["steps"]
        assert all(
            "value_loss" in step and ("loss" in step) == (commit.iteration >= CRITIC_ONLY)
            for step in steps
        )
    assert len(values) == ITERATIONS
    assert not values[0].any()
    assert values[1].any()


@pytest.fixture(scope="module")
def separate(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the home with the same run and a critic rank, named `separate`, in the same store."""
    home = Path(shutil.copytree(home, tmp_path_factory.mktemp("separate") / "home"))
    marker = home / "slow"
    hook = home / "slow.py"
    hook.write_text(SLOW.format(marker=marker))
    steps = {"custom_megatron_before_train_step_hook_path": f"{hook}:wait"}
    config = ppo(
        str(home / "model"), "separate", resources={"critic_num_gpus_per_node": 1}, train=steps
    )
    asyncio.run(history_with_kills(config, home, marker))
    return home


async def history_with_kills(config: RunConfig, home: Path, marker: Path) -> None:
    async with trained(config, Files(home / "store"), home) as run:

        async def scored(before: str, k: int) -> Node:
            batch = await batch_of(run, before, k)
            if k == 1:
                await kill_during_training(run, batch, before, CRITIC, marker)
                assert await run.trainer_states.restore(before, version=k, epoch=1) == before
            return batch

        await run.begin()
        await run.iterate(2, scored)
        await run.checkpoint()
        await run.iterate(1, scored)
        await check_restore(run, replayed=1)
        state = (await run.trainer.call("status", deadline_s=60))[CRITIC]["held"]
        await kill_during_training(run, await scored(state, ITERATIONS), state, POLICY, marker)


async def kill_during_training(
    run: Trained, batch: Node, before: str, victim: int, marker: Path
) -> None:
    """Kill -9 one of the two ranks between two optimizer steps; then no state is held."""
    slow(marker, on=True)
    inputs = train_inputs(run.config, batch.digest, before)
    arguments = {"key": inputs.digest, "before": before, "advantage": batch.digest}
    training = asyncio.ensure_future(run.trainer.call("train", deadline_s=120, **arguments))
    while True:
        ranks: list[Any] = run.trainer.ranks
        statuses = [await rank.status.options(concurrency_group=STATUS).remote() for rank in ranks]
        if all(status["dirty"] for status in statuses):
            break
        await asyncio.sleep(0.05)
    os.kill(statuses[victim]["pid"], signal.SIGKILL)
    with pytest.raises((ActorLost, TrainerError)):
        await training
    slow(marker, on=False)
    assert await run.trainer.held() is None


def slow(marker: Path, *, on: bool) -> None:
    if on:
        marker.touch()
    else:
        marker.unlink()


def states(files: Files, branch: str) -> list[str]:
    nodes = Nodes(files)
    trains = [commit.nodes[Stage.TRAIN] for commit in Branches(files).walk(branch)]
    return [nodes.get(Stage.TRAIN, digest).outputs["state_digest"] for digest in reversed(trains)]


def test_a_critic_rank_gives_the_same_bits_as_a_shared_critic_also_after_kills(separate: Path):
    files = Files(separate / "store")
    nodes = Nodes(files)
    assert states(files, "separate") == states(files, "ppo")
    inits = [nodes.get(Stage.INIT, Branches(files).get(run).init) for run in ("ppo", "separate")]
    assert inits[0].outputs["state_digest"] == inits[1].outputs["state_digest"]
    pairs = zip(Branches(files).walk("ppo"), Branches(files).walk("separate"), strict=True)
    for one, other in pairs:
        batches = [
            read_batch(files, nodes.get(Stage.ADVANTAGE, commit.nodes[Stage.ADVANTAGE]))
            for commit in (one, other)
        ]
        assert batches[0].values is not None and batches[1].values is not None
        assert np.array_equal(batches[0].values, batches[1].values)
        steps = [
            nodes.get(Stage.TRAIN, commit.nodes[Stage.TRAIN]).outputs["steps"]
            for commit in (one, other)
        ]
        assert steps[0] == steps[1]


def test_a_checkpoint_has_the_part_of_the_critic_rank_in_a_subfolder(separate: Path):
    files = Files(separate / "store")
    state = Branches(files).read("separate", 1).nodes[Stage.TRAIN]
    checkpoint = Nodes(files).get(Stage.CHECKPOINT, checkpoint_inputs(state).digest)
    folders = {
        str(Path(record.path).parent.relative_to("checkpoints/separate/iter_0000002"))
        for record in checkpoint.files
    }
    assert len(folders) == 2
    assert sum(folder.endswith("/critic") for folder in folders) == 1
    described = [record.path for record in checkpoint.files if record.path.endswith("/.metadata")]
    assert len(described) == 2
