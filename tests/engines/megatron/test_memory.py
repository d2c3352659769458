"""Offloading parts of a rank's state (rlpipe.engines.megatron.memory), on a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlpipe.batch.packing import plan
from rlpipe.config.train import CriticConfig, OptimizerConfig, TrainConfig
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.engines.megatron.memory import (
    CHUNK_BYTES,
    PARTS,
    DeviceMemory,
    HostCopy,
    Part,
    RankModels,
)
from rlpipe.errors import TrainerError
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import engine, make_batch, with_returns

FAST = OptimizerConfig(lr=1e-2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "float32": {"train": TrainConfig(optimizer=FAST)},
    "bfloat16": {"train": TrainConfig(optimizer=FAST), "dtype": "bfloat16"},
    "sharded": {
        "train": TrainConfig(optimizer=FAST, use_distributed_optimizer=True),
        "dtype": "bfloat16",
    },
}


def made(models: dict[str, str], train: TrainConfig, **settings: Any) -> MegatronEngine:
    ours = engine(models["qwen3"], train, 0, 1, free_port(), **settings)
    ours.load_hf()
    return ours


@pytest.fixture(params=LAYOUTS)
def ours(models: dict[str, str], request: pytest.FixtureRequest) -> Iterator[MegatronEngine]:
    made_one = made(models, **LAYOUTS[request.param])
    yield made_one
    made_one.close()


def train_once(ours: MegatronEngine, seed: int) -> str:
    batch = make_batch(seed=seed)
    packing = plan(batch.lengths, global_batch_size=12, max_tokens=64, data_parallel=1)
    proximal = ours.score(batch)
    return ours.train(batch.with_columns(proximal_log_probs=proximal), packing).state_digest


def held_bytes(ours: MegatronEngine, *parts: Part) -> int:
    tensors = RankModels((ours._trained,)).tensors() if ours._trained else {}
    storages = [tensor.untyped_storage() for part in parts for tensor in tensors[part]]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def test_offloading_between_all_calls_does_not_change_training(ours: MegatronEngine, tmp_path):
    ours.save_checkpoint(tmp_path, 0)
    straight = [train_once(ours, seed) for seed in range(2)]
    ours.load_checkpoint(tmp_path)
    slept = []
    for seed in range(2):
        ours.occupy(("weights",))
        scores = ours.score(make_batch(seed=seed))
        ours.occupy(PARTS)
        np.testing.assert_array_equal(scores, ours.score(make_batch(seed=seed)))
        slept.append(train_once(ours, seed))
        ours.occupy(())
        ours.occupy(PARTS)
        assert ours.state_digest() == slept[-1]
    assert slept == straight


def test_offloaded_parts_take_no_memory_and_raise_an_error(ours: MegatronEngine):
    all_bytes = held_bytes(ours, *PARTS)
    assert ours.occupy(("weights",))["kept_bytes"] == held_bytes(ours, "weights") > 0
    assert held_bytes(ours, "gradients") == 0
    assert held_bytes(ours, "optimizer") < all_bytes / 2
    batch = make_batch()
    packing = plan(batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=1)
    with pytest.raises(TrainerError, match=r"optimizer, gradients offloaded"):
        ours.train(batch, packing)
    assert ours.occupy(())["kept_bytes"] == 0
    for call in (
        lambda: ours.score(batch),
        ours.state_digest,
        lambda: list(ours.named_hf_tensors()),
        ours.load_hf,
    ):
        with pytest.raises(TrainerError, match="not in device memory"):
            call()
    assert ours.occupy(())["kept_bytes"] == 0, "again, it does nothing"
    ours.occupy(PARTS)
    assert held_bytes(ours, *PARTS) == all_bytes


def test_restored_gradient_buffers_are_zero(ours: MegatronEngine):
    train_once(ours, 0)
    ours.occupy(("weights", "optimizer"))
    ours.occupy(PARTS)
    assert all(not buffer.grad_data.any() for buffer in ours.trained.chunks[0].buffers)


def test_critic_and_teacher_are_offloaded_with_the_policy(models: dict[str, str]):
    settings = {
        "critic": CriticConfig(),
        "critic_optimizer_steps": 10,
        "teacher_dir": models["qwen3"],
    }
    ours = made(models, TrainConfig(), **settings)
    try:
        batch = make_batch()
        teacher = ours.score(batch, model="teacher")
        values = ours.values(batch)
        packing = plan(batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=1)
        for _ in range(2):
            ours.occupy(("weights",))
            with pytest.raises(TrainerError, match="teacher offloaded"):
                ours.score(batch, model="teacher")
            np.testing.assert_array_equal(ours.values(batch), values)
            ours.occupy(("weights", "teacher"))
            np.testing.assert_array_equal(ours.score(batch, model="teacher"), teacher)
        ours.occupy(PARTS)
        trained = with_returns(batch.with_columns(proximal_log_probs=ours.score(batch)), values, 0)
        digest = ours.train(trained, packing).state_digest
        ours.occupy(())
        ours.occupy(PARTS)
        assert ours.state_digest() == digest
    finally:
        ours.close()


def test_scoring_the_reference_restores_the_policy_bit_for_bit(
    ours: MegatronEngine,
):
    batch = make_batch()
    seen = []
    for seed in range(2):
        seen.append(ours.score(batch))
        ours.keep_reference()
        digest = train_once(ours, seed)
        trained = ours.score(batch)
        assert not np.array_equal(trained, seen[-1])
        for _ in range(2):
            np.testing.assert_array_equal(ours.score(batch, model="reference"), seen[-1])
            assert ours.state_digest() == digest
            np.testing.assert_array_equal(ours.score(batch), trained)
            ours.occupy(())
            ours.occupy(PARTS)
        with pytest.raises(ZeroDivisionError), ours._reference_weights():
            _ = 1 / 0
        assert ours.state_digest() == digest


def test_storages_of_any_size_are_split_at_the_ends_of_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlpipe.engines.megatron.memory.CHUNK_BYTES", 4096)
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 4095, 4097, 0, 9000, 3)
    tensors = [
        torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator) for size in sizes
    ]
    before = [tensor.clone() for tensor in tensors]
    copy = HostCopy()
    storages = [tensor.untyped_storage() for tensor in tensors]
    copy.copy_from(storages)
    for tensor in tensors:
        tensor.zero_()
    copy.copy_to(storages)
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    assert CHUNK_BYTES == 2**28


def test_a_shared_storage_moves_once_with_its_first_part():
    memory = DeviceMemory()
    whole = torch.arange(8.0)
    tensors: dict[Part, list[torch.Tensor]] = {
        "weights": [whole[:4], whole[4:]],
        "optimizer": [whole[2:6]],
    }
    memory.occupy(tensors, ("weights",))
    assert memory.offloaded == {"optimizer", "gradients", "teacher"}
    assert whole.tolist() == list(range(8))
    memory.occupy(tensors, ())
    assert whole.untyped_storage().nbytes() == 0
    memory.occupy(tensors, PARTS)
    assert whole.tolist() == list(range(8))
