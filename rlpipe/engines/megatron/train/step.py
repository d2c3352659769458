"""`train_steps`: the policy's optimizer steps over a packed batch.

Every token's loss is multiplied by a weight that is fixed for the whole optimizer step before
packing (`token_weights`). So sums over micro-batches and ranks need no further scaling. Quantities
of a whole sequence (GSPO's ratio, OPSM) are summed over the context parallel ranks that share it.
The mathematics of estimators and losses is in `rlpipe.algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rlpipe.algorithms import custom
from rlpipe.algorithms.importance import correct
from rlpipe.algorithms.objective import (
    CustomLoss,
    Objective,
    TokenBatch,
    objective,
    reward_objective,
)
from rlpipe.algorithms.sequences import Sequences, local_total
from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import PackingPlan, check_pairs, step_samples
from rlpipe.config.algorithms import LossConfig
from rlpipe.engines.megatron import platform
from rlpipe.errors import DataError, TrainerError
from rlpipe.store.columns import hook_names

# isort: split
from megatron.core import parallel_state

from rlpipe.engines.megatron.model.build import TrainedModel
from rlpipe.engines.megatron.model.prediction import PredictionLoss
from rlpipe.engines.megatron.train.batch import MicroBatch, pack
from rlpipe.engines.megatron.train.logits import LogitsLoss
from rlpipe.engines.megatron.train.optimizer_step import (
    summed_metrics,
    update,
    zero_gradients,
)
from rlpipe.engines.megatron.train.passes import (
    packing_slice,
    run_logits_passes,
    run_passes,
    run_value_passes,
    scheduled,
    set_training,
)
from rlpipe.engines.megatron.train.routing import ForwardContext, RoutingReplay
from rlpipe.engines.megatron.train.score import assembled_column, positions_of
from rlpipe.engines.megatron.train.token_weights import StepWeights, step_weights


@dataclass(frozen=True, eq=False)
class PolicySteps:
    """Result of the policy's optimizer steps. Equal on every rank."""

    metrics: list[dict[str, float]]
    """Of each step."""
    proximal_log_probs: np.ndarray | None
    """[R] float32: the single step's own log-probs, 0 where the loss mask is 0. None if the batch
    has proximal log-probs, or there are several steps."""


def train_steps(
    trained: TrainedModel,
    batch: BatchColumns,
    packing: PackingPlan,
    loss: LossConfig,
    temperature: float,
    hook_args: Any = None,
    before_step: Callable[[int], None] = lambda _: None,
) -> PolicySteps:
    """Take the plan's optimizer steps.

    Collective. A single step of a batch without proximal log-probs uses its own (`StepProximal`).
    `hook_args`: the `args` of user functions. `before_step`: called with the number of each step
    after its gradients are zeroed. Raises: DataError if the batch lacks a column that the loss
    reads, a user function returns a wrong result, or the plan is of another batch; TrainerError if
    a loss or gradient is not finite (the weights are then invalid).
    """
    packing.check(len(batch.sizes), parallel_state.get_data_parallel_world_size())
    _check_columns(batch, packing, loss)
    set_training(trained, True)
    path = loss.custom_loss_function_path
    function = custom.load("custom_loss_function_path", path) if path else None
    takes_logits = function is not None and custom.takes_logits(function)
    own = loss.type == "policy" and batch.proximal_log_probs is None and len(packing.steps) == 1
    proximal = StepProximal(batch, loss) if own else None
    with _routing_context(trained, batch) as forward_context:
        run = _PolicyRun(
            trained=trained,
            batch=batch,
            loss=loss,
            temperature=temperature,
            hook_args=hook_args,
            token_loss=None if takes_logits else function,
            logits_loss=function if takes_logits else None,
            forward_context=forward_context,
            counts=np.bincount(batch.sample_of, batch.loss_mask, minlength=len(batch)),
            proximal=proximal,
        )
        metrics = [
            run.take_step(k, step, before_step, where=f"train/optimizer step {k}")
            for k, step in enumerate(packing.steps)
        ]
    return PolicySteps(metrics, proximal.column() if proximal else None)


