"""The rule of every stage: its node is there, and nothing is done; or the work is done, and its node is recorded.

Not here: what the work is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, ParamSpec

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from rlpipe.inputs import Inputs
from rlpipe.types import Node, NodeRef
from tasks.context import RunContext, Stopwatch

SMALL = ("seconds", "tokens", "version", "metrics", "accuracy")
Parameters = ParamSpec("Parameters")
Work = Callable[[], Awaitable[dict[str, Any]]]
"""Does a stage's work; answers `{"files": [FileRecord], "outputs": {...}}`."""


def stage_task(
    name: str, run_name: str
) -> Callable[[Callable[Parameters, Awaitable[State]]], Callable[Parameters, Awaitable[NodeRef]]]:
    """A Prefect task whose function answers the state it ends in; calling it answers the handle that the state carries.

    Prefect's own cache is off: it would answer for an actor that has been restarted since.
    """

    def decorate(function: Callable[Parameters, Awaitable[State]]) -> Callable[Parameters, Awaitable[NodeRef]]:
        wrapped: Any = task(name=name, task_run_name=run_name, cache_policy=NO_CACHE)(function)

        @wraps(function)
        async def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> NodeRef:
            state = await wrapped(*arguments, **keywords, return_state=True)
            return await state.aresult()

        return call

    return decorate


async def once(run: RunContext, inputs: Inputs, work: Work) -> State:
    """The handle of a stage's node, as the state of its task: `Reused` if it was there, else `Completed` after the work."""
    node = run.nodes.find(inputs.stage, inputs.digest)
    if node is not None:
        return Completed(name="Reused", message=f"node {node.digest[:12]} was there", data=handle(node, reused=True))
    run.progress.stage(str(inputs.stage))
    with Stopwatch(run, str(inputs.stage)) as watch:
        result = await work()
    outputs = {**result["outputs"], "seconds": watch.seconds}
    node = run.nodes.commit(inputs.node(files=tuple(result.get("files", ())), outputs=outputs))
    return Completed(message=f"node {node.digest[:12]} in {watch.seconds:.2f} s", data=handle(node, reused=False))


def handle(node: Node, *, reused: bool) -> NodeRef:
    """What crosses a task boundary: the node's name, and its figures."""
    small = {name: node.outputs[name] for name in SMALL if name in node.outputs}
    return NodeRef(stage=node.stage, digest=node.digest, reused=reused, outputs=small)
