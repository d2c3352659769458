"""The demo's reward with a delay, like that of a sandbox or a remote judge."""

from __future__ import annotations

import asyncio

from rlpipe.types import Sample

SECONDS = 0.1


async def score(sample: Sample) -> float:
    """Return 1 if the response is the label, after SECONDS.

    Of the 256 samples of the demo 64 wait at a time: 0.4 s in all.
    """
    await asyncio.sleep(SECONDS)
    return float(sample.response.strip() == sample.label)
