"""One iteration as its own flow run, started by a Prefect worker and repeatable with Retry.

The flow run uses the epoch and the actors of the run's driver and ends neither. If the driver has
ended, the flow run acquires an epoch and starts actors itself.
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.states import Cancelled

from flows.iteration import iteration
from flows.output import outlive_the_worker
from flows.stopping import (
    Preempted,
    Stopping,
    handle_sigterm,
)
from rlpipe.actors.ray.local_ray import disconnect
from tasks.cancellation import CANCELLED_MESSAGE, is_being_cancelled
from tasks.context import close_context, context
from tasks.ordering import abort_requests


@flow(name="iteration", flow_run_name="{run}-{k}", on_running=[handle_sigterm, outlive_the_worker])
async def iteration_run(run: str, k: int) -> Any:
    """Run iteration k of a run that has begun. Stages whose nodes are in the store are reused.

    Returns the state `Cancelled` if the flow run was cancelled.
    Raises: ConfigError if the run does not exist; Fenced if another driver replaced the one that
    opened this iteration; errors of a stage.
    """
    try:
        ctx = await context(run)
        try:
            with Stopping(ctx.config.resources.stop_grace_s) as stopping:
                await stopping.run(iteration.fn(run, k))
        except Preempted:
            # The driver's other iterations keep their requests.
            await abort_requests(run, k)
            if await is_being_cancelled():
                return Cancelled(message=CANCELLED_MESSAGE)
            raise
        finally:
            # The actors belong to the driver.
            await close_context(run, end_actors=False)
    finally:
        disconnect()
