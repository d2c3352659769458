"""PPO's critic against transformers and torch, in every layout and through checkpoints."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import plan
from rlpipe.config.train import CriticConfig, TrainConfig
from rlpipe.errors import ConfigError, DataError, TrainerError
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.ranks import (
    engine,
    make_batch,
    save_and_resume_with_critic,
    value_and_train,
    with_returns,
)
from tests.parameters import each

TRAIN = {
    "max_tokens_per_gpu": 64,
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "adam_eps": 1e-5},
}
LAYOUTS = {
    "data parallel, distributed optimizer": {"use_distributed_optimizer": True},
    "tensor parallel": {"parallel": {"tensor_model_parallel_size": 2}},
    "tensor and sequence parallel": {
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    },
    "pipeline parallel": {"parallel": {"pipeline_model_parallel_size": 2}},
    "context parallel": {"parallel": {"context_parallel_size": 2}},
}


@pytest.fixture(scope="module")
def reward_model(models, tmp_path_factory) -> str:
    """A directory with other weights than the policy's, and a head."""
    directory = tmp_path_factory.mktemp("critic")
    torch.manual_seed(1)
    model = AutoModelForTokenClassification.from_pretrained(
        models["qwen3"], num_labels=1, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def start(models):
    """Start engines of one rank with a critic; they are closed after the test."""
    opened = []

    def make(critic: CriticConfig | None, train: dict | None = None):
        config = TrainConfig.model_validate(train or TRAIN)
        ours = engine(
            models["qwen3"], config, 0, 1, free_port(), critic=critic, critic_optimizer_steps=100
        )
        opened.append(ours)
        ours.load_hf()
        return ours

    yield make
    for ours in opened:
        ours.close()


def values_of(model, batch: BatchColumns, i: int) -> torch.Tensor:
    tokens = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]]).long()
    return model(tokens[None]).logits[0, int(batch.prompt_lengths[i]) - 1 : -1, 0]


def one_plan(ours, batch: BatchColumns, global_batch_size: int | None = None):
    return plan(
        batch.lengths,
        global_batch_size=global_batch_size,
        max_tokens=ours.max_tokens,
        data_parallel=1,
    )


def torch_step(model, optimizer, batch: BatchColumns, samples: list[int], clip_grad: float) -> dict:
    """Compute 0.5 × the mean over samples of each sample's mean clipped squared error."""
    assert batch.values is not None and batch.returns is not None
    losses = []
    for i in samples:
        here = slice(batch.response_offsets[i], batch.response_offsets[i + 1])
        old, returns, mask = (
            torch.from_numpy(c[here]) for c in (batch.values, batch.returns, batch.loss_mask)
        )
        new = values_of(model, batch, i)
        near = torch.min(torch.max(new, old - 0.2), old + 0.2)
        error = torch.max((new - returns) ** 2, (near - returns) ** 2)
        losses.append((error * mask).sum() / mask.sum().clamp(min=1))
    total = 0.5 * torch.stack(losses).mean()
    optimizer.zero_grad()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
    optimizer.step()
    return {"value_loss": total.item(), "critic_grad_norm": norm.item()}


def test_values_and_training_equal_transformers_and_torch(reward_model, start):
    ours = start(CriticConfig(hf_checkpoint=reward_model))
    batch = make_batch()
    theirs = AutoModelForTokenClassification.from_pretrained(reward_model, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.cat([values_of(theirs, batch, i) for i in range(len(batch))]).numpy()
    found = ours.values(batch)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(ours.values(batch, max_tokens=1) - expected).max() < 1e-5
    batch = with_returns(batch, found, 1)
    packing = one_plan(ours, batch, 12)
    assert len(packing.steps) == 2
    optimizer = reference.make_optimizer(theirs, TrainConfig.model_validate(TRAIN))
    for step, metrics in zip(
        packing.steps, ours.train(batch, packing, critic_only=True).steps, strict=True
    ):
        samples = sorted(i for rank in step for micro in rank for i in micro)
        wanted = torch_step(theirs, optimizer, batch, samples, clip_grad=0.5)
        assert metrics["value_loss"] == pytest.approx(wanted["value_loss"], rel=1e-4)
        assert metrics["critic_grad_norm"] == pytest.approx(wanted["critic_grad_norm"], rel=1e-4)
        assert 0 < metrics["value_clipfrac"] < 1
    with torch.no_grad():
        expected = torch.cat([values_of(theirs, batch, i) for i in range(len(batch))]).numpy()
    assert np.abs(ours.values(batch) - expected).max() < 2e-4


def test_a_critic_without_a_directory_starts_from_the_policy_with_zero_values(start):
    ours = start(CriticConfig(value_clip=None))
    batch = make_batch()
    assert not ours.values(batch).any()
    policy = dict(ours.trained.last_model.named_parameters())
    copied = {
        name: p
        for name, p in ours.critic.trained.last_model.named_parameters()
        if not name.startswith("output_layer")
    }
    assert len(copied) == len(policy)
    assert all(torch.equal(parameter, policy[name]) for name, parameter in copied.items())
    batch = batch.with_columns(values=ours.values(batch), returns=np.ones_like(batch.loss_mask))
    losses = [
        ours.train(batch, one_plan(ours, batch), critic_only=True).steps[0]["value_loss"]
        for _ in range(12)
    ]
    counted = [mask.any() for mask in batch.split(batch.loss_mask)]
    assert losses[0] == pytest.approx(0.5 * sum(counted) / len(counted))
    assert losses[-1] < 0.5 * losses[0]


def test_training_the_critic_does_not_change_the_policy(
    start,
):
    ours = start(CriticConfig())
    batch = make_batch()
    before = {name: tensor.clone() for name, tensor in ours.named_hf_tensors()}
    batch = with_returns(batch, ours.values(batch), 1)
    step = ours.train(batch, one_plan(ours, batch), critic_only=True).steps[0]
    assert "loss" not in step
    assert ours.trained.scheduler.num_steps == 0
    assert ours.critic.trained.scheduler.num_steps == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.named_hf_tensors())
    both = ours.train(batch, one_plan(ours, batch)).steps[0]
    after = {name: tensor.clone() for name, tensor in ours.named_hf_tensors()}
    ours.close()
    alone = start(None)
    metrics = alone.train(batch, one_plan(alone, batch)).steps[0]
    assert {name: both[name] for name in metrics} == metrics
    assert all(torch.equal(tensor, after[name]) for name, tensor in alone.named_hf_tensors())


