"""One iteration as a flow run of its own: what a worker starts in a process, and what its Retry
button repeats.

It works under the epoch and on the actors of the process that drives the run, and ends neither of
them; once that has gone, under an epoch and with actors of its own. Not here: the stages
(`iteration`), or who opens it (`deployed`).
"""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.states import Cancelled

from flows.iteration import iteration
from flows.output import outlive_the_worker
from flows.stopping import Preempted, Stopping, being_cancelled, hear_sigterm
from rlpipe.actors.ray.local_ray import disconnect
from tasks.context import close_context, context
from tasks.turn import abandon


@flow(name="iteration", flow_run_name="{run}-{k}", on_running=[hear_sigterm, outlive_the_worker])
async def iteration_run(run: str, k: int) -> Any:
    """Iteration k of a run that was begun. What the store has already is reused; `Cancelled` if it
    was cancelled.

    Raises: ConfigError if there is no such run; Fenced if another driver has replaced the one it
    works for; what a stage raises.
    """
    try:
        it = await context(run)
        try:
            with Stopping(it.config.resources.stop_grace_s) as stopping:
                await stopping.unless_asked(iteration.fn(run, k))
        except Preempted:
            await abandon(run, k)
            if await being_cancelled():
                return Cancelled(message="cancelled; what its stages have finished is in the store")
            raise
        finally:
            await close_context(run, end_actors=False)
    finally:
        disconnect()
