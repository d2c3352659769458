"""The demo's reward, from a verifier that takes its time: what a sandbox or a judge at the other
end of a network is like."""

from __future__ import annotations

import asyncio

from rlpipe.types import Sample

SECONDS = 0.1


async def score(sample: Sample) -> float:
    """1 if the response is the label, SECONDS later. Of the 256 samples of the demo 64 wait at a
    time: 0.4 s in all."""
    await asyncio.sleep(SECONDS)
    return float(sample.response.strip() == sample.label)
