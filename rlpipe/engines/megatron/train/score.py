"""Log-probs of a batch's response tokens under the current weights, without gradients.

Data parallel ranks share the samples; the result is put together on every rank.
"""

from __future__ import annotations

import numpy as np
import torch

from rlpipe.engines.megatron import platform

# isort: split
from megatron.core import parallel_state

from rlpipe.batch.packing import BatchColumns, plan
from rlpipe.engines.megatron.groups import speaks_for_its_samples
from rlpipe.engines.megatron.model.build import Scorer
from rlpipe.engines.megatron.train.batch import pack
from rlpipe.engines.megatron.train.passes import run_passes, this_slice
from rlpipe.engines.megatron.train.routing import Around


def score(
    trained: Scorer,
    batch: BatchColumns,
    *,
    temperature: float,
    max_tokens: int,
    around: Around | None = None,
) -> np.ndarray:
    """[R] float32: log-prob of every response token, at `temperature`. Collective; the same on
    every rank.

    `max_tokens`: packed tokens of a micro-batch, over all context parallel ranks. `around`: see
    `run_passes`.
    """
    mine = spread_micro_batches(batch, max_tokens)
    part = this_slice(trained)
    trained.ddp.eval()
    kept = run_passes(
        trained,
        (pack(batch, samples, part, only_masked_in=False) for samples in mine),
        lambda micro, log_probs, _entropy: (log_probs.sum(), (micro.response_index, log_probs)),
        num_micro_batches=len(mine),
        temperature=temperature,
        forward_only=True,
        around=around,
    )
    return whole_column(kept, batch.num_response_tokens)


def spread_micro_batches(batch: BatchColumns, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """This data parallel rank's share of the samples, in micro-batches of at most `max_tokens`."""
    ranks = parallel_state.get_data_parallel_world_size()
    packing = plan(
        batch.lengths, global_batch_size=None, max_tokens=max_tokens, data_parallel=ranks
    )
    return packing.steps[0][parallel_state.get_data_parallel_rank()]


def whole_column(
    kept: list[tuple[np.ndarray, torch.Tensor]], num_response_tokens: int
) -> np.ndarray:
    """[R] float32 on every rank, from each rank's (indices, values) of its micro-batches.
    Collective."""
    result = torch.zeros(num_response_tokens, dtype=torch.float32, device=platform.device())
    if speaks_for_its_samples():
        for index, values in kept:
            result[torch.from_numpy(index).to(result.device)] = values
    torch.distributed.all_reduce(result)
    return result.cpu().numpy()
