"""Pause an iteration whose metrics are out of bounds until a person resumes its flow run.

`rlpipe.config.observe` defines the bounds. An opened gate is recorded in the store, with the reason
(`gates/<run>/<iteration>-<weights>.json`), so a retry does not pause again. Prefect does not tell
which person resumed.
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

from rlpipe.config.observe import Gate
from rlpipe.errors import ConfigError, GateClosed, ObjectConflict
from rlpipe.lineage.history import iteration_metrics
from rlpipe.lineage.stage_inputs import eval_inputs
from rlpipe.store.notes import OpenedGate, gate_path
from rlpipe.store.records import seal
from rlpipe.types import NodeRef, Stage
from tasks.artifacts import artifact_key
from tasks.context import RunContext, context
from tasks.ordering import evaluation_due

REASON_LABEL = "rlpipe.waits"
"""Label of a paused flow run with the reason."""


async def gates(run: str, k: int, nodes: Mapping[str, NodeRef]) -> None:
    """Return once all metrics are within bounds, or a person resumes iteration k.

    Raises: GateClosed after `gates.timeout_s`; ConfigError for a gate on a metric that does not
    exist.
    """
    ctx = await context(run)
    opened = gate_path(run, k, nodes["train"].digest)
    # A retry after Resume passes without a second pause.
    if not ctx.config.gates.bounds or ctx.files.exists(opened):
        return
    broken = await check_metrics(run, k, dict(nodes))
    if broken:
        await _pause(ctx, k, broken, opened)


@task(name="gates", task_run_name="gates-{k}", cache_policy=NO_CACHE)
async def check_metrics(run: str, k: int, nodes: dict[str, NodeRef]) -> list[str]:
    """Return descriptions of the bounds that iteration k breaks, as a Prefect task."""
    ctx = await context(run)
    return await asyncio.to_thread(broken_bounds, ctx, k, nodes)


def broken_bounds(ctx: RunContext, k: int, nodes: Mapping[str, NodeRef]) -> list[str]:
    """Return descriptions of broken bounds.

    Metrics come from the iteration and from the evaluation of its initial weights.

    Raises: ConfigError for a gate on a metric that does not exist.
    """
    metrics = iteration_metrics(
        {
            Stage(name): ctx.nodes.get(Stage(name), node.digest).outputs
            for name, node in nodes.items()
        }
    )
    broken = []
    for gate in ctx.config.gates.bounds:
        if gate.metric.startswith("eval/"):
            broken.append(_check_evaluations(ctx, k, gate))
        elif gate.metric in metrics:
            broken.append(gate.violation(metrics[gate.metric]))
        elif not _critic_only(ctx, nodes):
            nearest = "".join(
                f"{name}; or " for name in get_close_matches(gate.metric, metrics, n=1)
            )
            raise ConfigError(
                "a gate names a metric that does not exist",
                where="gates.bounds",
                found=gate.metric,
                expected=f"{nearest}one of {', '.join(sorted(metrics))}",
                do="correct the name; the same command continues from here",
            )
    return [description for description in broken if description]


def _critic_only(ctx: RunContext, nodes: Mapping[str, NodeRef]) -> bool:
    """True for an iteration that only warms up the critic. It has no policy metrics."""
    batch = nodes.get(Stage.ADVANTAGE)
    return batch is not None and bool(
        ctx.nodes.get(Stage.ADVANTAGE, batch.digest).outputs.get("critic_only")
    )


def _check_evaluations(ctx: RunContext, k: int, gate: Gate) -> str | None:
    """Compare the evaluation after k iterations with all earlier ones on the branch.

    Of a fork, the earliest is the evaluation of its first weights.
    """
    now = _evaluation_metric(ctx, k, gate.metric)
    if now is None:
        return None
    versions = range(ctx.first_iteration, k) if gate.falls_by is not None else ()
    before = [
        value
        for version in versions
        if (value := _evaluation_metric(ctx, version, gate.metric)) is not None
    ]
    return gate.violation(now, max(before, default=None))


def _evaluation_metric(ctx: RunContext, version: int, metric: str) -> float | None:
    """Return a metric of the evaluation of a version, or None if it was not evaluated."""
    if not evaluation_due(ctx.config, version):
        return None
    # A segment may have replaced the evaluated weights; both count.
    weights = dict.fromkeys((ctx.weights_before(version), ctx.recorded_before(version)))
    for dataset, digest in product(ctx.config.evaluation.datasets, weights):
        node = ctx.nodes.find(
            Stage.EVAL, eval_inputs(ctx.config, dataset, digest, ctx.contracts).digest
        )
        if node is not None and metric in node.outputs.get("metrics", {}):
            return node.outputs["metrics"][metric]
    return None


async def _pause(ctx: RunContext, k: int, broken: list[str], opened: str) -> None:
    run = ctx.config.run
    paused_s = time.time()
    bullets = "\n".join(f"- {description}" for description in broken)
    reason = "; ".join(broken)
    await acreate_markdown_artifact(
        f"# {run}: iteration {k} is paused\n\n{bullets}\n\n"
        "Its weights were not pushed to the engines. Resume or cancel its flow run.",
        key=artifact_key(run, "gate"),
        description=f"iteration {k}: {broken[0]}",
    )
    ctx.progress.say(f"{run}: iteration {k} is paused: {reason}")
    ctx.progress.say(
        f"{run}: to continue, press Resume in Prefect's UI, "
        f"or run: prefect flow-run resume {flow_run.id}"
    )
    await report_reason(reason)
    if not await wait_for_resume(ctx.config.gates.timeout_s, ctx.config.gates.poll_s):
        raise GateClosed(
            "metrics of the iteration are out of bounds, and its flow run was not resumed",
            where=f"{run}, iteration {k}",
            found=reason,
            expected=f"Resume within {ctx.config.gates.timeout_s:g} s (gates.timeout_s)",
            do="the same command pauses again; change gates.bounds, or fork from an earlier commit",
        )
    record = OpenedGate(iteration=k, broken=tuple(broken), asked=paused_s, resumed=time.time())
    with suppress(ObjectConflict):  # Another attempt recorded the same gate.
        await asyncio.to_thread(ctx.files.create, opened, seal(record, opened))


async def report_reason(reason: str) -> None:
    """Write the reason to the log and to a label of the flow run.

    Alerts read the label: the state Paused has no message.
    """
    get_run_logger().warning("paused before the push of its weights: %s", reason)
    async with get_client() as client:
        await client.update_flow_run_labels(UUID(flow_run.id), {REASON_LABEL: reason})


async def wait_for_resume(timeout_s: float, poll_s: float) -> bool:
    """Pause this flow run. True once it is resumed; False on a Cancel or after `timeout_s`."""
    pause = asyncio.create_task(
        apause_flow_run(
            # A fresh key: Prefect would not pause twice under one key in a flow run.
            timeout=math.ceil(timeout_s),
            poll_interval=math.ceil(poll_s),
            key=uuid4().hex,
        )
    )
    try:
        async with get_client() as client:
            # Prefect's pause does not notice a Cancel, so this loop checks the state.
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
