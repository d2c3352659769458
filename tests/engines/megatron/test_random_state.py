"""Random state after loading a checkpoint (rlpipe.engines.megatron.reproducibility)."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron import reproducibility
from rlpipe.engines.megatron.checkpoint import checkpoint
from rlpipe.system.ports import free_port
from tests.engines.megatron import critic_jobs
from tests.engines.megatron.ranks import engine


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.random()), float(torch.rand(1))


def test_loading_restores_the_random_state_or_seeds_again_in_another_layout(
    models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = reproducibility.sharded_random_state

    def of_two_tensor_parallel_ranks() -> Any:
        mine = made()
        mine.global_shape = (1, 2)
        return mine

    with closing(engine(models["qwen3"], TrainConfig(), 0, 1, free_port())) as ours:
        first = drawn()
        ours.load_hf()
        ours.save_checkpoint(tmp_path, 1)
        wanted = drawn()
        ours.load_checkpoint(tmp_path)
        assert drawn() == wanted != first
        monkeypatch.setattr(reproducibility, "sharded_random_state", of_two_tensor_parallel_ranks)
        ours.load_checkpoint(tmp_path)
        assert drawn() == first


def test_a_moved_critic_does_not_change_the_policys_random_state(models, tmp_path: Path):
    with closing(critic_jobs.shared(models["qwen3"], {}, free_port(), {})) as ours:
        first = drawn()
        ours.load_hf()
        ours.save_checkpoint(tmp_path / "both", 1)
        checkpoint.save(ours.trained, tmp_path / "apart", 1)
        of_policy = drawn()
        checkpoint.save(ours.critic.trained, tmp_path / "apart" / checkpoint.CRITIC, 1)
        of_critic = drawn()
        assert ours.load_checkpoint(tmp_path / "apart") == 1
        assert drawn() == of_policy, "it moved to the policy's ranks"
        checkpoint.load_critic(ours.critic.trained, tmp_path / "apart")
        assert drawn() == of_critic, "it stayed in its own"
        checkpoint.load_critic(ours.critic.trained, tmp_path / "both")
        assert drawn() == first, "it moved to ranks of its own"
        assert len({first, of_policy, of_critic}) == 3
