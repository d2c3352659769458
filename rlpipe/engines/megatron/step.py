"""Optimizer steps: losses of packed micro-batches, gradients, Adam, schedule, metrics.

Every token's loss is multiplied by a weight that was fixed for the whole optimizer step before anything was packed
(`algorithms.reduction`), so sums over micro-batches and ranks need no further scaling.

Not here: estimators and the losses' mathematics (`rlpipe.algorithms`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from rlpipe.algorithms.divergence import kl_estimate
from rlpipe.algorithms.importance import truncated_importance
from rlpipe.algorithms.losses import policy_loss, sft_loss
from rlpipe.algorithms.reduction import token_weights
from rlpipe.config.algorithms import LossConfig
from rlpipe.engines.megatron import platform
from rlpipe.errors import DataError, TrainerError
from rlpipe.packing import BatchColumns, PackingPlan, gather_index

# isort: split
from megatron.core import parallel_state

from rlpipe.engines.megatron.batch import MicroBatch, pack
from rlpipe.engines.megatron.groups import speaks_for_its_samples
from rlpipe.engines.megatron.model import Trained
from rlpipe.engines.megatron.passes import run_passes, this_slice

POLICY_METRICS = ("loss", "pg_loss", "entropy", "clipfrac", "ppo_kl", "kl_loss", "train_rollout_logprob_abs_diff")
TIS_METRICS = ("tis", "tis_clipfrac")
SFT_METRICS = ("loss", "entropy")


def train_steps(
    trained: Trained, batch: BatchColumns, packing: PackingPlan, loss: LossConfig, temperature: float
) -> list[dict[str, float]]:
    """Take all the plan's optimizer steps; the metrics of each, the same on every rank. Collective.

    Raises: DataError if the batch lacks a column that the loss reads or the plan is not the batch's; TrainerError if a loss
    or gradient is not finite (the weights must then be taken for spoilt).
    """
    packing.check(len(batch), parallel_state.get_data_parallel_world_size())
    _check_columns(batch, packing, loss)
    trained.ddp.train()
    return [
        _step(trained, batch, step, loss, temperature, where=f"train/optimizer step {k}") for k, step in enumerate(packing.steps)
    ]


def _check_columns(batch: BatchColumns, packing: PackingPlan, loss: LossConfig) -> None:
    needed = {
        "advantages": loss.type == "policy",
        "proximal_log_probs": loss.type == "policy" and len(packing.steps) > 1,
        "reference_log_probs": loss.type == "policy" and loss.kl_loss_coef > 0,
        "rollout_log_probs": loss.use_tis,
    }
    missing = [name for name, wanted in needed.items() if wanted and getattr(batch, name) is None]
    if missing:
        raise DataError(
            "the batch lacks what the loss reads",
            where="train/batch",
            found=f"no {', '.join(missing)}; {len(packing.steps)} optimizer steps, loss {loss.type}",
            do="score the batch first (proximal log-probs are needed if there is more than one optimizer step)",
        )


def _step(trained: Trained, batch: BatchColumns, step, loss: LossConfig, temperature: float, where: str) -> dict[str, float]:
    samples = np.array([i for rank in step for micro in rank for i in micro], np.int64)
    samples.sort()
    weights = _weights(batch, samples, loss)
    mine, part = step[parallel_state.get_data_parallel_rank()], this_slice(trained)
    trained.ddp.zero_grad_buffer()
    trained.optimizer.zero_grad()
    kept = run_passes(
        trained,
        (pack(batch, indices, part, only_masked_in=True) for indices in mine),
        lambda micro, log_probs, entropy: _loss(batch, weights, loss, micro, log_probs, entropy),
        num_micro_batches=len(mine),
        temperature=temperature,
        forward_only=False,
        entropy_gradient=loss.entropy_coef != 0,
    )
    metrics = _reduced(kept, _names(loss))
    if not math.isfinite(metrics["loss"]):
        raise TrainerError("the loss is not finite", where=where, found=metrics["loss"], do="look at this batch's log-probs")
    metrics |= _update(trained, where)
    masked_in = batch.loss_mask[gather_index(batch.response_offsets, samples)] > 0
    return metrics | {"tokens": float(masked_in.sum()), "samples": float(len(samples))}


def _names(loss: LossConfig) -> tuple[str, ...]:
    """Of the metrics, in the order of `_loss`."""
    if loss.type == "sft":
        return SFT_METRICS
    return (*POLICY_METRICS, *(TIS_METRICS if loss.use_tis else ()))


def _weights(batch: BatchColumns, samples: np.ndarray, loss: LossConfig) -> np.ndarray:
    """[R]: the weights of this step's tokens, 0 elsewhere."""
    index = gather_index(batch.response_offsets, samples)
    weights = np.zeros(batch.num_response_tokens, np.float32)
    weights[index] = token_weights(
        batch.loss_mask[index], batch.response_lengths[samples], per_token=loss.calculate_per_token_loss
    )
    return weights


