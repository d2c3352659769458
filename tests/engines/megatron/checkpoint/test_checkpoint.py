"""Save and load: bit for bit, in the same and in a fresh engine, and in other layouts."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint import checkpoint, disk_space
from rlpipe.engines.megatron.checkpoint.state import inner_optimizers
from rlpipe.errors import StoreFull, TrainerError
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import (
    copy_of_checkpoint,
    engine,
    make_batch,
    room_and_size,
    save_and_resume,
    weights_of_checkpoint,
)

DTYPES = ("float32", "bfloat16")
TRAIN = {
    "max_tokens_per_gpu": 64,
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "lr_decay_style": "linear"},
}
TWO_RANKS = {
    "data parallel, distributed optimizer": {"use_distributed_optimizer": True},
    "tensor and sequence parallel": {
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    },
    "pipeline parallel": {"parallel": {"pipeline_model_parallel_size": 2}},
}


def check(digests: dict) -> None:
    assert digests["iteration"] == digests["iteration in place"] == 1
    assert digests["loaded"] == digests["loaded in place"] == digests["saved"]
    assert digests["resumed"] == digests["resumed in place"] == digests["straight"]
    assert digests["straight"] != digests["saved"]


@pytest.mark.integration
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_resumed_training_equals_uninterrupted_training(
    models, tmp_path, distributed_optimizer, dtype
):
    train = TRAIN | {"use_distributed_optimizer": distributed_optimizer}
    check(
        save_and_resume(
            0, 1, free_port(), models["qwen3"], train, str(tmp_path), free_port(), dtype
        )
    )
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert (tmp_path / "iter_0000001" / ".metadata").exists()


@pytest.mark.integration
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_resumed_training_equals_uninterrupted_training_on_two_ranks(
    models, two_ranks, tmp_path, layout
):
    train = TRAIN | TWO_RANKS[layout]
    first, second = two_ranks.run(
        save_and_resume, models["qwen3"], train, str(tmp_path), free_port()
    )
    assert first == second
    check(first)
    if "parallel" in TWO_RANKS[layout]:
        alone = weights_of_checkpoint(0, 1, free_port(), models["qwen3"], TRAIN, str(tmp_path))
        together = two_ranks.run(weights_of_checkpoint, models["qwen3"], train, str(tmp_path))[0]
        for name, weight in together["weights"].items():
            assert np.array_equal(alone["weights"][name], weight), name


@pytest.mark.integration
@pytest.mark.parametrize(
    ("distributed", "dtype"),
    [(True, "float32"), *(pytest.param(False, dtype, marks=pytest.mark.long) for dtype in DTYPES)],
)
def test_experts_change_their_layout_and_back(models, two_ranks, tmp_path, distributed, dtype):
    """With expert parallelism Megatron has an optimizer of its own for the experts."""
    model = models["qwen3_moe"]
    together = TRAIN | {"use_distributed_optimizer": distributed}
    apart = together | {"parallel": {"expert_model_parallel_size": 2}}
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    saved = two_ranks.run(save_and_resume, model, apart, first, free_port(), dtype)[0]
    check(saved)

    def copied(train: dict, source: str, target: str) -> dict:
        job = (copy_of_checkpoint, model, train, source, target, None, dtype)
        return two_ranks.run(*job)[0]

    there = copied(together, first, second)
    back = copied(apart, second, third)
    assert back["digest"] == saved["saved"]
    for name, weight in there["weights"].items():
        assert np.array_equal(back["weights"][name], weight), name
    again = copied(together, third, str(tmp_path / "last"))
    assert again["digest"] == there["digest"] and again["trained"] == there["trained"]


@pytest.mark.integration
@pytest.mark.parametrize("distributed", [False, True])
def test_a_state_of_the_other_optimizer_is_refused_and_its_weights_load(
    models, tmp_path, distributed
):
    ours = engine(
        models["qwen3"],
        TrainConfig(use_distributed_optimizer=not distributed),
        0,
        1,
        free_port(),
    )
    ours.load_hf()
    weights = ours.weights_digest()
    ours.save_checkpoint(tmp_path, 0)
    ours.close()
    train = TrainConfig(use_distributed_optimizer=distributed)
    other = engine(models["qwen3"], train, 0, 1, free_port())
    stored = f"use_distributed_optimizer={str(not distributed).lower()}"
    with pytest.raises(
        TrainerError, match=f"(?s)another kind of optimizer.*found: +train.{stored}"
    ):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, weights_only=True)
    assert other.weights_digest() == weights
    other.close()


@pytest.mark.integration
def test_weight_version_zero_can_be_saved_and_loaded(models, tmp_path):
    ours = engine(models["qwen3"], TrainConfig(), 0, 1, free_port())
    ours.load_hf()
    before = ours.state_digest()
    assert ours.save_checkpoint(tmp_path, 0) == tmp_path / "iter_0000000"
    ours.close()
    other = engine(models["qwen3"], TrainConfig(), 0, 1, free_port())
    assert other.load_checkpoint(tmp_path) == 0
    assert other.state_digest() == before
    other.close()


@pytest.mark.integration
def test_a_checkpoint_replaces_an_interrupted_one_and_starts_no_process(models, tmp_path):
    ours = engine(models["qwen3"], TrainConfig(), 0, 1, free_port())
    ours.load_hf()
    before = ours.state_digest()
    for name in ("iter_0000003", "iter_0000003.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("half of it")
    children = psutil.Process().children(recursive=True)
    ours.save_checkpoint(tmp_path, 3)
    ours.save_checkpoint(tmp_path, 3)
    assert psutil.Process().children(recursive=True) == children
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]
    assert ours.load_checkpoint(tmp_path) == 3
    assert ours.state_digest() == before
    ours.close()


@pytest.mark.integration
def test_a_full_disk_is_an_error(models, tmp_path, monkeypatch):
    def full(_file_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ours = engine(models["qwen3"], TrainConfig(), 0, 1, free_port())
    ours.load_hf()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TrainerError, match=r"rank 0: .*No space left"):
        ours.save_checkpoint(tmp_path, 3)
    assert not (tmp_path / "iter_0000003").exists()
    ours.close()


def test_a_missing_checkpoint_is_named_in_the_error(models, tmp_path):
    ours = engine(models["qwen3"], TrainConfig(), 0, 1, free_port())
    with pytest.raises(TrainerError, match="no checkpoint in this directory"):
        ours.load_checkpoint(tmp_path)
    with pytest.raises(TrainerError, match="iter_0000007"):
        ours.load_checkpoint(tmp_path, iteration=7)
    ours.close()


def test_without_disk_space_nothing_is_written_and_the_error_names_the_need(
    models, tmp_path, monkeypatch
):
    ours = engine(models["qwen3"], TrainConfig(), 0, 1, free_port())
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1024**2))
    with pytest.raises(StoreFull, match="no room") as caught:
        ours.save_checkpoint(tmp_path / "checkpoints", 3)
    ours.close()
    assert "MiB" in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()


def test_disk_space_is_required_for_all_concurrent_checkpoints(models, tmp_path, monkeypatch):
    ours = engine(models["qwen3"], TrainConfig(), 0, 1, free_port())
    ours.load_hf()
    needed = disk_space._disk_space([ours.trained], tmp_path / "iter_0000001").needed_bytes
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=needed * 3 // 2))
    with pytest.raises(StoreFull, match="no room"):
        checkpoint.save(
            ours.trained, tmp_path / "two", 1, combine=lambda space: space.combined_with(space)
        )
    assert checkpoint.save(ours.trained, tmp_path / "one", 1).is_dir()
    ours.close()


@pytest.mark.integration
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen3", {}),
        ("qwen3", {"pipeline_model_parallel_size": 2}),
        ("qwen3_moe", {"expert_model_parallel_size": 2}),
    ],
    ids=["data parallel", "pipeline parallel", "expert parallel"],
)
def test_a_checkpoint_has_the_predicted_size(
    models, two_ranks, tmp_path, family, parallel, distributed_optimizer, dtype
):
    train = TRAIN | {"parallel": parallel, "use_distributed_optimizer": distributed_optimizer}
    first, second = two_ranks.run(room_and_size, models[family], train, str(tmp_path), dtype)
    assert first == second
    needed, size = first
    assert 0.9 < needed / size < 1.1


@pytest.mark.integration
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_the_configuration_decides_the_optimizer_settings(models, tmp_path, distributed_optimizer):
    """Learning rate, betas and eps of another run's checkpoint would otherwise be trained with."""

    def settings(ours) -> list[dict]:
        groups = [
            group
            for part in inner_optimizers(ours.trained.optimizer)
            for group in part.optimizer.param_groups
        ]
        return [
            {name: group[name] for name in ("lr", "max_lr", "betas", "eps", "weight_decay")}
            for group in groups
        ]

    base = {"max_tokens_per_gpu": 64, "use_distributed_optimizer": distributed_optimizer}
    first, other = (
        TrainConfig.model_validate(
            {
                **base,
                "optimizer": {
                    "lr": lr,
                    "adam_beta2": beta2,
                    "adam_eps": eps,
                    "weight_decay": decay,
                },
            }
        )
        for lr, beta2, eps, decay in ((1e-3, 0.95, 1e-8, 0.1), (5e-4, 0.99, 1e-6, 0.0))
    )
    batch = make_batch()
    packing = plan(batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=1)
    ours = engine(models["qwen3"], first, 0, 1, free_port())
    ours.load_hf()
    ours.train(batch, packing)
    ours.save_checkpoint(tmp_path, 1)
    saved = ours.state_digest()
    ours_settings = settings(ours)
    ours.close()
    forked = engine(models["qwen3"], other, 0, 1, free_port())
    made = settings(forked)
    forked.load_checkpoint(tmp_path)
    assert forked.state_digest() == saved
    assert [{**group, "lr": 5e-4} for group in made] == settings(forked) != ours_settings
    assert forked.train(batch, packing).steps[0]["lr"] == 5e-4
    forked.close()