def test_the_state_digest_covers_the_critic(start):
    ours = start(CriticConfig())
    before = ours.state_digest()
    with torch.no_grad():
        next(ours.critic.trained.last_model.parameters())[0, 0] += 1
    changed = ours.state_digest()
    ours.close()
    assert before != changed
    alone = start(None)
    assert alone.state_digest() not in (before, changed)
    with pytest.raises(TrainerError, match="no critic"):
        alone.values(make_batch())


def test_a_batch_without_values_or_returns_is_refused_before_a_step(start):
    ours = start(CriticConfig())
    batch = make_batch()
    before = ours.state_digest()
    with pytest.raises(DataError, match="no values"):
        ours.train(batch, one_plan(ours, batch))
    with pytest.raises(DataError, match="no returns"):
        ours.train(batch.with_columns(values=np.zeros_like(batch.loss_mask)), one_plan(ours, batch))
    assert ours.state_digest() == before


def test_a_head_of_several_outputs_is_refused(reward_model, start, tmp_path):
    weights = load_file(f"{reward_model}/model.safetensors")
    save_file(
        weights | {"score.weight": torch.zeros(2, 64)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    shutil.copy(f"{reward_model}/config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"score.weight \[2, 64\]"):
        start(CriticConfig(hf_checkpoint=str(tmp_path)))


def test_a_critic_that_is_not_in_the_checkpoint_starts_from_its_policy(start, tmp_path):
    alone = start(None)
    batch = make_batch()
    alone.train(batch, one_plan(alone, batch))
    alone.save_checkpoint(tmp_path, 1)
    alone.close()
    ours = start(CriticConfig())
    assert ours.load_checkpoint(tmp_path) == 1
    assert not ours.values(batch).any()
    name, parameter = next(iter(ours.critic.trained.last_model.named_parameters()))
    assert torch.equal(parameter, dict(ours.trained.last_model.named_parameters())[name])


@pytest.mark.integration
@pytest.mark.parametrize(
    "layout",
    each(
        ["one rank", "data parallel, distributed optimizer", "pipeline parallel"],
        ["one rank", "pipeline parallel"],
    ),
)
def test_resumed_training_with_a_critic_equals_uninterrupted_training(
    models, two_ranks, tmp_path, layout
):
    train = TRAIN | LAYOUTS.get(layout, {})
    arguments = (models["qwen3"], train, str(tmp_path), free_port())
    if layout == "one rank":
        found = [save_and_resume_with_critic(0, 1, free_port(), *arguments)]
    else:
        found = two_ranks.run(save_and_resume_with_critic, *arguments)
    assert all(digests == found[0] for digests in found)
    assert found[0]["iteration"] == 1
    assert found[0]["loaded"] == found[0]["saved"] != found[0]["straight"]
    assert found[0]["resumed"] == found[0]["straight"]


@pytest.fixture(scope="module")
def one_rank(models, reward_model):
    return value_and_train(
        0, 1, free_port(), models["qwen3"], TRAIN, {"hf_checkpoint": reward_model}
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    "layout", each(LAYOUTS, ["tensor and sequence parallel", "pipeline parallel"])
)
def test_two_ranks_compute_the_same_values_and_steps_as_one_rank(
    models, reward_model, one_rank, two_ranks, layout
):
    first, second = two_ranks.run(
        value_and_train, models["qwen3"], TRAIN | LAYOUTS[layout], {"hf_checkpoint": reward_model}
    )
    assert first["digest"] == second["digest"]
    assert np.array_equal(first["values"], second["values"])
    assert np.abs(first["values"] - one_rank["values"]).max() < 1e-5
    for found, wanted in zip(first["steps"], one_rank["steps"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-5)
        assert found["critic_grad_norm"] == pytest.approx(wanted["critic_grad_norm"], rel=1e-5)
    assert np.abs(first["after"] - one_rank["after"]).max() < 2e-4
