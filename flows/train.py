"""A run: begin, iterate, evaluate now and then, leave a summary and a report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prefect import flow
from prefect.runtime import flow_run

from flows.deployed import open_iterations
from flows.output import outlive_the_worker
from flows.parameters import Fork, Recipe, as_settled, name_of, named_at
from flows.stopping import Preempted, Stopping, being_cancelled, hear_sigterm, or_cancelled
from rlpipe.actors.ray.local_ray import connect
from rlpipe.actors.ray.named import namespace
from rlpipe.config.load import home as default_home
from rlpipe.config.load import load_run, unused_keys, warm_start_overrides
from rlpipe.config.run import RunConfig
from rlpipe.errors import RlpipeError
from rlpipe.observe.progress import Progress
from rlpipe.preflight import check, say_if_full
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tasks.begin import begin, check_same_run
from tasks.checkpoint import keep_if_held, keep_last
from tasks.configuration import configuration_artifact
from tasks.context import close_context, context
from tasks.debug import sample_only
from tasks.evaluate import evaluate
from tasks.observe import Observer
from tasks.turn import evaluated_beside, evaluation_due, good_enough

Result = TypeVar("Result")


def run_name() -> str:
    """The flow run's name in Prefect: the run's own, else the recipe's."""
    return name_of(flow_run.parameters, flow_run.scheduled_start_time)


@flow(
    name="train",
    flow_run_name=run_name,
    on_running=[hear_sigterm, outlive_the_worker],
    persist_result=False,
)
async def train(
    recipe: Recipe,
    overrides: Sequence[str] = (),
    run: str | None = None,
    takeover: bool = False,
    seed: int | None = None,
    fork: Fork | None = None,
    site: Sequence[str] = (),
) -> dict[str, Any]:
    """Train a recipe to its end, going on from what the store has of it. Answers the summary;
    `Cancelled` if it was cancelled.

    Raises: ConfigError, DataError at once for bad input; Fenced if another process drives it;
    Preempted; what a stage raised.

    Args: recipe: One that comes with the project, or the path of a YAML file. overrides: Settings
    over the recipe's, `dotted.key=value`, such as `train.optimizer.lr=2e-6`; later ones win. run:
    Its name; a run that is there goes on. Without: the recipe's. `%Y%m%d` in it is the day it was
    scheduled for (UTC). takeover: Replace the process that drives this run now, wherever it is.
    seed: Another seed of data and training, as a run of its own: `<recipe>-seed<N>` unless `run`
    names it. fork: `RUN@K`: go on from iteration K of that run (`RUN`: its newest), as a new run
    with these settings. site: Settings of the place where it runs, filled in by the deployment;
    `overrides` win.
    """
    overrides, run = as_settled(recipe, [*site, *overrides], run, seed=seed, fork=fork)
    config = load_run(recipe, overrides, named_at(run, flow_run.scheduled_start_time))
    home = default_home()
    await configuration_artifact(config, recipe, overrides, unused_keys(recipe, overrides))
    check(config, home)
    with Stopping(config.resources.stop_grace_s) as stopping:
        try:
            return await or_cancelled(warmed_up(config, home, stopping, takeover=takeover))
        except RlpipeError as error:
            say_if_full(error, home)
            raise


async def warmed_up(
    config: RunConfig, home: Path, stopping: Stopping, *, takeover: bool
) -> dict[str, Any]:
    """The run, after its warm start if it has one."""
    if config.warm_start:
        check_same_run(
            Branches(Files(config.store.root or home / "store")), config
        )  # before hours of another run
        connect(
            config.resources, home, namespace=namespace(config.cluster)
        )  # a Ray that has room for the run too
        await train(
            config.warm_start, warm_start_overrides(config), f"{config.run}.warm_start", takeover
        )
    return await drive(config, home, stopping, takeover=takeover)


async def drive(
    config: RunConfig, home: Path, stopping: Stopping, *, takeover: bool
) -> dict[str, Any]:
    """Begin, iterate, report: a run from where it stands to its end."""
    with Progress(config.run, config.num_rollout) as progress:
        started = time.perf_counter()
        first = await stopping.unless_asked(begin(config, home, progress, takeover=takeover))
        completed = cancelled = False
        try:
            if first:
                progress.say(
                    f"{config.run}: going on from iteration {first} of {config.num_rollout}, the last one committed"
                )
            progress.begin(first)
            with Observer(
                await context(config.run), first, startup_seconds=time.perf_counter() - started
            ) as observer:
                try:
                    await run_iterations(config, first, observer, stopping)
                except Preempted:
                    cancelled = await being_cancelled()
                    await keep_if_held(config.run, within_s=config.resources.stop_grace_s)
                    raise
                await keep_last(config.run)
                summary = await observer.report()
            completed = True
        finally:
            await close_context(
                config.run, end_actors=cancelled or (completed and config.resources.cluster is None)
            )
    return summary


async def run_iterations(
    config: RunConfig, first: int, observer: Observer, stopping: Stopping
) -> None:
    """Iterations from `first` to the end, evaluated where it is due; those ahead sample meanwhile.
    Raises: Preempted."""
    done = await stopping.unless_asked(evaluate_if_due(config, first, observer))
    if config.debug.debug_rollout_only:
        for k in range(config.num_rollout):
            await observer.sampled(k, await stopping.unless_asked(sample_only(config.run, k)))
        return
    async with open_iterations(config) as iterations:
        for k in range(first, config.num_rollout):
            if done:
                return
            start = time.perf_counter()
            work = iterations.finish(k)
            if k > first and evaluated_beside(config, k):
                work = together(work, evaluate_if_due(config, k, observer, beside=True))
            nodes = await stopping.unless_asked(work)
            await observer.iteration(k, nodes, seconds=time.perf_counter() - start)
            if config.async_buffer_size:
                await stopping.unless_asked(iterations.reach(k + 1))
            if not evaluated_beside(config, k + 1):
                done = await stopping.unless_asked(evaluate_if_due(config, k + 1, observer))


async def together(work: Coroutine[Any, Any, Result], other: Coroutine[Any, Any, Any]) -> Result:
    """The result of `work` once both are done. Raises: what either raises, at once; the other is
    cancelled then."""
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(other)
            working = tasks.create_task(work)
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from several
    return working.result()


async def evaluate_if_due(
    config: RunConfig, version: int, observer: Observer, *, beside: bool = False
) -> bool:
    """Evaluate all held-out sets if this weight version asks for it, `beside` an iteration or
    before; whether the run's stop condition is met."""
    if not evaluation_due(config, version):
        return False
    start = time.perf_counter()
    nodes = {
        dataset.name: await evaluate(config.run, version, dataset.name)
        for dataset in config.evaluation.datasets
    }
    metrics = {
        name: value for node in nodes.values() for name, value in node.outputs["metrics"].items()
    }
    (await context(config.run)).tell()
    await observer.evaluation(
        version, nodes, metrics, seconds=time.perf_counter() - start, beside=beside
    )
    return good_enough(config, metrics)
