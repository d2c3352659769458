"""Run a stage as a Prefect task: reuse its node, or do the work and record the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, ParamSpec

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import task_run
from prefect.states import Cancelled, Completed

from rlpipe.errors import (
    ActorLost,
    DeadlineExceeded,
    EngineError,
    ObjectConflict,
    ObjectCorrupt,
    ObjectMissing,
    StoreError,
    StoreFull,
    SyncError,
    TrainerError,
)
from rlpipe.lineage.stage_inputs import Inputs
from rlpipe.observe.trace import traced
from rlpipe.types import Node, NodeRef, Stage
from tasks.cancellation import CANCELLED_MESSAGE, is_being_cancelled
from tasks.context import RunContext, Stopwatch, context, recover

HANDLE_OUTPUTS = ("seconds", "tokens", "version", "accuracy")
"""Outputs of a node that its handle carries. Task results stay small: Prefect walks through every
value that a task gets or returns, several times."""
Parameters = ParamSpec("Parameters")
Work = Callable[[], Awaitable[dict[str, Any]]]
"""A stage's work; returns `{"files": [FileRecord], "outputs": {...}}`."""


RETRIES_AFTER_S = [1.0, 10.0]
TRANSIENT = (ActorLost, DeadlineExceeded, EngineError, StoreError, SyncError, TrainerError)
PERMANENT = (ObjectConflict, ObjectCorrupt, ObjectMissing, StoreFull)
"""A stage is retried after a TRANSIENT error, once dead actors are restarted, but not after a
PERMANENT one (these are subclasses of TRANSIENT ones).
"""


def is_transient(_task: Any, _run: Any, state: State) -> bool:
    """True if a failed task should be retried. Prefect calls it with the failed state."""
    # Prefect wraps the exception in a result record.
    error = getattr(state.data, "result", state.data)
    return isinstance(error, TRANSIENT) and not isinstance(error, PERMANENT)


def stage_task(
    name: str, run_name: str
) -> Callable[[Callable[Parameters, Awaitable[Any]]], Callable[Parameters, Awaitable[Any]]]:
    """Make a Prefect task that is called like the plain function.

    The first argument is the run's name.

    A state that the function returns becomes the task's state, and its data the result. After a
    transient error, dead actors are restarted and the task runs again.
    """

    def decorate(
        function: Callable[Parameters, Awaitable[Any]],
    ) -> Callable[Parameters, Awaitable[Any]]:
        @wraps(function)
        async def attempt(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Any:
            run = str(arguments[0] if arguments else keywords["run"])
            # Opening the context is outside the deadline: it has deadlines of its own.
            timeout_s = (await context(run)).config.orchestration.timeout_s
            try:
                async with stage_deadline(timeout_s, f"{run}: {task_run.name or name}"):
                    # A retry: the error may come from a dead actor or a dead Ray.
                    if (task_run.run_count or 1) > 1:
                        await recover(run)
                    return await function(*arguments, **keywords)
            except asyncio.CancelledError:
                if await is_being_cancelled():
                    return Cancelled(message=CANCELLED_MESSAGE)
                raise

        wrapped: Any = task(
            name=name,
            task_run_name=run_name,
            # A cached result would be wrong after a restart of the actor that held the state.
            cache_policy=NO_CACHE,
            retries=len(RETRIES_AFTER_S),
            retry_delay_seconds=RETRIES_AFTER_S,
            retry_condition_fn=is_transient,
        )(attempt)

        @wraps(function)
        async def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Any:
            # As a state, so that Prefect shows `Reused` instead of `Completed`.
            state = await wrapped(*arguments, **keywords, return_state=True)
            # The task caught the cancellation of this asyncio task to get its state.
            if state.is_cancelled():
                raise asyncio.CancelledError
            return await state.aresult()

        return call

    return decorate


@asynccontextmanager
async def stage_deadline(timeout_s: float, where: str) -> AsyncIterator[None]:
    """Limit a stage to `timeout_s`, beyond the deadlines of its calls. Raises: DeadlineExceeded."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):  # a subclass of TimeoutError
            raise
        raise DeadlineExceeded(
            "the stage did not finish in time",
            where=where,
            expected=f"within {timeout_s:g} s (orchestration.timeout_s)",
            do="read the log of the stage; the same command reuses finished nodes",
        ) from error


async def reuse_or_run(run: RunContext, inputs: Inputs, work: Work) -> State:
    """Return the handle of a stage's node.

    The task's state is `Reused` if the node is stored, else `Completed` after the work.
    """
    # In a thread: the store's client blocks while it retries an unreachable store.
    node = await asyncio.to_thread(run.nodes.find, inputs.stage, inputs.digest)
    if node is not None:
        # A run that loads another run's rollouts finds their rewards in each iteration.
        if not run.config.debug.load_debug_rollout_data:
            run.progress.say(
                f"{run.config.run}: {inputs.stage} {node.digest[:12]} is in the store, reused"
            )
        return Completed(
            name="Reused",
            message=f"node {node.digest[:12]} was in the store",
            data=handle(node, reused=True),
        )
    parameters = task_run.parameters
    with (
        run.progress.running(str(inputs.stage), parameters.get("k")),
        traced(run.directory, str(inputs.stage), parameters.get("k", parameters.get("version"))),
        Stopwatch(run, str(inputs.stage)) as watch,
    ):
        result = await work()
    outputs = {**result["outputs"], "seconds": watch.seconds}
    if switches := await run.cluster.switches():
        # Seconds and memory of switches on shared GPUs (`tools.switches`).
        outputs["switches"] = switches
    node = await asyncio.to_thread(
        run.nodes.commit, inputs.node(files=tuple(result.get("files", ())), outputs=outputs)
    )
    return Completed(
        message=f"node {node.digest[:12]} in {watch.seconds:.2f} s", data=handle(node, reused=False)
    )


def handle(node: Node, *, reused: bool) -> NodeRef:
    """Return the handle of a node: its name and figures. Only handles cross task boundaries.

    The flow needs the metrics of evaluations. Those of other stages are read from the store.
    """
    names = (*HANDLE_OUTPUTS, "metrics") if node.stage is Stage.EVAL else HANDLE_OUTPUTS
    outputs = {name: node.outputs[name] for name in names if name in node.outputs}
    return NodeRef(stage=node.stage, digest=node.digest, reused=reused, outputs=outputs)
