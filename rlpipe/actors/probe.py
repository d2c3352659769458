"""After a push: do the engines compute what the trainer computes?

The same few sequences are scored by both. In float32 they agree to about 1e-5; a tensor that did not arrive, or arrived
under the wrong name, shows as a difference of order 1.

Not here: the push itself (`sync`).
"""

from __future__ import annotations

import asyncio

import numpy as np

from rlpipe.config.train import SyncConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import SyncError
from rlpipe.packing import BatchColumns

LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.3}


def compare_with_engines(samples: BatchColumns, trainer: np.ndarray, engines: list[str], dtype: str, sync: SyncConfig) -> float:
    """The largest absolute difference of response-token log-probs between the trainer and any engine.

    Shapes: trainer [R] float32, at temperature 1. Raises: SyncError if it is larger than `sync.max_logprob_difference`.
    """
    limit = sync.max_logprob_difference or LARGEST_DIFFERENCE[dtype]
    sequences = [row.tolist() for row in np.split(samples.tokens, samples.offsets[1:-1])]
    expected = samples.split(trainer)
    worst = 0.0
    for url in engines:
        scored = asyncio.run(_score(url, sequences, sync.timeout_s))
        for row, ours, prompt in zip(scored, expected, samples.prompt_lengths, strict=True):
            worst = max(worst, float(np.abs(np.asarray(row[prompt - 1 :], np.float32) - ours).max(initial=0.0)))
        if not worst <= limit:
            raise SyncError(
                "the engine computes other log-probs than the trainer",
                where=f"sync/{url}",
                found=f"a difference of {worst:.3g}",
                expected=f"at most {limit:g} (sync.max_logprob_difference)",
                do="check that model.source gives both the same architecture and dtype",
            )
    return worst


async def _score(url: str, sequences: list[list[int]], deadline_s: float) -> list[list[float]]:
    async with Engine(url, deadline_s=deadline_s) as engine:
        return await engine.score(sequences)
