"""What the fleet does differently with engines that others start and end: it can do without some of
them.

Not here: asking them what they serve (`engines.sglang.external`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlpipe.errors import EngineUnavailable

if TYPE_CHECKING:
    from rlpipe.actors.engines.engine import EngineSpec
    from rlpipe.actors.engines.kept_engine import KeptEngine


def attempts(spec: EngineSpec, usual: int, interval_s: float) -> int:
    """How often in a row an engine is not brought back until it is in trouble.

    A start of our own takes its time; one that others start is looked at every `interval_s`, and
    may be away as long as a start.
    """
    return (
        max(usual, math.ceil(spec.resources.start_timeout_s / interval_s))
        if spec.resources.external_engines
        else usual
    )


async def start_all(engines: Sequence[KeptEngine], spec: EngineSpec) -> None:
    """Start all engines; of external ones, meet those that answer, if any does: a keeper takes in
    the others when they do.

    Raises: as `EngineActor.start`.
    """
    starts = (engine.start(spec, spec.resources.start_timeout_s) for engine in engines)
    errors = [
        error
        for error in await asyncio.gather(*starts, return_exceptions=True)
        if error is not None
    ]
    away = [
        error
        for error in errors
        if spec.resources.external_engines and isinstance(error, EngineUnavailable)
    ]
    lasting = [error for error in errors if error not in away]
    if lasting or len(away) == len(engines):
        raise [*lasting, *away][0]
