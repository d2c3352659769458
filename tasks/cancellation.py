"""Detect a Cancel of the flow run in Prefect's pages.

Prefect calls a flow run or task whose asyncio task was cancelled Crashed, also after a Cancel. Code
that catches `CancelledError` asks `is_being_cancelled` and returns the state `Cancelled` instead.
"""

from __future__ import annotations

import asyncio
import os
from uuid import UUID

import httpx

FLOW_RUN_ID_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Environment variable in which a worker names the flow run that it started this process for."""
QUERY_TIMEOUT_S = 5.0
CANCELLED_MESSAGE = "cancelled; nodes of finished stages are in the store"
"""Message of an iteration or stage that a Cancel ended, in Prefect's pages."""


async def is_being_cancelled() -> bool:
    """True if this flow run, or the one that the worker started this process for, is cancelled.

    The second one matters for subflows, such as a fork's training or a warm start. A server that
    does not answer within QUERY_TIMEOUT_S counts as no.
    """
    # `flows.output` needs the variable's name alone: importing Prefect takes two seconds.
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run as this_flow_run

    flow_runs = {this_flow_run.get_id(), os.environ.get(FLOW_RUN_ID_VARIABLE)} - {None}
    try:
        async with asyncio.timeout(QUERY_TIMEOUT_S), get_client() as client:
            states = [(await client.read_flow_run(UUID(run))).state for run in flow_runs]
    # Without an answer the flow run counts as not cancelled, and the grace period applies.
    except (TimeoutError, httpx.HTTPError):
        return False
    return any(
        state is not None and (state.is_cancelling() or state.is_cancelled()) for state in states
    )
