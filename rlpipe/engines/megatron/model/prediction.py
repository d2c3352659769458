"""Layers for multi-token prediction (MTP): their specification, and their loss.

Depth k reads the hidden state of a token and the embeddings of the next k tokens, and predicts the
token k + 1 positions later. The loss of an optimizer step is added to the policy's:

    train.megatron.mtp_loss_scaling_factor · mean over depths and tokens of -log p_k(token)

over the response tokens with loss mask 1. It trains these layers alone: hidden states of the model,
embedding and output layer are constants in it, so the policy's gradient stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from rlpipe.batch.columns import BatchColumns, gather_index
from rlpipe.engines.megatron.model.layers import Norm, PolicyModel
from rlpipe.engines.megatron.model.vocab import log_probs_and_entropy
from rlpipe.errors import ConfigError

if TYPE_CHECKING:
    from rlpipe.engines.megatron.train.batch import MicroBatch

_NUM_LAYERS = "train.megatron.mtp_num_layers"


def prediction_spec(config: Any, layer: Any) -> Any:
    """Return GPTModel's `mtp_block_spec` of layers like `layer`; None if they are not trained."""
    if not config.mtp_num_layers:
        return None
    spec = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=Norm,
            hnorm=Norm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=layer,
            layer_norm=Norm,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * config.mtp_num_layers)


def check_prediction(bridge: LLMBridge) -> None:
    """Raises: ConfigError for layers that the model does not have, or a layout without them."""
    config = bridge.config
    if not config.mtp_num_layers:
        return
    existing = getattr(bridge, "prediction_layers", 0)
    if config.mtp_num_layers != existing:
        raise ConfigError(
            "the model has another number of layers for multi-token prediction that can be trained",
            where=_NUM_LAYERS,
            found=config.mtp_num_layers,
            expected=f"{existing}, or no such key" if existing else "no such key",
        )
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if getattr(config, name) > 1:
            raise ConfigError(
                "layers for multi-token prediction are trained on one pipeline stage, and not "
                "split over context parallel ranks",
                where=f"train.parallel.{name}",
                found=getattr(config, name),
                expected=f"1, or no {_NUM_LAYERS}",
            )


@dataclass(frozen=True, slots=True)
class PredictionLoss:
    """The loss of an optimizer step. Its weights are fixed before packing, as the policy's are."""

    scale: float
    counts: tuple[int, ...]
    """Tokens of the whole step that each depth predicts."""

    @classmethod
    def of_step(cls, config: Any, batch: BatchColumns, samples: np.ndarray) -> PredictionLoss:
        """Return the loss of the step with these samples of all ranks."""
        index = gather_index(batch.response_offsets, samples)
        sample = batch.sample_of[index]
        row = batch.prompt_lengths[sample] + index - batch.response_offsets[sample] - 1
        rows = row[batch.loss_mask[index] > 0]
        counts = (int((rows >= depth).sum()) for depth in range(1, config.mtp_num_layers + 1))
        return cls(config.mtp_loss_scaling_factor, tuple(counts))

    def __call__(
        self, model: PolicyModel, micro: MicroBatch, hidden_states: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return this micro-batch's part of the mean, not scaled.

        `hidden_states`: of each depth, [L, 1, H], sharded over L with sequence parallelism.
        """
        group: Any = parallel_state.get_tensor_model_parallel_group()
        total = torch.zeros((), device=micro.rows.device)
        for depth, (hidden, count) in enumerate(zip(hidden_states, self.counts, strict=True), 1):
            predicted = micro.positions[0, micro.rows] >= depth
            log_probs, _ = log_probs_and_entropy(
                model.output_rows(hidden, micro.rows[predicted] - depth),
                model.output_weight().detach(),
                micro.targets[predicted],
                temperature=1.0,
                group=group,
                entropy_gradient=False,
                first=model.first_token,
            )
            total = total - log_probs.sum() / (max(count, 1) * len(self.counts))
        return total
