"""Optimizer steps: losses of packed micro-batches, gradients, Adam, schedule, metrics.

Every token's loss is multiplied by a weight that was fixed for the whole optimizer step before
anything was packed (`algorithms.reduction`, `algorithms.importance`), so sums over micro-batches
and ranks need no further scaling. What is of a whole sequence (GSPO's ratio, OPSM) is summed over
the context parallel ranks that share it.

Not here: estimators and the losses' mathematics (`rlpipe.algorithms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from rlpipe.algorithms import custom
from rlpipe.algorithms.objective import CustomLoss, Objective, TokenBatch, objective
from rlpipe.algorithms.sequences import Sequences, local_total
from rlpipe.batch.packing import BatchColumns, PackingPlan, gather_index
from rlpipe.config.algorithms import LossConfig
from rlpipe.engines.megatron import platform
from rlpipe.errors import DataError, TrainerError
from rlpipe.store.columns import hook_names

# isort: split
from megatron.core import parallel_state

from rlpipe.engines.megatron.model.build import TrainedModel
from rlpipe.engines.megatron.train.batch import MicroBatch, pack
from rlpipe.engines.megatron.train.logits import LogitsLoss
from rlpipe.engines.megatron.train.optimizer_step import summed, update
from rlpipe.engines.megatron.train.passes import packing_slice, run_logits_passes, run_passes
from rlpipe.engines.megatron.train.routing import Around, Replaying
from rlpipe.engines.megatron.train.token_weights import StepWeights, prepare


def train_steps(
    trained: TrainedModel,
    batch: BatchColumns,
    packing: PackingPlan,
    loss: LossConfig,
    temperature: float,
    hook_args: Any = None,
    before_step: Callable[[int], None] = lambda _: None,
) -> list[dict[str, float]]:
    """Take all the plan's optimizer steps; the metrics of each, the same on every rank. Collective.

    `hook_args`: what functions of the user get as `args`. `before_step` is called with the number
    of each step once its gradients are zeroed. Raises: DataError if the batch lacks a column that
    the loss reads, a function of the user answers what it must not, or the plan is not the batch's;
    TrainerError if a loss or gradient is not finite (the weights must then be taken for spoilt).
    """
    packing.check(len(batch), parallel_state.get_data_parallel_world_size())
    _check_columns(batch, packing, loss)
    trained.ddp.train()
    path = loss.custom_loss_function_path
    function = custom.load("custom_loss_function_path", path) if path else None
    of_logits = function if function and custom.takes_logits(function) else None
    of_user = (
        (lambda tokens: custom.custom_loss(function, hook_args, tokens))
        if function and not of_logits
        else None
    )
    with _routed(trained, batch) as around:
        return [
            _step(
                trained,
                batch,
                step,
                loss,
                temperature,
                of_user,
                of_logits,
                hook_args,
                partial(before_step, k),
                around,
                where=f"train/optimizer step {k}",
            )
            for k, step in enumerate(packing.steps)
        ]


@contextmanager
def _routed(trained: TrainedModel, batch: BatchColumns) -> Iterator[Around | None]:
    """What forward passes run within: as the batch's experts say, if the model was built for that.

    Raises: DataError if the batch does not say them.
    """
    if not trained.bridge.config.moe_enable_routing_replay:
        yield None
        return
    if batch.routed_experts is None:
        raise DataError(
            "the batch does not say which experts its tokens went to",
            where="train/batch",
            found="no routed_experts",
            do="score the batch with train.use_routing_replay: true, or sample it with train.use_rollout_routing_replay: true",
        )
    replaying = Replaying(trained, batch.routed_experts)
    try:
        yield replaying.around
    finally:
        replaying.close()


def _check_columns(batch: BatchColumns, packing: PackingPlan, loss: LossConfig) -> None:
    policy = loss.type == "policy"
    needed = {
        "advantages": policy,
        "proximal_log_probs": policy
        and (bool(loss.corrects) or (len(packing.steps) > 1 and not loss.use_rollout_logprobs)),
        "reference_log_probs": policy and loss.kl_loss_coef > 0,
        "rollout_log_probs": policy and (bool(loss.corrects) or loss.use_rollout_logprobs),
    }
    missing = [name for name, wanted in needed.items() if wanted and getattr(batch, name) is None]
    if missing:
        raise DataError(
            "the batch lacks what the loss reads",
            where="train/batch",
            found=f"no {', '.join(missing)}; {len(packing.steps)} optimizer steps, loss {loss.type}",
            do="score the batch first (proximal log-probs are needed if there is more than one optimizer step)",
        )


def _step(
    trained: TrainedModel,
    batch: BatchColumns,
    step: tuple,
    loss: LossConfig,
    temperature: float,
    of_user: CustomLoss | None,
    of_logits: custom.Function | None,
    hook_args: Any,
    before: Callable[[], None],
    around: Around | None,
    where: str,
) -> dict[str, float]:
    samples = np.array(sorted(i for rank in step for micro in rank for i in micro), np.int64)
    fixed = prepare(batch, samples, loss, hook_args)
    sample_of = batch.sample_of
    counts = np.bincount(batch.sample_of, batch.loss_mask, minlength=len(batch))
    mine = step[parallel_state.get_data_parallel_rank()]
    part = packing_slice(trained)
    names: list[str] = []

    def kept_of(found: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        if names and names != list(found.metrics):
            raise DataError(
                "a custom loss must name the same metrics every time",
                where=where,
                found=[*found.metrics],
                expected=names,
            )
        names[:] = found.metrics
        return found.loss, torch.stack(list(found.metrics.values()))

    def consume(
        micro: MicroBatch, log_probs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = _tokens(
            batch, fixed, micro, log_probs, entropy, sample_of, counts, by_name=of_user is not None
        )
        return kept_of(objective(tokens, loss, of_user))

    trained.ddp.zero_grad_buffer()
    trained.optimizer.zero_grad()
    before()
    run: dict[str, Any] = {"num_micro_batches": len(mine), "around": around}
    if of_logits is not None:
        per_token = loss.calculate_per_token_loss
        whole = LogitsLoss.of_step(
            of_logits, hook_args, batch, samples, fixed.weight, per_token=per_token
        )
        micros = (
            pack(batch, indices, part, only_masked_in=False, pad_apart=True) for indices in mine
        )
        kept = run_logits_passes(
            trained, micros, lambda micro, logits: kept_of(whole(micro, logits)), **run
        )
    else:
        wanted = loss.entropy_coef != 0 or of_user is not None
        micros = (pack(batch, indices, part, only_masked_in=True) for indices in mine)
        run |= {"temperature": temperature, "forward_only": False, "entropy_gradient": wanted}
        kept = run_passes(trained, micros, consume, **run)
    metrics = summed(kept, _agreed(names)) | fixed.metrics
    if not math.isfinite(metrics["loss"]):
        raise TrainerError(
            "the loss is not finite",
            where=where,
            found=metrics["loss"],
            do="look at this batch's log-probs",
        )
    metrics |= update(trained, where)
    masked_in = batch.loss_mask[gather_index(batch.response_offsets, samples)] > 0
    return metrics | {"tokens": float(masked_in.sum()), "samples": float(len(samples))}


def _tokens(
    batch: BatchColumns,
    fixed: StepWeights,
    micro: MicroBatch,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    sample_of: np.ndarray,
    counts: np.ndarray,
    *,
    by_name: bool,
) -> TokenBatch:
    """The micro-batch's tokens; `by_name`: all columns too, for a custom loss."""

    def column(values: np.ndarray | None) -> torch.Tensor | None:
        return None if values is None else micro.column(values)

    shared = parallel_state.get_context_parallel_world_size() > 1
    known = {
        name: values
        for key, name in hook_names().items()
        if by_name and (values := getattr(batch, key)) is not None
    }
    return TokenBatch(
        log_probs=log_probs,
        entropy=entropy,
        weight=micro.column(fixed.weight),
        sequences=Sequences(
            sample=micro.column(sample_of),
            counts=platform.to_device(torch.from_numpy(counts), log_probs.device),
            total=_total_over_context if shared else local_total,
        ),
        policy_weight=column(fixed.policy_weight),
        advantages=column(batch.advantages),
        proximal_log_probs=column(batch.proximal_log_probs),
        rollout_log_probs=column(batch.rollout_log_probs),
        reference_log_probs=column(batch.reference_log_probs),
        factor=column(fixed.factor),
        columns={name: micro.column(values) for name, values in known.items()},
    )


class _TotalOverContext(torch.autograd.Function):
    """The sum over context parallel ranks. The loss is a sum over them too, so every rank's part of
    the gradient counts."""

    @staticmethod
    def forward(ctx, values):
        return _summed(values)

    @staticmethod
    def backward(ctx, *gradients):
        return _summed(gradients[0])


def _summed(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    group: Any = parallel_state.get_context_parallel_group()
    torch.distributed.all_reduce(values, group=group)
    return values


def _total_over_context(values: torch.Tensor) -> torch.Tensor:
    result: Any = _TotalOverContext.apply(values)
    return result


def _agreed(names: list[str]) -> tuple[str, ...]:
    """The names of the metrics: pipeline stages before the last have not seen them. Collective."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return tuple(names)
    last: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(last, names)
    return tuple(next(found for found in last if found))
