"""Losses of preference pairs against plain transformers and torch, and in every layout."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.errors import DataError
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.preference_jobs import (
    MAX_TOKENS,
    make_pairs,
    one_step_and_save,
    pair_plan,
    start_from,
    train_pairs,
)
from tests.engines.megatron.ranks import engine, near
from tests.engines.megatron.test_parallel import LAYOUTS

OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5, "adam_eps": 1e-5}
VARIANTS = [
    {},
    {"label_smoothing": 0.2, "beta": 0.5},
    {"loss_type": "robust", "label_smoothing": 0.1},
    {"loss_type": "hinge", "beta": 0.3},
    {"loss_type": "ipo"},
    {"rpo_alpha": 0.7},
    {"reference_free": True},
]


def train_config(dpo: dict) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "max_tokens_per_gpu": MAX_TOKENS,
            "loss": {"type": "dpo", "dpo": dpo},
            "optimizer": OPTIMIZER,
        }
    )


def expected_pair(model, batch, pair: int, dpo) -> tuple[torch.Tensor, dict[str, float]]:
    """Return loss and metrics of a pair, written from the papers."""
    sums, ratios, lengths = [], [], []
    for sample in (2 * pair, 2 * pair + 1):
        log_probs, _ = reference.log_probs(model, batch, sample, 1.0)
        sums.append(log_probs.sum())
        lengths.append(len(log_probs))
        known = batch.reference_log_probs
        start, end = batch.response_offsets[sample : sample + 2]
        ratios.append(sums[-1] - (0 if known is None else float(known[start:end].sum())))
    delta = dpo.beta * (ratios[0] - ratios[1])
    eps = dpo.label_smoothing
    loss = {
        "sigmoid": -(1 - eps) * logsigmoid(delta) - eps * logsigmoid(-delta),
        "robust": (-(1 - eps) * logsigmoid(delta) + eps * logsigmoid(-delta)) / (1 - 2 * eps),
        "hinge": torch.clamp(1 - delta, min=0),
        "ipo": (ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * dpo.beta)) ** 2,
    }[dpo.loss_type]
    rewards = [dpo.beta * ratio.item() for ratio in ratios]
    return loss - dpo.rpo_alpha * sums[0] / lengths[0], {
        "rewards/chosen": rewards[0],
        "rewards/rejected": rewards[1],
        "rewards/margins": rewards[0] - rewards[1],
        "rewards/accuracies": float(rewards[0] > rewards[1]),
        "logps/chosen": sums[0].item(),
        "logps/rejected": sums[1].item(),
    }


@pytest.mark.parametrize("dpo", VARIANTS)
def test_dpo_equals_a_plain_loop_of_transformers_and_torch(models, dpo):
    train = train_config(dpo)
    ours = engine(models["qwen3"], train, 0, 1, free_port(), rollout_temperature=1.0)
    try:
        ours.load_hf()
        batch = make_pairs()
        if not train.loss.dpo.reference_free:
            batch = batch.with_columns(reference_log_probs=near(ours.score(batch), 0.3, 2))
        packing = pair_plan(ours, batch, 6)
        assert len(packing.steps) == 2 and len(packing.steps[0][0]) > 1
        steps = ours.train(batch, packing).steps
        weights = {name: tensor.clone() for name, tensor in ours.named_hf_tensors()}
    finally:
        ours.close()
    model = reference.load(models["qwen3"])
    optimizer = reference.make_optimizer(model, train)
    for number, found in enumerate(steps):
        pairs = [
            expected_pair(model, batch, p, train.loss.dpo)
            for p in range(6 * number, 6 * number + 6)
        ]
        loss = torch.stack([loss for loss, _ in pairs]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])
        optimizer.step()
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        for name in pairs[0][1]:
            mean = np.mean([metrics[name] for _, metrics in pairs])
            assert found[name] == pytest.approx(mean, rel=1e-4, abs=1e-5), name
    after = dict(model.named_parameters())
    for name, tensor in weights.items():
        assert torch.allclose(tensor, after[name], rtol=1e-4, atol=2e-5), name


@pytest.fixture(scope="module")
def alone(models):
    train = train_config({}).model_dump()
    return train_pairs(0, 1, free_port(), models["qwen3"], train)


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_pairs_as_one_rank(models, alone, two_ranks, layout):
    train = {"loss": {"type": "dpo"}, "optimizer": OPTIMIZER} | LAYOUTS[layout]
    first, second = two_ranks.run(train_pairs, models["qwen3"], train)
    assert first["steps"] == second["steps"]
    assert first["digest"] == second["digest"]
    assert len(first["steps"]) == 2
    for found, expected in zip(first["steps"], alone["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for name, weight in alone["after"].items():
        assert np.abs(first["after"][name] - weight).max() < 2e-5, name


@pytest.fixture(scope="module")
def reward_dir(models, tmp_path_factory) -> str:
    """A directory of transformers' model for sequence classification with one label."""
    config = AutoConfig.from_pretrained(models["qwen3"])
    config.num_labels = 1
    config.pad_token_id = 95  # transformers does not train its embedding; no pair contains it
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_config(config)
    directory = str(tmp_path_factory.mktemp("reward"))
    model.save_pretrained(directory)
    return directory


