"""A custom loss of logits, written for slime, equals the built-in loss in every layout."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from rlpipe.system.ports import free_port
from tests.engines.megatron.rollout_jobs import train_fanned
from tests.parameters import each

POLICY = """
import torch
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss

def policy_loss(args, batch, logits, sum_of_sample_mean):
    assert logits.dtype == torch.float32
    assert logits.shape[:2] == batch["tokens"].shape == batch["full_loss_masks"].shape
    lengths = {name: batch[name] for name in ("total_lengths", "response_lengths")}
    _, found = get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], with_entropy=True, **lengths
    )
    log_probs = torch.cat(found["log_probs"])
    log_ratio = torch.cat(batch["log_probs"]) - log_probs
    advantages = torch.cat(batch["advantages"])
    pg_loss, clipped = compute_policy_loss(log_ratio, advantages, args.eps_clip, args.eps_clip)
    kl = compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), "k3")
    entropy = sum_of_sample_mean(torch.cat(found["entropy"]))
    loss = sum_of_sample_mean(pg_loss) + 0.05 * sum_of_sample_mean(kl) - 0.01 * entropy
    metrics = {"loss": loss.clone().detach(), "entropy": entropy.detach()}
    metrics["clipfrac"] = sum_of_sample_mean(clipped)
    return loss, metrics
"""
ARGS = Namespace(rollout_temperature=0.8, eps_clip=0.05)
BUILT_IN = {"eps_clip": 0.05, "kl_loss_coef": 0.05, "kl_loss_type": "k3", "entropy_coef": 0.01}
TRAIN: dict[str, Any] = {
    "max_tokens_per_gpu": 64,
    "optimizer": {"lr": 1e-3, "clip_grad": 0.5, "adam_eps": 1e-5},
}
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("loss") / "mine.py"
    file.write_text(POLICY)
    return {"type": "custom", "custom_loss_function_path": f"{file}:policy_loss"}


@pytest.fixture(scope="module")
def alone(models, written) -> dict[str, Any]:
    return train_fanned(0, 1, free_port(), models["qwen3"], {**TRAIN, "loss": written}, ARGS)


def check(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted) == 3
    for ours, theirs in zip(found, wanted, strict=True):
        for name in ("loss", "grad_norm", "clipfrac", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def test_a_slime_loss_takes_the_steps_of_the_built_in_loss(models, alone):
    wanted = train_fanned(0, 1, free_port(), models["qwen3"], {**TRAIN, "loss": BUILT_IN})
    check(alone["steps"], wanted["steps"])
    assert 0 < wanted["steps"][0]["clipfrac"] < 1


def test_a_slime_loss_per_token_takes_the_steps_of_the_built_in_loss(models, written):
    by_token = {"calculate_per_token_loss": True}
    wanted = train_fanned(
        0, 1, free_port(), models["qwen3"], {**TRAIN, "loss": {**BUILT_IN, **by_token}}
    )
    found = train_fanned(
        0, 1, free_port(), models["qwen3"], {**TRAIN, "loss": {**written, **by_token}}, ARGS
    )
    check(found["steps"], wanted["steps"])


@pytest.mark.integration
@pytest.mark.parametrize("layout", each(LAYOUTS, ["sequence", "context"]))
def test_a_slime_loss_on_two_ranks_equals_one_rank(models, written, alone, two_ranks, layout):
    train = {**TRAIN, "loss": written, "parallel": LAYOUTS[layout]}
    first, second = two_ranks.run(train_fanned, models["qwen3"], train, ARGS)
    assert first["steps"] == second["steps"]
    check(first["steps"], alone["steps"])
