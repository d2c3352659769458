"""Train a recipe: begin, run iterations, evaluate when due, write a summary and a report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prefect import flow
from prefect.runtime import flow_run

from flows.deployed_iterations import open_iterations
from flows.output import outlive_the_worker
from flows.parameters import Fork, Recipe, apply_seed_and_fork, format_run_name, run_name_of
from flows.stopping import (
    Preempted,
    Stopping,
    handle_sigterm,
    result_or_cancelled,
)
from rlpipe.actors.ray.local_ray import connect
from rlpipe.actors.ray.named import namespace
from rlpipe.config.load import home as default_home
from rlpipe.config.load import (
    load_run,
    require_files,
    unused_keys,
    validate_stored,
    warm_start_overrides,
)
from rlpipe.config.run import RunConfig
from rlpipe.data.hub_commits import as_recorded
from rlpipe.errors import RlpipeError
from rlpipe.lineage.continuation import changed_settings, check_same_run
from rlpipe.observe.progress import Progress
from rlpipe.observe.terminal import waiting_for
from rlpipe.preflight import check, note_full_disk
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from tasks.artifacts import configuration_artifact
from tasks.begin import begin, start_run
from tasks.cancellation import is_being_cancelled
from tasks.checkpoint import keep_if_held, keep_last
from tasks.context import close_context, context
from tasks.debug import sample_only
from tasks.evaluate import evaluate
from tasks.observe import Observer
from tasks.ordering import evaluates_concurrently, evaluation_due

Result = TypeVar("Result")


def run_name() -> str:
    """Return the name of the flow run in Prefect: the run's name, else the recipe's."""
    return run_name_of(flow_run.parameters, flow_run.scheduled_start_time)


@flow(
    name="train",
    flow_run_name=run_name,
    on_running=[handle_sigterm, outlive_the_worker],
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
    """Train a recipe to its end, from the newest commit in the store.

    Returns the summary, or the state `Cancelled`.
    Raises: ConfigError, DataError for wrong input; Fenced if another process drives the run;
    Preempted; errors of a stage.

    The parameter `recipe` is described by its type, `Recipe`.

    Args:
        overrides: Optional. Settings that differ from the recipe's, an item each. Later ones win.
            Example: `train.optimizer.lr=2e-6`
        run: Optional, by default the name of the recipe. Name of the run. An existing run
            continues. `%Y%m%d` in the name is the scheduled day (UTC). Example: `nightly-%Y%m%d`
        takeover: Optional, by default off. Replace the process that drives this run now, on any
            machine. Example: on, after the machine of that process was lost.
        seed: Optional, by default the recipe's seed. Seed of data and training, for a separate run
            that is called `<recipe>-seed<N>` unless `run` gives a name. Example: `1`
        fork: Optional. Start from an iteration of another run, as a new run with these settings.
            Without an iteration: the newest. Example: `spell_backward@99`
        site: Optional, filled in by the deployment. Settings of the site. `overrides` win.
            Example: `store.root=s3://bucket/runs`
    """
    overrides, run = apply_seed_and_fork(recipe, [*site, *overrides], run, seed=seed, fork=fork)
    home = default_home()
    run = format_run_name(run, flow_run.scheduled_start_time)
    config = as_recorded(load_run(recipe, overrides, run), home)
    # Before the checks: the artifact shows a configuration that they refuse.
    await configuration_artifact(config, recipe, overrides, unused_keys(recipe, overrides))
    require_files(recipe, overrides)
    with waiting_for("checks before the start"):
        check(config, home)
    with Stopping(config.resources.stop_grace_s) as stopping:
        try:
            return await result_or_cancelled(
                run_with_warm_start(config, home, stopping, takeover=takeover)
            )
        except RlpipeError as error:
            note_full_disk(error, home)
            raise


async def run_with_warm_start(
    config: RunConfig, home: Path, stopping: Stopping, *, takeover: bool
) -> dict[str, Any]:
    """Train the warm start, if the run has one, then drive the run."""
    if config.warm_start:
        # Refuse a changed configuration before the warm start trains for hours.
        check_same_run(Branches(Files(config.store.root or home / "store")), config)
        # Start a Ray with the resources of this run: the warm start alone may need fewer.
        connect(config.resources, home, namespace=namespace(config.cluster))
        await train(
            config.warm_start, warm_start_overrides(config), f"{config.run}.warm_start", takeover
        )
    return await drive(config, home, stopping, takeover=takeover)


async def drive(
    config: RunConfig, home: Path, stopping: Stopping, *, takeover: bool
) -> dict[str, Any]:
    """Begin a run, run its remaining iterations, report; return the summary."""
    may_end_early = config.stop_when is not None
    with Progress(config.run, config.num_rollout, may_end_early=may_end_early) as progress:
        started = time.perf_counter()
        origin = await stopping.run(start_run(config, home, progress, takeover=takeover))
        completed = cancelled = False
        try:
            first = await stopping.run(begin(config.run, origin))
            if first:
                progress.say(f"{config.run}: {_done_before(config, home, first)}")
            progress.begin(first)
            with Observer(
                await context(config.run), first, startup_seconds=time.perf_counter() - started
            ) as observer:
                try:
                    await run_iterations(config, first, observer, stopping)
                except Preempted:
                    cancelled = await is_being_cancelled()
                    # Saves a replay at the next start. Without it nothing is lost.
                    await keep_if_held(config.run, within_s=config.resources.stop_grace_s)
                    raise
                await keep_last(config.run)
                await observer.samples_page()
                summary = await observer.report()
                await observer.say_reward_errors()
            completed = True
        finally:
            await close_context(
                # A preempted or failed run keeps its actors: the same command finds their state.
                config.run,
                end_actors=cancelled or (completed and config.resources.cluster is None),
            )
    return summary


def _done_before(config: RunConfig, home: Path, first: int) -> str:
    """Return what a run that starts with iteration `first` finds, as text."""
    done = f"{first} of {config.num_rollout} iterations are done"
    if first >= config.num_rollout:
        done = f"{first} iterations are done, and {config.num_rollout} are wanted"
    fork = config.fork_from
    if fork is not None and fork.iteration == first - 1:
        stored = Branches(Files(config.store.root or home / "store")).config(fork.branch)
        parent = validate_stored(stored).model_dump(mode="json")
        changed = changed_settings(parent, config.model_dump(mode="json"))
        settings = "".join(f"; {key}: {change}" for key, change in changed.items())
        done = f"a fork of {fork.branch}@{fork.iteration}, where {done}{settings}"
    elif first < config.num_rollout:
        return f"continues; {done}"
    return done if first < config.num_rollout else f"{done}; a larger num_rollout trains more"


async def run_iterations(
    config: RunConfig, first: int, observer: Observer, stopping: Stopping
) -> None:
    """Run iterations from `first` to the end, and evaluate when due. Raises: Preempted.

    Iterations ahead of the current one sample meanwhile (`async_buffer_size`).
    """
    stop = await stopping.run(evaluate_if_due(config, first, observer))
    if config.debug.debug_rollout_only:
        for k in range(config.num_rollout):
            await observer.rollout(k, await stopping.run(sample_only(config.run, k)))
        return
    ctx = await context(config.run)
    async with open_iterations(config) as iterations:
        for k in range(first, config.num_rollout):
            if stop:
                return
            start = time.perf_counter()
            work = iterations.finish(k)
            # The weights of `first` were evaluated before the loop.
            if k > first and evaluates_concurrently(ctx, k):
                work = run_both(work, evaluate_if_due(config, k, observer, concurrent=True))
            nodes = await stopping.run(work)
            await observer.iteration(k, nodes, seconds=time.perf_counter() - start)
            # Open the next iteration now, so that it samples during a blocking evaluation.
            if config.async_buffer_size:
                await stopping.run(iterations.reach(k + 1))
            if not evaluates_concurrently(ctx, k + 1):
                stop = await stopping.run(evaluate_if_due(config, k + 1, observer))


async def run_both(work: Coroutine[Any, Any, Result], other: Coroutine[Any, Any, Any]) -> Result:
    """Run two coroutines; return the result of `work` once both are done.

    The first error is raised at once and cancels the other coroutine.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(other)
            working = tasks.create_task(work)
    except BaseExceptionGroup as several:
        # Callers know the errors of stages, not exception groups.
        raise several.exceptions[0] from several
    return working.result()


async def evaluate_if_due(
    config: RunConfig, version: int, observer: Observer, *, concurrent: bool = False
) -> bool:
    """Evaluate all held-out sets if an evaluation of this weight version is due.

    Returns True if the stop condition of the run is met. `concurrent`: an iteration runs meanwhile.
    """
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
    # Wake iterations that wait for this evaluation.
    (await context(config.run)).notify()
    await observer.evaluation(
        version, nodes, metrics, seconds=time.perf_counter() - start, concurrent=concurrent
    )
    stop = config.stop_when
    if stop is None or not stop.is_met(metrics):
        return False
    (await context(config.run)).progress.say(
        f"{config.run}: ends after {version} iterations, because stop_when is met: "
        f"{stop.metric} is {metrics[stop.metric]:.3f}, at least {stop.at_least:g}"
    )
    return True
