"""Reference training in plain transformers and torch, one sample at a time."""

from __future__ import annotations

import math

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import PackingPlan
from rlpipe.config.train import TrainConfig


def load(model_dir: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def log_probs(
    model: torch.nn.Module, batch: BatchColumns, i: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies of sample i's response tokens."""
    tokens = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]]).long()
    start = int(batch.prompt_lengths[i])
    everything = torch.log_softmax(model(tokens[None]).logits[0, start - 1 : -1] / temperature, -1)
    return everything.gather(1, tokens[start:, None])[:, 0], -(everything.exp() * everything).sum(
        -1
    )


@torch.no_grad()
def score(model: torch.nn.Module, batch: BatchColumns, temperature: float) -> np.ndarray:
    return torch.cat(
        [log_probs(model, batch, i, temperature)[0].float() for i in range(len(batch))]
    ).numpy()


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    ours = config.optimizer
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": ours.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=ours.lr, betas=(ours.adam_beta1, ours.adam_beta2), eps=ours.adam_eps
    )


def train(
    model,
    optimizer,
    batch: BatchColumns,
    packing: PackingPlan,
    config: TrainConfig,
    temperature: float,
) -> list[dict]:
    """Take the plan's optimizer steps; return loss and gradient norm of each."""
    results = []
    for step in packing.steps:
        samples = [i for rank in step for micro in rank for i in micro]
        total = torch.stack(
            [_sample_loss(model, batch, i, config.loss, temperature) for i in samples]
        ).mean()
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        optimizer.step()
        results.append({"loss": total.item(), "grad_norm": norm.item()})
    return results


def _sample_loss(model, batch: BatchColumns, i: int, loss, temperature: float) -> torch.Tensor:
    """Mean over unmasked tokens of clipped surrogate (× truncated weight) - c_H H + c_KL k3."""
    here = slice(batch.response_offsets[i], batch.response_offsets[i + 1])
    columns = (
        batch.proximal_log_probs,
        batch.reference_log_probs,
        batch.advantages,
        batch.loss_mask,
    )
    old, reference, advantages, mask = (
        torch.from_numpy(column[here]) for column in columns if column is not None
    )
    new, entropy = log_probs(model, batch, i, temperature)
    ratio = torch.exp(new - old)
    surrogate = torch.maximum(
        -ratio * advantages, -ratio.clamp(1 - loss.eps_clip, 1 + loss.eps_clip_high) * advantages
    )
    if loss.use_tis:
        assert batch.rollout_log_probs is not None
        apart = old.numpy() - batch.rollout_log_probs[here]
        surrogate = surrogate * torch.tensor(
            [min(max(math.exp(d), loss.tis_clip_low), loss.tis_clip) for d in apart]
        )
    kl = torch.exp(reference - new) - 1 - (reference - new)
    total = surrogate - loss.entropy_coef * entropy + loss.kl_loss_coef * kl
    return (total * mask).sum() / mask.sum().clamp(min=1)