class StepProximal:
    """Proximal log-probs of a batch that was not scored: those of its single optimizer step.

    Before the step the weights are those of the scoring pass, so the step's own log-probs, without
    gradient, are the proximal ones.
    """

    def __init__(self, batch: BatchColumns, loss: LossConfig) -> None:
        self._batch = batch
        self._sample_of = batch.sample_of
        self._loss = loss
        self._parts: list[tuple[np.ndarray, torch.Tensor]] = []

    def apply(
        self, tokens: TokenBatch, micro: MicroBatch
    ) -> tuple[TokenBatch, dict[str, torch.Tensor]]:
        """Return the tokens with the off-policy correction of this loss, and its metrics.

        `importance.correct` runs on the CPU in float64, as for a scored batch. So both give the
        same digits.
        """
        own = tokens.log_probs.detach()
        index = micro.response_index
        self._parts.append((index, own))
        if not self._loss.corrects:
            return tokens, {}
        sample = self._sample_of[index]
        ends = np.flatnonzero(np.diff(sample, append=-1)) + 1
        assert self._batch.rollout_log_probs is not None
        correction = correct(
            own.float().cpu().numpy(),
            self._batch.rollout_log_probs[index],
            np.ones(len(index), np.float32),
            np.diff(ends, prepend=0),
            self._loss,
        )

        def column(values: np.ndarray) -> torch.Tensor:
            return platform.to_device(torch.from_numpy(values.astype(np.float32)), own.device)

        kept = column(correction.kept)
        policy = tokens.policy_weight
        corrected = replace(
            tokens,
            weight=tokens.weight * kept,
            policy_weight=None if policy is None else policy * kept,
            factor=column(correction.factor) if self._loss.use_tis else None,
        )
        # Metrics are averaged over all tokens of the loss mask, rejected tokens included.
        metrics = {
            name: column(values) @ tokens.weight for name, values in correction.metrics.items()
        }
        return corrected, metrics

    def column(self) -> np.ndarray:
        """Return [R] float32, 0 where the loss mask is 0, on every rank. Collective."""
        return assembled_column(self._parts, self._batch)


@contextmanager
def _routing_context(trained: TrainedModel, batch: BatchColumns) -> Iterator[ForwardContext | None]:
    """Replay the batch's experts in forward passes, if the model was built for routing replay.

    Raises: DataError if the batch has no recorded experts.
    """
    if not trained.bridge.config.moe_enable_routing_replay:
        yield None
        return
    if batch.routed_experts is None:
        raise DataError(
            "the batch has no recorded experts for routing replay",
            where="train/batch",
            found="no routed_experts",
            do="score the batch with train.use_routing_replay: true, or sample it with "
            "train.use_rollout_routing_replay: true",
        )
    routing = RoutingReplay(trained, batch.routed_experts)
    try:
        yield routing.forward_context
    finally:
        routing.close()


def _check_columns(batch: BatchColumns, packing: PackingPlan, loss: LossConfig) -> None:
    if loss.compares_pairs:
        check_pairs(batch, packing)
    policy = loss.type == "policy"
    needed = {
        "advantages": policy,
        "proximal_log_probs": policy and not _steps_give_proximal(packing, loss),
        "reference_log_probs": (policy and loss.kl_loss_coef > 0) or loss.reads_reference,
        "rollout_log_probs": policy and (bool(loss.corrects) or loss.use_rollout_logprobs),
    }
    missing = [name for name, used in needed.items() if used and getattr(batch, name) is None]
    if missing:
        raise DataError(
            "the batch lacks columns that the loss reads",
            where="train/batch",
            found=f"no {', '.join(missing)}; {len(packing.steps)} optimizer steps, "
            f"loss {loss.type}",
            do="score the batch first (more than one optimizer step needs proximal log-probs)",
        )


def _steps_give_proximal(packing: PackingPlan, loss: LossConfig) -> bool:
    """True if the steps compute, or do not read, the proximal log-probs."""
    if len(packing.steps) > 1:
        return loss.use_rollout_logprobs
    split = loss.corrects_sequences and parallel_state.get_context_parallel_world_size() > 1
    return not (loss.corrects_whole_steps or split)


