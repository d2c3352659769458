"""Log-probs of a batch's response tokens under the current weights, without gradients.

`score` splits the samples over data parallel ranks and assembles the column on every rank. Two
models score one packing of a batch with `packed_for` and `score_packed`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlpipe.engines.megatron import platform

# isort: split

from rlpipe.batch.columns import BatchColumns
from rlpipe.engines.megatron.model.build import ScoringModel
from rlpipe.engines.megatron.process_groups import reports_token_results, scored_micro_batches
from rlpipe.engines.megatron.train.batch import MicroBatch, pack
from rlpipe.engines.megatron.train.passes import (
    packing_slice,
    run_passes,
    scheduled,
    set_training,
)
from rlpipe.engines.megatron.train.routing import ForwardContext


def score(
    scorer: ScoringModel,
    batch: BatchColumns,
    *,
    temperature: float,
    max_tokens: int,
    forward_context: ForwardContext | None = None,
) -> np.ndarray:
    """Return the log-prob of every response token at `temperature`: [R] float32. Collective.

    R of the whole batch; equal on every rank. `batch`: the whole batch, or at least the samples
    that this rank scores (`MegatronRank.scored_samples`). `max_tokens`: packed tokens of a
    micro-batch, over all context parallel ranks. `forward_context`: see `run_passes`.
    """
    return score_packed(
        scorer,
        packed_for(scorer, batch, max_tokens),
        batch,
        temperature=temperature,
        forward_context=forward_context,
    )


def packed_for(scorer: ScoringModel, batch: BatchColumns, max_tokens: int) -> list[MicroBatch]:
    """Return this data parallel rank's micro-batches, on its device.

    `max_tokens`: as `score`. A token takes about 40 bytes.
    """
    part = packing_slice(scorer)
    return [
        pack(batch, samples, part, only_masked_in=False)
        for samples in local_micro_batches(scorer, batch, max_tokens)
    ]


def score_packed(
    scorer: ScoringModel,
    micro_batches: list[MicroBatch],
    batch: BatchColumns,
    *,
    temperature: float,
    forward_context: ForwardContext | None = None,
) -> np.ndarray:
    """Return the `score` of a packed batch. Collective."""
    set_training(scorer, False)
    outputs = run_passes(
        scorer,
        micro_batches,
        # Megatron's schedule requires a scalar loss, also without gradients.
        lambda micro, log_probs, _entropy: (log_probs.sum(), (micro.response_index, log_probs)),
        num_micro_batches=len(micro_batches),
        temperature=temperature,
        forward_only=True,
        forward_context=forward_context,
    )
    return assembled_column(outputs, batch)


def local_micro_batches(
    scorer: ScoringModel, batch: BatchColumns, max_tokens: int
) -> Sequence[tuple[int, ...]]:
    """Return the positions in `batch` of this data parallel rank's samples, in micro-batches.

    `max_tokens`: as `score`.
    """
    micro_batches = scored_micro_batches(batch.sizes, max_tokens)
    return scheduled(scorer, positions_of(batch, micro_batches))


def positions_of(
    batch: BatchColumns, micro_batches: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Return the micro-batches with positions in `batch` for numbers of samples."""
    return [tuple(batch.positions(samples).tolist()) for samples in micro_batches]


def assembled_column(
    outputs: list[tuple[np.ndarray, torch.Tensor]], batch: BatchColumns
) -> np.ndarray:
    """Return [R] float32 of the whole batch on every rank. Collective.

    `outputs`: (response index in `batch`, values) of this rank's micro-batches.
    """
    size = batch.sizes.num_response_tokens
    result = torch.zeros(size, dtype=torch.float32, device=platform.device())
    if reports_token_results():
        index_of_batch = batch.response_index()
        for index, values in outputs:
            result[torch.from_numpy(index_of_batch[index]).to(result.device)] = values
    # Every token has one reporting rank, so the sum is the value itself.
    torch.distributed.all_reduce(result)
    return result.cpu().numpy()
