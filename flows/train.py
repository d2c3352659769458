"""A run: begin, iterate, evaluate now and then, leave a summary and a report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.iteration import iteration
from flows.stopping import Preempted, Stopping
from rlpipe.config.load import home as default_home
from rlpipe.config.load import load_run
from rlpipe.config.run import RunConfig
from rlpipe.observe.progress import Progress
from rlpipe.preflight import check
from rlpipe.types import NodeRef
from tasks.begin import begin
from tasks.checkpoint import keep_if_held, keep_last
from tasks.context import close_context, context
from tasks.evaluate import evaluate
from tasks.observe import Observer


def run_name() -> str:
    """The flow run's name in Prefect: the run's own, else the recipe's."""
    parameters = flow_run.parameters
    return parameters.get("run") or Path(parameters["recipe"]).stem


@flow(name="train", flow_run_name=run_name)
async def train(recipe: str, overrides: Sequence[str] = (), run: str | None = None, takeover: bool = False) -> dict[str, Any]:
    """Train a recipe to its end, going on from what the store has of it. Answers the summary.

    `overrides` are `dotted.key=value`; `takeover` replaces the process that drives the run now, if any.
    Raises: ConfigError, DataError at once for bad input; Fenced if another process drives it; later what a stage raised.
    """
    config, home = load_run(recipe, overrides, run), default_home()
    check(config, home)
    with Stopping(config.resources.stop_grace_s) as stopping:
        if config.warm_start:
            await train(config.warm_start, warm_start_overrides(config), f"{config.run}.warm_start", takeover)
        return await drive(config, home, stopping, takeover=takeover)


async def drive(config: RunConfig, home: Path, stopping: Stopping, *, takeover: bool) -> dict[str, Any]:
    """Begin, iterate, report: a run from where it stands to its end."""
    with Progress(config.run, config.num_rollout) as progress:
        started = time.perf_counter()
        first = await begin(config, home, progress, takeover=takeover)
        completed = False
        try:
            if first:
                progress.say(f"{config.run}: going on from iteration {first} of {config.num_rollout}, the last one committed")
            progress.begin(first)
            with Observer(await context(config.run), first, startup_seconds=time.perf_counter() - started) as observer:
                try:
                    await run_iterations(config, first, observer, stopping)
                except Preempted:
                    await keep_if_held(config.run, within_s=config.resources.stop_grace_s)
                    raise
                await keep_last(config.run)
                summary = await observer.report()
            completed = True
        finally:
            close_context(config.run, end_actors=completed and config.resources.cluster is None)
    return summary


async def run_iterations(config: RunConfig, first: int, observer: Observer, stopping: Stopping) -> None:
    """Iterations from `first` to the end, evaluated where it is due. Raises: Preempted."""
    done = await evaluate_if_due(config, first, observer)
    for k in range(first, config.num_rollout):
        if done:
            return
        start = time.perf_counter()
        nodes: dict[str, NodeRef] = await stopping.unless_asked(iteration(config.run, k))
        await observer.iteration(k, nodes, seconds=time.perf_counter() - start)
        done = await evaluate_if_due(config, k + 1, observer)


async def evaluate_if_due(config: RunConfig, version: int, observer: Observer) -> bool:
    """Evaluate all held-out sets if this weight version asks for it; whether the run's stop condition is met."""
    if not evaluation_due(config, version):
        return False
    metrics: dict[str, float] = {}
    start = time.perf_counter()
    for dataset in config.evaluation.datasets:
        node = await evaluate(config.run, version, dataset.name)
        metrics |= node.outputs["metrics"]
    await observer.evaluation(version, metrics, seconds=time.perf_counter() - start)
    stop = config.stop_when
    return stop is not None and metrics.get(stop.metric, float("-inf")) >= stop.at_least


def evaluation_due(config: RunConfig, version: int) -> bool:
    """Before the first iteration, after every `eval_interval`, and after the last."""
    if not config.evaluation.datasets:
        return False
    if version == 0:
        return not config.evaluation.skip_eval_before_train
    interval = config.evaluation.eval_interval
    return version == config.num_rollout or (interval is not None and version % interval == 0)


def warm_start_overrides(config: RunConfig) -> list[str]:
    """What a warm start has in common with its run: seed, store, processes and engines."""
    resources = config.resources.model_copy(update={"cluster": config.cluster})
    shared = {"resources": resources.model_dump(), "engine": config.engine.model_dump(), "store": config.store.model_dump()}
    return [f"seed={config.seed}", *(f"{section}={json.dumps(values)}" for section, values in shared.items())]
