"""The determinism switch: equal batches give equal bits in every process."""

from __future__ import annotations

import os

import pytest
import torch

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron import reproducibility
from rlpipe.errors import ConfigError, TrainerError
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import engine, make_batch

TRAIN = {
    "max_tokens_per_gpu": 64,
    "loss": {"use_tis": True, "entropy_coef": 0.01},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "lr_decay_style": "cosine"},
}
ITERATIONS = 6


def replay(
    rank: int, world_size: int, port: int, model_dir: str, train: dict, later_ports: list[int]
) -> list[list[str]]:
    """Return state digests after 12 packed optimizer steps, in one fresh engine per port."""
    found = []
    for meeting in (port, *later_ports):
        ours = engine(
            model_dir,
            TrainConfig.model_validate(train),
            rank,
            world_size,
            meeting,
            deterministic=True,
        )
        ours.load_hf()
        digests = []
        for seed in range(ITERATIONS):
            batch = make_batch(seed=seed)
            batch = batch.with_columns(proximal_log_probs=batch.rollout_log_probs)
            packing = plan(
                batch.lengths, global_batch_size=12, max_tokens=64, data_parallel=ours.data_parallel
            )
            assert len(packing.steps) == 2
            digests.append(ours.train(batch, packing).state_digest)
        found.append(digests)
        ours.close()
    return found


@pytest.fixture
def switched_back():
    """Switch determinism off after the test."""
    yield
    reproducibility.set_deterministic(False)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_three_replays_of_twelve_packed_steps_give_the_same_bits(models, switched_back, family):
    first, second, third = replay(
        0, 1, free_port(), models[family], TRAIN, [free_port(), free_port()]
    )
    assert first == second == third
    assert len(set(first)) == ITERATIONS


@pytest.mark.integration
@pytest.mark.parametrize("layout", [{}, {"use_distributed_optimizer": True}])
def test_replays_on_two_data_parallel_ranks_give_the_same_bits(models, two_ranks, layout):
    ranks = two_ranks.run(replay, models["qwen3"], TRAIN | layout, [free_port(), free_port()])
    first, second, third = ranks[0]
    assert first == second == third
    assert ranks[0] == ranks[1]
    assert len(set(first)) == ITERATIONS


def test_the_switch_sets_torch_and_megatron_and_can_be_reverted(models, switched_back):
    ours = engine(models["qwen3"], TrainConfig(), 0, 1, free_port(), deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert ours.trained.bridge.config.deterministic_mode
    assert reproducibility.ENVIRONMENT.items() <= dict(os.environ).items()
    ours.close()
    ours = engine(models["qwen3"], TrainConfig(), 0, 1, free_port())
    assert not torch.are_deterministic_algorithms_enabled()
    assert not ours.trained.bridge.config.deterministic_mode
    ours.close()


def test_determinism_after_nondeterministic_use_of_cuda_is_refused(monkeypatch, switched_back):
    monkeypatch.setattr(reproducibility.platform, "CUDA_FOUND", True)
    monkeypatch.setattr(reproducibility, "_used_nondeterministic_cuda", False)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    reproducibility.set_deterministic(True)
    assert os.environ["NCCL_ALGO"] == "Ring"
    reproducibility.set_deterministic(False)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with pytest.raises(TrainerError, match="NCCL_ALGO"):
        reproducibility.set_deterministic(True)


def test_megatrons_deterministic_mode_is_refused_as_an_argument(models):
    with pytest.raises(ConfigError, match="use deterministic"):
        engine(
            models["qwen3"], TrainConfig(megatron={"deterministic_mode": True}), 0, 1, free_port()
        )


def test_facts_of_a_rank_are_plain_values_that_import_nothing_when_unpickled():
    assert {type(value) for value in reproducibility.facts("float32").values()} <= {
        str,
        bool,
        type(None),
    }
