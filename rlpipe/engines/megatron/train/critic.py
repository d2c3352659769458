"""PPO's critic on this rank: the same decoder with a value head, an optimizer and a schedule of its
own.

    made → first weights (`begin`) → values of a batch → optimizer steps over the same packing plan
    as the policy's

The value of response token j of a sample with p prompt tokens is read at position p + j - 1, where
the policy reads the token's log-prob: it is that of the state before the token. Values are not
divided by the sampling temperature.

Not here: advantages and returns (`algorithms.values`), saving (`checkpoint`), whose ranks it lives
in (`engine`: the policy's; `critic_engine`: its own).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.algorithms.reduction import token_weights
from rlpipe.algorithms.values import value_loss
from rlpipe.batch.packing import BatchColumns, PackingPlan, gather_index
from rlpipe.config.model import ModelConfig
from rlpipe.config.models import CriticConfig
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError, DataError, TrainerError

# isort: split
from megatron.core import parallel_state

from rlpipe.engines.megatron.bridges.bridge import load_weights
from rlpipe.engines.megatron.checkpoint.checkpoint import load_decoder
from rlpipe.engines.megatron.checkpoint.state import fill_adam, weights
from rlpipe.engines.megatron.model.build import Trained, build
from rlpipe.engines.megatron.model.layers import ValueHead, ValueModel
from rlpipe.engines.megatron.train.batch import MicroBatch, pack
from rlpipe.engines.megatron.train.passes import run_value_passes, this_slice
from rlpipe.engines.megatron.train.score import spread_micro_batches, whole_column
from rlpipe.engines.megatron.train.update import summed, update

METRICS = ("value_loss", "value_clipfrac")
HEAD = "score"
"""Name of a value head in Hugging Face directories of sequence and token classification."""


class Critic:
    """One rank's part. Every method is collective."""

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
        """Build it without weights; process groups must exist. `optimizer_steps`: how long its
        schedule is."""
        self._config = config
        self._loss_config = train.loss
        self._policy_dir = policy_dir
        own = train.model_copy(update={"optimizer": config.optimizer_beside(train.optimizer)})
        source = config.hf_checkpoint or policy_dir
        self.trained: Trained = build(
            source, model, own, optimizer_steps, deterministic=deterministic, kind=ValueModel
        )
        fill_adam(self.trained.optimizer)

    @torch.no_grad()
    def begin(self, policy: Trained | Path | None) -> None:
        """Take the first weights: of the configured directory, or else the policy's, with a value
        head of 0.

        `policy`: the one in these ranks, as it is; or where a checkpoint of it is; None: in its
        Hugging Face directory.
        """
        own = self._config.hf_checkpoint
        if own or policy is None:
            load_weights(self.trained.bridge, [self.trained.ddp], own or self._policy_dir)
        elif isinstance(policy, Path):
            load_decoder(self.trained, policy)
        else:
            self._copy(policy)
        self._load_head(own)
        self.trained.optimizer.reload_model_params()

    def values(self, batch: BatchColumns, *, max_tokens: int) -> np.ndarray:
        """[R] float32: the value before every response token, the same on every rank.

        `max_tokens`: packed tokens of a micro-batch, over all context parallel ranks.
        """
        mine = spread_micro_batches(batch, max_tokens)
        part = this_slice(self.trained)
        self.trained.ddp.eval()
        kept = run_value_passes(
            self.trained,
            (pack(batch, samples, part, only_masked_in=False) for samples in mine),
            lambda micro, values: (values.sum(), (micro.response_index, values)),
            num_micro_batches=len(mine),
            forward_only=True,
        )
        return whole_column(kept, batch.num_response_tokens)

    def train(self, batch: BatchColumns, packing: PackingPlan) -> list[dict[str, float]]:
        """Take the plan's optimizer steps; of each, value_loss, value_clipfrac, critic_grad_norm
        and critic_lr.

        Raises: DataError if the batch has no values and returns; TrainerError if a loss or gradient
        is not finite.
        """
        if batch.values is None or batch.returns is None:
            raise DataError(
                "the batch lacks what the critic learns",
                where="train/batch",
                found=f"no {'values' if batch.values is None else 'returns'}",
                do="estimate advantages with a critic: advantage.advantage_estimator: ppo",
            )
        self.trained.ddp.train()
        return [
            self._step(batch, step, where=f"train/critic step {k}")
            for k, step in enumerate(packing.steps)
        ]

    def _step(self, batch: BatchColumns, step, where: str) -> dict[str, float]:
        trained = self.trained
        part = this_slice(self.trained)
        mine = step[parallel_state.get_data_parallel_rank()]
        weights = self._weights(batch, step)
        trained.ddp.zero_grad_buffer()
        trained.optimizer.zero_grad()
        kept = run_value_passes(
            trained,
            (pack(batch, indices, part, only_masked_in=True) for indices in mine),
            lambda micro, values: self._loss(batch, weights, micro, values),
            num_micro_batches=len(mine),
            forward_only=False,
        )
        metrics = summed(kept, METRICS)
        if not math.isfinite(metrics["value_loss"]):
            raise TrainerError(
                "the value loss is not finite",
                where=where,
                found=metrics["value_loss"],
                do="look at the returns",
            )
        return metrics | {f"critic_{name}": value for name, value in update(trained, where).items()}

    def _weights(self, batch: BatchColumns, step) -> np.ndarray:
        """[R]: of this step's tokens, aggregated as the policy's loss is, without corrections of
        it; 0 elsewhere."""
        samples = np.sort(np.array([i for rank in step for micro in rank for i in micro], np.int64))
        index = gather_index(batch.response_offsets, samples)
        weights = np.zeros(batch.num_response_tokens, np.float32)
        weights[index] = token_weights(
            batch.loss_mask[index],
            batch.response_lengths[samples],
            per_token=self._loss_config.calculate_per_token_loss,
            constant_length=self._loss_config.constant_length,
            rollout=batch.rollouts[samples],
        )
        return weights

    def _loss(
        self, batch: BatchColumns, weights: np.ndarray, micro: MicroBatch, values: torch.Tensor
    ):
        """The micro-batch's part of the loss, and its part of METRICS."""
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

    def _copy(self, policy: Trained) -> None:
        theirs = dict(weights(policy.model))
        for name, tensor in weights(self.trained.model):
            if not name.startswith("output_layer."):
                tensor.copy_(theirs[name])

    def _load_head(self, directory: str | None) -> None:
        """The value head of a reward model, where this rank has the last stage; 0 where the
        directory has none."""
        head = getattr(self.trained.model, "output_layer", None)
        if not isinstance(head, ValueHead):
            return
        found = _tensors(directory, f"{HEAD}.") if directory else {}
        for name, parameter in head.named_parameters():
            value = found.get(name)
            if value is not None and value.shape != parameter.shape:
                raise ConfigError(
                    "this model has no head of one value",
                    where="critic.hf_checkpoint",
                    found=f"{HEAD}.{name} {list(value.shape)} in {directory}",
                    expected=list(parameter.shape),
                )
            parameter.copy_(torch.zeros_like(parameter) if value is None else value)


def _tensors(directory: str, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a directory's safetensors whose names begin so, without the prefix."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in list(file.keys()) if name.startswith(prefix)]
            found |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    return found