@dataclass(frozen=True, eq=False)
class _PolicyRun:
    """The optimizer steps of one batch on this rank."""

    trained: TrainedModel
    batch: BatchColumns
    loss: LossConfig
    temperature: float
    hook_args: Any
    token_loss: custom.Function | None
    """Custom loss of log-probs."""
    logits_loss: custom.Function | None
    """Custom loss of whole logits."""
    forward_context: ForwardContext | None
    counts: np.ndarray
    """[N]: tokens of each held sample that count in the loss."""
    proximal: StepProximal | None = None
    """None if the batch has proximal log-probs, or no step needs them."""

    def take_step(
        self, number: int, step: tuple, before_step: Callable[[int], None], where: str
    ) -> dict[str, float]:
        """Take one optimizer step and return its metrics. Collective."""
        trained = self.trained
        batch = self.batch
        # The samples of all data parallel ranks: the weights depend on the whole step.
        samples = step_samples(step)
        weights = step_weights(batch, samples, self.loss, self.hook_args)
        own = step[parallel_state.get_data_parallel_rank()]
        micro_batches = scheduled(trained, positions_of(batch, own))
        collector = _MetricsCollector(where)
        zero_gradients(trained)
        before_step(number)
        run = self._run_tokens if self.logits_loss is None else self._run_logits
        if self.loss.type == "reward_model":
            run = self._run_rewards
        outputs = run(micro_batches, samples, weights, collector)
        names = _names_on_all_ranks(collector.names)
        if trained.bridge.config.mtp_num_layers and self.logits_loss is None:
            names = (*names, "mtp_loss")
        metrics = summed_metrics(outputs, names) | weights.metrics
        if not math.isfinite(metrics["loss"]):
            raise TrainerError(
                "the loss is not finite",
                where=where,
                found=metrics["loss"],
                do="look at this batch's log-probs",
            )
        metrics |= update(trained, where)
        loss_tokens = batch.sizes.loss_tokens
        assert loss_tokens is not None
        tokens = float(loss_tokens[samples].sum())
        return metrics | {"tokens": tokens, "samples": float(len(samples))}

    def _run_tokens(
        self,
        micro_batches: Sequence[Sequence[int]],
        samples: np.ndarray,
        weights: StepWeights,
        collector: _MetricsCollector,
    ) -> list[torch.Tensor]:
        """Run the passes of a loss of log-probs and entropy."""
        part = packing_slice(self.trained)
        token_loss: CustomLoss | None = None
        if (function := self.token_loss) is not None:
            token_loss = partial(custom.custom_loss, function, self.hook_args)

        def consume(
            micro: MicroBatch, log_probs: torch.Tensor, entropy: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = self._token_batch(weights, micro, log_probs, entropy)
            corrections: dict[str, torch.Tensor] = {}
            if self.proximal is not None:
                tokens, corrections = self.proximal.apply(tokens, micro)
            result = objective(tokens, self.loss, token_loss)
            return collector.collect(Objective(result.loss, {**result.metrics, **corrections}))

        return run_passes(
            self.trained,
            (pack(self.batch, indices, part, only_masked_in=True) for indices in micro_batches),
            consume,
            num_micro_batches=len(micro_batches),
            temperature=self.temperature,
            forward_only=False,
            # A custom loss may differentiate the entropy.
            entropy_gradient=self.loss.entropy_coef != 0 or token_loss is not None,
            forward_context=self.forward_context,
            prediction=self._prediction(samples),
        )

    def _prediction(self, samples: np.ndarray) -> PredictionLoss | None:
        config = self.trained.bridge.config
        if not config.mtp_num_layers:
            return None
        return PredictionLoss.of_step(config, self.batch, samples)

    def _run_logits(
        self,
        micro_batches: Sequence[Sequence[int]],
        samples: np.ndarray,
        weights: StepWeights,
        collector: _MetricsCollector,
    ) -> list[torch.Tensor]:
        """Run the passes of a custom loss of whole logits."""
        assert self.logits_loss is not None
        part = packing_slice(self.trained)
        loss = LogitsLoss.of_step(
            self.logits_loss,
            self.hook_args,
            self.batch,
            samples,
            weights.weight,
            per_token=self.loss.calculate_per_token_loss,
        )
        return run_logits_passes(
            self.trained,
            (
                pack(self.batch, indices, part, only_masked_in=False, separate_padding=True)
                for indices in micro_batches
            ),
            lambda micro, logits: collector.collect(loss(micro, logits)),
            num_micro_batches=len(micro_batches),
            forward_context=self.forward_context,
        )

    def _run_rewards(
        self,
        micro_batches: Sequence[Sequence[int]],
        samples: np.ndarray,
        weights: StepWeights,
        collector: _MetricsCollector,
    ) -> list[torch.Tensor]:
        """Run the passes of a reward model. Both samples of a pair have half of its weight."""
        part = packing_slice(self.trained)

        def consume(micro: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weight = torch.full_like(values, 1 / len(samples))
            sequences = self._sequences(micro)
            return collector.collect(reward_objective(values, weight, sequences, self.loss))

        return run_value_passes(
            self.trained,
            (
                pack(self.batch, indices, part, only_masked_in=False, ends=True)
                for indices in micro_batches
            ),
            consume,
            num_micro_batches=len(micro_batches),
            forward_only=False,
        )

    def _sequences(self, micro: MicroBatch) -> Sequences:
        splits_sequences = parallel_state.get_context_parallel_world_size() > 1
        return Sequences(
            sample=micro.column(self.batch.sample_of),
            counts=platform.to_device(torch.from_numpy(self.counts), micro.tokens.device),
            total=_total_over_context if splits_sequences else local_total,
        )

    def _token_batch(
        self,
        weights: StepWeights,
        micro: MicroBatch,
        log_probs: torch.Tensor,
        entropy: torch.Tensor,
    ) -> TokenBatch:
        """Return the micro-batch's tokens, with all columns for a custom loss."""
        batch = self.batch

        def column(values: np.ndarray | None) -> torch.Tensor | None:
            return None if values is None else micro.column(values)

        named_columns = {
            name: values
            for key, name in hook_names().items()
            if self.token_loss is not None and (values := getattr(batch, key)) is not None
        }
        return TokenBatch(
            log_probs=log_probs,
            entropy=entropy,
            weight=micro.column(weights.weight),
            sequences=self._sequences(micro),
            policy_weight=column(weights.policy_weight),
            advantages=column(batch.advantages),
            proximal_log_probs=column(batch.proximal_log_probs),
            rollout_log_probs=column(batch.rollout_log_probs),
            reference_log_probs=column(batch.reference_log_probs),
            factor=column(weights.factor),
            columns={name: micro.column(values) for name, values in named_columns.items()},
        )


class _MetricsCollector:
    """Names of a step's metrics, which must be the same in all micro-batches."""

    def __init__(self, where: str) -> None:
        self.names: list[str] = []
        self._where = where

    def collect(self, result: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the metrics as one tensor, in the order of `names`."""
        if self.names and self.names != list(result.metrics):
            raise DataError(
                "a custom loss must return the same metrics for every micro-batch",
                where=self._where,
                found=[*result.metrics],
                expected=self.names,
            )
        self.names = list(result.metrics)
        return result.loss, torch.stack(list(result.metrics.values()))


class _TotalOverContext(torch.autograd.Function):
    """Sum over context parallel ranks.

    The loss is also summed over these ranks, so the backward pass sums every rank's gradient.
    """

    @staticmethod
    def forward(ctx, values):
        return _summed_over_context(values)

    @staticmethod
    def backward(ctx, *gradients):
        return _summed_over_context(gradients[0])


def _summed_over_context(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    group: Any = parallel_state.get_context_parallel_group()
    torch.distributed.all_reduce(values, group=group)
    return values


def _total_over_context(values: torch.Tensor) -> torch.Tensor:
    result: Any = _TotalOverContext.apply(values)
    return result


def _names_on_all_ranks(names: list[str]) -> tuple[str, ...]:
    """Return the names of the metrics on every rank. Collective.

    Only the last pipeline stage computes a loss and so knows them.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return tuple(names)
    names_by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(names_by_rank, names)
    return tuple(next(found for found in names_by_rank if found))
