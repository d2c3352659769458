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
from megatron.core import parallel_state

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import plan
from rlpipe.engines.megatron.model.build import ScoringModel
from rlpipe.engines.megatron.process_groups import reports_token_results
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

    The result is equal on every rank. `max_tokens`: packed tokens of a micro-batch, over all
    context parallel ranks. `forward_context`: see `run_passes`.
    """
    return score_packed(
        scorer,
        packed_for(scorer, batch, max_tokens),
        batch.num_response_tokens,
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
    num_response_tokens: int,
    *,
    temperature: float,
    forward_context: ForwardContext | None = None,
) -> np.ndarray:
    """Return the `score` of a packed batch with R = `num_response_tokens`. Collective."""
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
    return assembled_column(outputs, num_response_tokens)


def local_micro_batches(
    scorer: ScoringModel, batch: BatchColumns, max_tokens: int
) -> Sequence[tuple[int, ...]]:
    """Return this data parallel rank's samples, in micro-batches of at most `max_tokens`."""
    ranks = parallel_state.get_data_parallel_world_size()
    packing = plan(
        batch.lengths, global_batch_size=None, max_tokens=max_tokens, data_parallel=ranks
    )
    return scheduled(scorer, packing.steps[0][parallel_state.get_data_parallel_rank()])


def assembled_column(
    outputs: list[tuple[np.ndarray, torch.Tensor]], num_response_tokens: int
) -> np.ndarray:
    """Return [R] float32 on every rank. Collective.

    `outputs`: (response index, values) of this rank's micro-batches.
    """
    result = torch.zeros(num_response_tokens, dtype=torch.float32, device=platform.device())
    if reports_token_results():
        for index, values in outputs:
            result[torch.from_numpy(index).to(result.device)] = values
    # Every token has one reporting rank, so the sum is the value itself.
    torch.distributed.all_reduce(result)
    return result.cpu().numpy()
