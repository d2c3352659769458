"""PPO through the trainer ranks: a critic that is trained first, a reference that is refreshed, the same bits when done again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rlpipe.actors.replay import replay
from rlpipe.algorithms.values import gae
from rlpipe.config.run import RunConfig
from rlpipe.inputs import advantage_inputs
from rlpipe.lineage import lineage_to
from rlpipe.stage_files import read_batch
from rlpipe.store.branches import Branches
from rlpipe.store.files import Files
from rlpipe.store.nodes import Nodes
from rlpipe.types import Node, Stage
from tests.actors.trained import Trained, configuration, sampled_rows, tiny_model, trained

pytestmark = pytest.mark.integration
ITERATIONS, ALONE = 3, 1


def ppo(model: str) -> RunConfig:
    estimator = {"advantage_estimator": "ppo", "gamma": 0.9, "lambd": 0.8, "reference": True}
    critic = {"num_critic_only_steps": ALONE, "optimizer": {"lr": 2e-3}}
    return configuration(model, "ppo", advantage=estimator, critic=critic, reference={"ref_update_interval": 2})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, local_ray: str) -> Path:
    """With the run `ppo`: three iterations, the first of the critic only; rebuilt from batches and from a checkpoint."""
    home = tmp_path_factory.mktemp("home")
    asyncio.run(history(home, tiny_model(home / "model")))
    return home


async def history(home: Path, model: str) -> None:
    config = ppo(model)
    async with trained(config, Files(home / "store"), home) as run:

        async def scored(before: str, k: int) -> Node:
            rollout, reward = sampled_rows(run.files, k)
            inputs = advantage_inputs(config, rollout, reward, before)
            names = {"key": inputs.digest, "before": before, "version": k, "rollout": rollout, "reward": reward}
            answer = (await run.trainer.call("advantage", deadline_s=60, **names))[0]
            return run.nodes.commit(inputs.node(files=tuple(answer["files"]), outputs=answer["outputs"]))

        await run.begin()
        await run.iterate(2, scored)
        await restored(run, replayed=2)
        await run.checkpoint()
        await run.iterate(1, scored)
        state = (await run.trainer.call("status", deadline_s=60))[0]["held"]
        before = await scored(state, ITERATIONS)
        await run.checkpoint()
        await restored(run, replayed=0)
        assert (await scored(state, ITERATIONS)).files == before.files, "critic and reference are what they were"
        assert before.outputs["reference_version"] == 2


async def restored(run: Trained, *, replayed: int) -> None:
    """The newest state comes out as recorded, from the last checkpoint and so many batches."""
    newest = run.branches.newest("ppo")
    assert newest is not None
    state = newest.nodes[Stage.TRAIN]
    lineage = lineage_to(run.nodes, state, run.branches.get("ppo").init, ref_update_interval=2)
    answer = (await run.trainer.call("restore", lineage=lineage, deadline_s=60))[0]
    assert (answer["replayed"], answer["mismatch"]) == (replayed, None)
    assert answer["state_digest"] == run.nodes.get(Stage.TRAIN, state).outputs["state_digest"]


async def test_training_it_all_again_gives_the_same_bits_critic_included(home: Path):
    result = await replay(Files(home / "store"), "ppo", home=home, say=lambda _: None)
    assert result.equal
    assert [(state.stage, state.version) for state in result.states] == [("init", 0), ("train", 1), ("train", 2), ("train", 3)]


def test_the_batches_hold_values_and_returns_by_gae_and_say_whether_only_the_critic_learns(home: Path):
    files = Files(home / "store")
    nodes, values = Nodes(files), []
    for commit in reversed(list(Branches(files).walk("ppo"))):
        node = nodes.get(Stage.ADVANTAGE, commit.nodes[Stage.ADVANTAGE])
        batch = read_batch(files, node)
        assert batch.values is not None and batch.returns is not None and batch.advantages is not None
        assert node.outputs["critic_only"] == (commit.iteration < ALONE)
        assert np.allclose(batch.advantages + batch.values, batch.returns, atol=1e-6)
        assert node.outputs["reference_version"] == commit.iteration // 2 * 2
        assert np.array_equal(batch.reference_log_probs, batch.proximal_log_probs) == (commit.iteration in (0, 1, 2))
        assert "rollout/explained_variance" in node.outputs["metrics"]
        values.append(batch.values)
        last = batch.response_offsets[1:] - 1
        rewards = np.zeros(batch.num_response_tokens)
        rewards[last] = (batch.advantages + batch.values)[last]
        again = gae(rewards, batch.values, batch.response_lengths, gamma=0.9, lambd=0.8, mask=batch.loss_mask)
        assert np.allclose(again.advantages, batch.advantages, atol=1e-5)
        steps = nodes.get(Stage.TRAIN, commit.nodes[Stage.TRAIN]).outputs["steps"]
        assert all("value_loss" in step and ("loss" in step) == (commit.iteration >= ALONE) for step in steps)
    assert len(values) == ITERATIONS
    assert not values[0].any()
    assert values[1].any()