def _loss(batch: BatchColumns, weights: np.ndarray, loss: LossConfig, micro: MicroBatch, log_probs, entropy):
    """The micro-batch's part of the loss, and its part of every metric: [number of metrics] float32."""
    weight = micro.column(weights)
    if loss.type == "sft":
        total = (weight * (sft_loss(log_probs) - loss.entropy_coef * entropy)).sum()
        return total, torch.stack([total.detach(), (weight * entropy.detach()).sum()])
    assert batch.advantages is not None
    old = log_probs.detach() if batch.proximal_log_probs is None else micro.column(batch.proximal_log_probs)
    clip = policy_loss(
        log_probs,
        old,
        micro.column(batch.advantages),
        eps_clip=loss.eps_clip,
        eps_clip_high=loss.eps_clip_high,
        eps_clip_c=loss.eps_clip_c,
    )
    reference = batch.reference_log_probs
    kl = torch.zeros_like(log_probs) if reference is None else kl_estimate(log_probs, micro.column(reference), loss.kl_loss_type)
    difference = torch.zeros_like(old)
    if batch.rollout_log_probs is not None:
        difference = (old - micro.column(batch.rollout_log_probs)).abs()
    surrogate, correction = clip.loss, ()
    if loss.use_tis:
        assert batch.rollout_log_probs is not None
        behaviour = micro.column(batch.rollout_log_probs)
        tis = truncated_importance(old, behaviour, tis_clip=loss.tis_clip, tis_clip_low=loss.tis_clip_low)
        surrogate, correction = clip.loss * tis.weight, (tis.ratio, tis.clipped)
    total = surrogate - loss.entropy_coef * entropy + loss.kl_loss_coef * kl
    columns = torch.stack([total, surrogate, entropy, clip.clipped, clip.ppo_kl, kl, difference, *correction]).detach()
    return (weight * total).sum(), columns @ weight


def _reduced(kept: list[torch.Tensor], names: tuple[str, ...]) -> dict[str, float]:
    """Summed over micro-batches and ranks."""
    total = torch.zeros(len(names), dtype=torch.float32, device=platform.device())
    if speaks_for_its_samples():
        total += torch.stack(kept).sum(0)
    torch.distributed.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))


def _update(trained: Trained, where: str) -> dict[str, float]:
    learning_rate = max(group["lr"] for group in trained.optimizer.param_groups)
    outcome: Any = trained.optimizer.step()
    updated, norm, _ = outcome
    norm = float(trained.optimizer.get_grad_norm() if norm is None else norm)
    if not updated or not math.isfinite(norm):
        raise TrainerError("the gradient is not finite", where=where, found=norm, do="restore the last checkpoint")
    trained.scheduler.step(increment=1)
    return {"grad_norm": norm, "lr": float(learning_rate)}