REWARD_MODEL = {
    "max_tokens_per_gpu": MAX_TOKENS,
    "loss": {"type": "reward_model", "center_rewards_coefficient": 0.01},
    "optimizer": OPTIMIZER,
}


def test_a_reward_model_equals_a_plain_loop_of_transformers_and_torch(reward_dir):
    found = train_pairs(0, 1, free_port(), reward_dir, REWARD_MODEL)
    train = TrainConfig.model_validate(REWARD_MODEL)
    model = AutoModelForSequenceClassification.from_pretrained(reward_dir, dtype=torch.float32)
    optimizer = reference.make_optimizer(model, train)
    batch = make_pairs()
    for number, step in enumerate(found["steps"]):
        rewards = torch.stack(
            [
                model(torch.from_numpy(batch.tokens[start:end]).long()[None]).logits[0, 0]
                for start, end in pairwise(batch.offsets[12 * number : 12 * number + 13].tolist())
            ]
        )
        chosen, rejected = rewards[::2], rewards[1::2]
        loss = -logsigmoid(chosen - rejected).mean()
        loss = loss + 0.01 * torch.mean((chosen + rejected) ** 2)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])
        optimizer.step()
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert step["rewards/chosen"] == pytest.approx(chosen.mean().item(), rel=1e-4, abs=1e-6)
        right = (chosen > rejected).float().mean().item()
        assert step["rewards/accuracies"] == pytest.approx(right)
    after = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert found["after"].keys() == after.keys()
    for name, tensor in found["after"].items():
        assert torch.allclose(torch.from_numpy(tensor), after[name], rtol=1e-4, atol=2e-5), name


def test_a_reward_model_starts_from_the_weights_of_a_policy_or_of_another_one(models, tmp_path):
    saved, exported = {}, {}
    for name, train in {"policy": {}, "reward": REWARD_MODEL}.items():
        directory = str(tmp_path / name)
        saved[name] = one_step_and_save(models["qwen3"], train, directory)
        exported[name] = start_from(models["qwen3"], REWARD_MODEL, directory)
    for name, tensors in exported.items():
        for key, tensor in saved[name].items():
            assert np.array_equal(tensors.get(key, tensor), tensor), (name, key)
    assert not exported["policy"]["score.weight"].any()
    assert exported["reward"]["score.weight"].any()


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_a_reward_model_as_one_rank(reward_dir, reward_alone, two_ranks, layout):
    train = REWARD_MODEL | LAYOUTS[layout]
    results = two_ranks.run(train_pairs, reward_dir, train)
    assert results[0]["steps"] == results[1]["steps"]
    assert results[0]["digest"] == results[1]["digest"]
    for found, expected in zip(results[0]["steps"], reward_alone["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    after = results[0]["after"] | results[1]["after"]
    assert after.keys() == reward_alone["after"].keys()
    for name, weight in reward_alone["after"].items():
        assert np.abs(after[name] - weight).max() < 2e-5, name


@pytest.fixture(scope="module")
def reward_alone(reward_dir):
    return train_pairs(0, 1, free_port(), reward_dir, REWARD_MODEL)


def test_split_pairs_and_missing_references_are_refused_before_a_step(models):
    ours = engine(models["qwen3"], train_config({}), 0, 1, free_port(), rollout_temperature=1.0)
    try:
        ours.load_hf()
        before = ours.state_digest()
        batch = make_pairs()
        with pytest.raises(DataError, match="no reference_log_probs"):
            ours.train(batch, pair_plan(ours, batch))
        batch = batch.with_columns(reference_log_probs=ours.score(batch))
        split = plan(batch.lengths, global_batch_size=None, max_tokens=24, data_parallel=1)
        with pytest.raises(DataError, match="split pairs"):
            ours.train(batch, split)
        alone = batch.with_columns(rollout=None)
        with pytest.raises(DataError, match="24 samples of 24 rollouts"):
            ours.train(alone, pair_plan(ours, batch))
        assert ours.state_digest() == before
    finally:
        ours.close()
