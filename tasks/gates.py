"""The gates of an iteration's figures: within their bounds nothing happens, else its flow run
pauses until somebody resumes it.

Who resumed it is not known, but that it was, and why it had stopped, is in the store
(`gates/<run>/<iteration>-<weights>.json`): a retry does not ask again.

Not here: the bounds (`rlpipe.config.gates`), the gates that are about whose turn it is (`turn`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from itertools import product
from uuid import UUID, uuid4

from prefect import get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import apause_flow_run
from prefect.runtime import flow_run

from rlpipe.config.gates import Gate
from rlpipe.errors import ConfigError, GateClosed, ObjectConflict
from rlpipe.lineage.history import iteration_metrics
from rlpipe.lineage.stage_inputs import eval_inputs
from rlpipe.store.notes import OpenedGate, gate_path
from rlpipe.store.records import seal
from rlpipe.types import NodeRef, Stage
from tasks.context import RunContext, context
from tasks.observe import artifact_key
from tasks.turn import evaluation_due

WHY = "rlpipe.waits"
"""Label of a flow run that is paused: why."""


async def gates(run: str, k: int, nodes: Mapping[str, NodeRef]) -> None:
    """Return once the figures of these stages are within all bounds, or somebody says that
    iteration k shall go on with them.

    Raises: GateClosed if nobody does in time; ConfigError for a gate on a metric that is not there.
    """
    it = await context(run)
    passed = gate_path(run, k, nodes["train"].digest)
    if not it.config.gates.bounds or it.files.exists(passed):
        return
    wrong = await look(run, k, dict(nodes))
    if wrong:
        await _ask(it, k, wrong, passed)


@task(name="gates", task_run_name="gates-{k}", cache_policy=NO_CACHE)
async def look(run: str, k: int, nodes: dict[str, NodeRef]) -> list[str]:
    """What is out of bounds of an iteration's figures and of the evaluation of the weights it began
    with, in words."""
    it = await context(run)
    return await asyncio.to_thread(broken, it, k, nodes)


def broken(it: RunContext, k: int, nodes: Mapping[str, NodeRef]) -> list[str]:
    """As `look`. Raises: ConfigError for a gate on a metric that is not there."""
    found = iteration_metrics(
        {
            Stage(name): it.nodes.get(Stage(name), node.digest).outputs
            for name, node in nodes.items()
        }
    )
    wrong = []
    for gate in it.config.gates.bounds:
        if gate.metric.startswith("eval/"):
            wrong.append(_of_evaluations(it, k, gate))
        elif gate.metric in found:
            wrong.append(gate.broken_by(found[gate.metric]))
        elif not _critic_only(it, nodes):
            nearest = "".join(f"{name}; or " for name in get_close_matches(gate.metric, found, n=1))
            raise ConfigError(
                "nothing measures this",
                where="gates.bounds",
                found=gate.metric,
                expected=f"{nearest}one of {', '.join(sorted(found))}",
                do="the same command with another name goes on from here",
            )
    return [said for said in wrong if said]


def _critic_only(it: RunContext, nodes: Mapping[str, NodeRef]) -> bool:
    """An iteration that warms a critic up has not all figures."""
    batch = nodes.get(Stage.ADVANTAGE)
    return batch is not None and bool(
        it.nodes.get(Stage.ADVANTAGE, batch.digest).outputs.get("critic_only")
    )


def _of_evaluations(it: RunContext, k: int, gate: Gate) -> str | None:
    """Of the weights after k iterations, against those of all versions before: of a fork, from
    those that it began with."""
    now = _evaluated(it, k, gate.metric)
    if now is None:
        return None
    versions = range(it.first, k) if gate.falls_by is not None else ()
    before = [
        value for version in versions if (value := _evaluated(it, version, gate.metric)) is not None
    ]
    return gate.broken_by(now, max(before, default=None))


def _evaluated(it: RunContext, version: int, metric: str) -> float | None:
    """None if these weights were not evaluated, or not for this."""
    if not evaluation_due(it.config, version):
        return None
    weights = dict.fromkeys((it.weights_before(version), it.recorded_before(version)))
    for dataset, digest in product(it.config.evaluation.datasets, weights):
        node = it.nodes.find(
            Stage.EVAL, eval_inputs(it.config, dataset, digest, it.contracts).digest
        )
        if node is not None and metric in node.outputs.get("metrics", {}):
            return node.outputs["metrics"][metric]
    return None


async def _ask(it: RunContext, k: int, wrong: list[str], passed: str) -> None:
    run = it.config.run
    asked_s = time.time()
    why = "\n".join(f"- {one}" for one in wrong)
    about = f"# {run}: iteration {k} waits\n\n{why}\n\nIts weights have not reached the engines. Resume or cancel its flow run."
    await acreate_markdown_artifact(
        about, key=artifact_key(run, "gate"), description=f"iteration {k}: {wrong[0]}"
    )
    it.progress.say(f"{run}: iteration {k} is paused: {'; '.join(wrong)}")
    it.progress.say(
        f"{run}: to go on: Resume in Prefect's pages, or prefect flow-run resume {flow_run.id}"
    )
    await tell_why("; ".join(wrong))
    if not await resumed(it.config.gates.timeout_s, it.config.gates.poll_s):
        raise GateClosed(
            "the iteration's figures are out of bounds, and nobody lets it go on",
            where=f"{run}, iteration {k}",
            found="; ".join(wrong),
            expected=f"its flow run resumed within {it.config.gates.timeout_s:g} s (gates.timeout_s)",
            do="the same command asks again; change gates.bounds, or fork from an earlier commit",
        )
    record = OpenedGate(iteration=k, broken=tuple(wrong), asked=asked_s, resumed=time.time())
    with suppress(ObjectConflict):
        await asyncio.to_thread(it.files.create, passed, seal(record, passed))


async def tell_why(why: str) -> None:
    """To who looks at the flow run's logs, and to an alert: the state Paused has no message of its
    own."""
    get_run_logger().warning("waits, its weights have not reached the engines: %s", why)
    async with get_client() as client:
        await client.update_flow_run_labels(UUID(flow_run.id), {WHY: why})


async def resumed(timeout_s: float, poll_s: float) -> bool:
    """Pause this flow run, and wait until somebody resumes it; False if it is cancelled, or nobody
    does in time."""
    pause = asyncio.create_task(
        apause_flow_run(
            timeout=math.ceil(timeout_s), poll_interval=math.ceil(poll_s), key=uuid4().hex
        )
    )
    try:
        async with get_client() as client:
            while not (await asyncio.wait({pause}, timeout=poll_s))[0]:
                state = (await client.read_flow_run(UUID(flow_run.id))).state
                if state is not None and (state.is_final() or state.is_cancelling()):
                    return False
        await pause
    except FlowPauseTimeout:
        return False
    finally:
        pause.cancel()
    return True
