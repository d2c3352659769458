"""`Critic`: PPO's value model on this rank, with its own optimizer and schedule.

    construct → `load_initial_weights` → `values` → `train` over the policy's packing plan

The critic is the policy's decoder with a value head. The value of response token j of a sample with
p prompt tokens is read at position p + j - 1, where the policy reads the token's log-prob. It is
the value of the state before the token. Values are not divided by the sampling temperature. The
critic lives in the policy's ranks (`engine`) or in its own (`critic_engine`). Advantages and
returns are in `rlpipe.algorithms.values`.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.algorithms.values import value_loss
from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import PackingPlan, step_samples
from rlpipe.config.model import ModelConfig
from rlpipe.config.train import CriticConfig, TrainConfig
from rlpipe.errors import ConfigError, DataError, TrainerError

# isort: split
from megatron.core import parallel_state

from rlpipe.engines.megatron.bridges.bridge import load_weights
from rlpipe.engines.megatron.checkpoint.checkpoint import load_decoder
from rlpipe.engines.megatron.checkpoint.state import initialize_adam_state, named_weights
from rlpipe.engines.megatron.model.build import TrainedModel, build
from rlpipe.engines.megatron.model.value_model import ValueHead, ValueModel
from rlpipe.engines.megatron.train.batch import MicroBatch, pack
from rlpipe.engines.megatron.train.optimizer_step import (
    summed_metrics,
    update,
    zero_gradients,
)
from rlpipe.engines.megatron.train.passes import (
    packing_slice,
    run_value_passes,
    scheduled,
    set_training,
)
from rlpipe.engines.megatron.train.score import (
    assembled_column,
    local_micro_batches,
    positions_of,
)
from rlpipe.engines.megatron.train.token_weights import mask_weights

METRICS = ("value_loss", "value_clipfrac")
HEAD = "score"
"""Name of the head in Hugging Face directories of sequence and token classification."""


class Critic:
    """One rank of the critic. Every method is collective."""

    def __init__(
        self,
        config: CriticConfig,
        policy_dir: str,
        model: ModelConfig,
        train: TrainConfig,
        optimizer_steps: int,
        *,
        deterministic: bool,
    ) -> None:
        """Build the critic with undefined weights. Process groups must be open.

        `optimizer_steps`: length of the schedule.
        """
        self._config = config
        self._loss_config = train.loss
        self._policy_dir = policy_dir
        own = train.model_copy(update={"optimizer": config.resolved_optimizer(train.optimizer)})
        source = config.hf_checkpoint or policy_dir
        self.trained: TrainedModel = build(
            source, model, own, optimizer_steps, deterministic=deterministic, kind=ValueModel
        )
        initialize_adam_state(self.trained.optimizer)

    @torch.no_grad()
    def load_initial_weights(self, policy: TrainedModel | Path | None) -> None:
        """Load the configured directory, or else the policy's weights with a value head of 0.

        `policy`: the policy in these ranks, a directory of its checkpoints, or None for its Hugging
        Face directory.
        """
        own = self._config.hf_checkpoint
        if own or policy is None:
            load_weights(self.trained.bridge, self.trained.chunks, own or self._policy_dir)
        elif isinstance(policy, Path):
            load_decoder(self.trained, policy)
        else:
            self._copy_decoder(policy)
        load_head(self.trained, own, "critic.hf_checkpoint")
        self.trained.optimizer.reload_model_params()

    def values(self, batch: BatchColumns, *, max_tokens: int) -> np.ndarray:
        """Return the value before every response token: [R] float32, equal on every rank.

        `max_tokens`: packed tokens of a micro-batch, over all context parallel ranks.
        """
        micro_batches = local_micro_batches(self.trained, batch, max_tokens)
        part = packing_slice(self.trained)
        set_training(self.trained, False)
        outputs = run_value_passes(
            self.trained,
            (pack(batch, samples, part, only_masked_in=False) for samples in micro_batches),
            lambda micro, values: (values.sum(), (micro.response_index, values)),
            num_micro_batches=len(micro_batches),
            forward_only=True,
        )
        return assembled_column(outputs, batch)

    def train(self, batch: BatchColumns, packing: PackingPlan) -> list[dict[str, float]]:
        """Take the plan's optimizer steps and return the metrics of each.

        The metrics: value_loss, value_clipfrac, critic_grad_norm, critic_lr. Raises: DataError if
        the batch has no values or returns; TrainerError if a loss or gradient is not finite.
        """
        if batch.values is None or batch.returns is None:
            raise DataError(
                "the batch lacks a column of the value loss",
                where="train/batch",
                found=f"no {'values' if batch.values is None else 'returns'}",
                do="estimate advantages with a critic: advantage.advantage_estimator: ppo",
            )
        set_training(self.trained, True)
        return [
            self._step(batch, step, where=f"train/critic step {k}")
            for k, step in enumerate(packing.steps)
        ]

    def _step(self, batch: BatchColumns, step, where: str) -> dict[str, float]:
        trained = self.trained
        part = packing_slice(trained)
        own = step[parallel_state.get_data_parallel_rank()]
        micro_batches = scheduled(trained, positions_of(batch, own))
        # Aggregated like the policy's loss, without its off-policy corrections.
        weights = mask_weights(batch, step_samples(step), self._loss_config)
        zero_gradients(trained)
        outputs = run_value_passes(
            trained,
            (pack(batch, indices, part, only_masked_in=True) for indices in micro_batches),
            lambda micro, values: self._loss(batch, weights, micro, values),
            num_micro_batches=len(micro_batches),
            forward_only=False,
        )
        metrics = summed_metrics(outputs, METRICS)
        if not math.isfinite(metrics["value_loss"]):
            raise TrainerError(
                "the value loss is not finite",
                where=where,
                found=metrics["value_loss"],
                do="look at the returns",
            )
        return metrics | {f"critic_{name}": value for name, value in update(trained, where).items()}

    def _loss(
        self, batch: BatchColumns, weights: np.ndarray, micro: MicroBatch, values: torch.Tensor
    ):
        """Return the micro-batch's part of the loss and of METRICS."""
        assert batch.values is not None and batch.returns is not None
        weight = micro.column(weights)
        loss = value_loss(
            values,
            micro.column(batch.values),
            micro.column(batch.returns),
            value_clip=self._config.value_clip,
        )
        total = self._config.value_loss_coef * (weight * loss.loss).sum()
        return total, torch.stack([total.detach(), (weight * loss.clipped).sum()])

    def _copy_decoder(self, policy: TrainedModel) -> None:
        policy_weights = dict(named_weights(policy.models))
        for name, tensor in named_weights(self.trained.models):
            if "output_layer." not in name:
                tensor.copy_(policy_weights[name])


@torch.no_grad()
def load_head(trained: TrainedModel, directory: str | None, where: str) -> None:
    """Load the value head of a reward model on the last pipeline stage, if the model has one.

    The head is 0 if the directory has none. `where`: key of the directory, for errors.
    """
    head = getattr(trained.last_model, "output_layer", None)
    if not isinstance(head, ValueHead):
        return
    stored = _tensors(directory, f"{HEAD}.") if directory else {}
    for name, parameter in head.named_parameters():
        value = stored.get(name)
        if value is not None and value.shape != parameter.shape:
            raise ConfigError(
                "this model's head does not have exactly one output",
                where=where,
                found=f"{HEAD}.{name} {list(value.shape)} in {directory}",
                expected=list(parameter.shape),
            )
        parameter.copy_(torch.zeros_like(parameter) if value is None else value)


def _tensors(directory: str, prefix: str) -> dict[str, torch.Tensor]:
    """Return a directory's tensors with this prefix, by name without the prefix."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in list(file.keys()) if name.startswith(prefix)]
            tensors |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    return tensors
