"""After a push: do the engines compute what the trainer computes?

The same few sequences are scored by both. In float32 they agree to about 1e-5; a tensor that did not arrive, or arrived
under the wrong name, shows as a difference of order 1.

Not here: the push itself (`sync`), or how much difference is too much (the sync stage).
"""

from __future__ import annotations

import asyncio

import numpy as np

from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import DeadlineExceeded
from rlpipe.packing import BatchColumns


def largest_difference(
    samples: BatchColumns, trainer: np.ndarray, engines: list[str], timeout_s: float, *, at_once: bool
) -> float:
    """The largest absolute difference of response-token log-probs between the trainer and any engine; inf for NaN.

    `timeout_s`: of all engines together. `at_once`: they score at the same time; without GPUs they may share the machine's cores,
    and take turns. Shapes: trainer [R] float32, at temperature 1. Raises: EngineError, DeadlineExceeded.
    """
    sequences = [row.tolist() for row in np.split(samples.tokens, samples.offsets[1:-1])]
    worst = 0.0
    for scored in asyncio.run(_score_all(engines, sequences, timeout_s, at_once=at_once)):
        for row, ours, prompt in zip(scored, samples.split(trainer), samples.prompt_lengths, strict=True):
            apart = np.abs(np.asarray(row[prompt - 1 :], np.float32) - ours)
            worst = max(worst, float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)))
    return worst


async def _score_all(
    engines: list[str], sequences: list[list[int]], deadline_s: float, *, at_once: bool
) -> list[list[list[float]]]:
    """Every engine's scores."""
    turns = asyncio.Semaphore(len(engines) if at_once else 1)
    waiting = list(engines)

    async def scored(url: str) -> list[list[float]]:
        async with turns:
            found = await _score(url, sequences, deadline_s)
        waiting.remove(url)
        return found

    try:
        async with asyncio.timeout(deadline_s):
            return await asyncio.gather(*map(scored, engines))
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):
            raise
        raise DeadlineExceeded(
            "the engines did not score the samples in time", where=", ".join(waiting), expected=f"all within {deadline_s:g} s"
        ) from error


async def _score(url: str, sequences: list[list[int]], deadline_s: float) -> list[list[float]]:
    async with Engine(url, deadline_s=deadline_s) as engine:
        return await engine.score(sequences)
