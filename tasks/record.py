"""The rule of every stage: its node is there, and nothing is done; or the work is done, and its
node is recorded.

Not here: what the work is.
"""

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
from prefect.states import Completed

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
from rlpipe.types import Node, NodeRef
from tasks.context import RunContext, Stopwatch, context, recover

SMALL = ("seconds", "tokens", "version", "metrics", "accuracy")
Parameters = ParamSpec("Parameters")
Work = Callable[[], Awaitable[dict[str, Any]]]
"""Does a stage's work; answers `{"files": [FileRecord], "outputs": {...}}`."""


RETRIES_AFTER_S = [1.0, 10.0]
PASSING = (ActorLost, DeadlineExceeded, EngineError, StoreError, SyncError, TrainerError)
LASTING = (ObjectConflict, ObjectCorrupt, ObjectMissing, StoreFull)
"""A stage that failed with one of PASSING is tried again, after starting what died; but LASTING
ones are not passing."""


def may_pass(_task: Any, _run: Any, state: State) -> bool:
    """Is it worth trying again? Asked by Prefect of a failed state."""
    error = getattr(state.data, "result", state.data)
    return isinstance(error, PASSING) and not isinstance(error, LASTING)


def stage_task(
    name: str, run_name: str
) -> Callable[[Callable[Parameters, Awaitable[Any]]], Callable[Parameters, Awaitable[Any]]]:
    """A Prefect task, called like the plain function. A state that the function answers is the
    task's, and its data the result.

    Its first argument is the run's name. What may pass is tried again, after starting what died.
    Prefect's own cache is off: it would answer for an actor that has been restarted since.
    """

    def decorate(
        function: Callable[Parameters, Awaitable[Any]],
    ) -> Callable[Parameters, Awaitable[Any]]:
        @wraps(function)
        async def attempt(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Any:
            run = str(arguments[0] if arguments else keywords["run"])
            timeout_s = (await context(run)).config.orchestration.timeout_s
            async with within(timeout_s, f"{run}: {task_run.name or name}"):
                if (task_run.run_count or 1) > 1:
                    await recover(run)
                return await function(*arguments, **keywords)

        wrapped: Any = task(
            name=name,
            task_run_name=run_name,
            cache_policy=NO_CACHE,
            retries=len(RETRIES_AFTER_S),
            retry_delay_seconds=RETRIES_AFTER_S,
            retry_condition_fn=may_pass,
        )(attempt)

        @wraps(function)
        async def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Any:
            state = await wrapped(*arguments, **keywords, return_state=True)
            return await state.aresult()

        return call

    return decorate


@asynccontextmanager
async def within(timeout_s: float, where: str) -> AsyncIterator[None]:
    """The last deadline of a stage, behind those of what it waits for. Raises: DeadlineExceeded."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):
            raise
        raise DeadlineExceeded(
            "the stage did not finish in time",
            where=where,
            expected=f"within {timeout_s:g} s (orchestration.timeout_s)",
            do="see what it waited for; the same command goes on from what is finished",
        ) from error


async def once(run: RunContext, inputs: Inputs, work: Work) -> State:
    """The handle of a stage's node, as the state of its task: `Reused` if it was there, else
    `Completed` after the work."""
    node = await asyncio.to_thread(
        run.nodes.find, inputs.stage, inputs.digest
    )  # a store that is away is waited for
    if node is not None:
        run.progress.say(
            f"{run.config.run}: {inputs.stage} {node.digest[:12]} is in the store already, reused"
        )
        return Completed(
            name="Reused",
            message=f"node {node.digest[:12]} was there",
            data=handle(node, reused=True),
        )
    run.progress.stage(str(inputs.stage))
    numbers = task_run.parameters
    with (
        traced(run.directory, str(inputs.stage), numbers.get("k", numbers.get("version"))),
        Stopwatch(run, str(inputs.stage)) as watch,
    ):
        result = await work()
    outputs = {**result["outputs"], "seconds": watch.seconds}
    if switches := await run.cluster.switches():
        outputs["switches"] = switches
    node = await asyncio.to_thread(
        run.nodes.commit, inputs.node(files=tuple(result.get("files", ())), outputs=outputs)
    )
    return Completed(
        message=f"node {node.digest[:12]} in {watch.seconds:.2f} s", data=handle(node, reused=False)
    )


def handle(node: Node, *, reused: bool) -> NodeRef:
    """What crosses a task boundary: the node's name, and its figures."""
    small = {name: node.outputs[name] for name in SMALL if name in node.outputs}
    return NodeRef(stage=node.stage, digest=node.digest, reused=reused, outputs=small)
