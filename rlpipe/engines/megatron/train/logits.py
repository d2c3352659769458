"""`LogitsLoss`: a custom loss with slime's signature, over whole logits and slime's batch.

`rlpipe.algorithms.logits_loss` documents the arguments of such a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlpipe.algorithms.logits_loss import Share, logits_loss, shared_as
from rlpipe.algorithms.objective import Objective
from rlpipe.batch.columns import BatchColumns, gather_index
from rlpipe.engines.megatron import platform
from rlpipe.store.columns import hook_names

# isort: split
from megatron.core import parallel_state

from rlpipe.engines.megatron.train.batch import MicroBatch


@dataclass(frozen=True, eq=False)
class LogitsLoss:
    """A user function as the objective of one optimizer step. Make it with `of_step`."""

    function: Callable[..., Any]
    args: Any
    batch: BatchColumns
    weight: np.ndarray
    """[R]: weight of every response token in the step, 0 for tokens outside of the loss."""
    scale: float
    """Divisor of the function's results: the step's number of rollouts, or of tokens."""
    mask_sums: np.ndarray
    """[N]: tokens of each sample's rollout that count in the loss."""

    @classmethod
    def of_step(
        cls,
        function: Callable[..., Any],
        args: Any,
        batch: BatchColumns,
        samples: np.ndarray,
        weight: np.ndarray,
        *,
        per_token: bool,
    ) -> LogitsLoss:
        """Make the loss of the step that trains these samples.

        `per_token`: train.loss.calculate_per_token_loss.
        """
        numbers, rollout = np.unique(batch.rollouts, return_inverse=True)
        counted = np.bincount(
            np.repeat(rollout, batch.response_lengths), batch.loss_mask, minlength=len(numbers)
        )
        tokens = float(batch.loss_mask[gather_index(batch.response_offsets, samples)].sum())
        scale = max(tokens, 1.0) if per_token else float(len(np.unique(rollout[samples])))
        return cls(function, args, batch, weight, scale, counted[rollout])

    def __call__(self, micro: MicroBatch, logits: torch.Tensor) -> Objective:
        """Return the micro-batch's part of the step's objective. logits [T, V / TP] float32."""
        weight = micro.column(self.weight)

        def sum_of_sample_mean(values: torch.Tensor) -> torch.Tensor:
            return self.scale * (weight * values).sum()

        splits_vocabulary = parallel_state.get_tensor_model_parallel_world_size() > 1
        share = Share(
            parallel_state.get_tensor_model_parallel_group() if splits_vocabulary else None,
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
        )
        with shared_as(share):
            loss, metrics = logits_loss(
                self.function, self.args, self._batch(micro), logits[None], sum_of_sample_mean
            )
        logged = {
            name: value.detach().reshape(()).float() / self.scale
            for name, value in {**metrics, "loss": loss}.items()
        }
        return Objective(loss / self.scale, logged)

    def _batch(self, micro: MicroBatch) -> dict[str, Any]:
        """Return the micro-batch under slime's names."""
        batch = self.batch
        samples = micro.samples
        device = micro.tokens.device
        counts = np.bincount(batch.sample_of[micro.response_index], minlength=len(batch))[
            samples
        ].tolist()

        def column(values: np.ndarray | None) -> list[torch.Tensor] | None:
            return None if values is None else list(micro.column(values).split(counts))

        def whole(values: np.ndarray, offsets: np.ndarray) -> list[torch.Tensor]:
            parts = (torch.from_numpy(values[offsets[i] : offsets[i + 1]]) for i in samples)
            return [platform.to_device(part, device) for part in parts]

        full_masks = torch.zeros(micro.length, device=device).index_copy(
            0, micro.rows, micro.column(batch.loss_mask)
        )
        return {
            "tokens": micro.tokens,
            "unconcat_tokens": whole(batch.tokens.astype(np.int64), batch.offsets),
            "total_lengths": batch.lengths[samples].tolist(),
            "response_lengths": batch.response_lengths[samples].tolist(),
            "loss_masks": whole(batch.loss_mask, batch.response_offsets),
            "rollout_mask_sums": self.mask_sums[samples].tolist(),
            "full_loss_masks": full_masks[None],
            "packed_seq_params": micro.layout,
            "multimodal_train_inputs": None,
            **{theirs: column(getattr(batch, ours)) for ours, theirs in hook_names().items()},
        }
