"""Reprocess the stored rollouts of a run: new rewards, filters and advantages under a new branch,
compared with the old ones.

Nothing is sampled and no engine or trainer is started, unless a run shall be trained from the
result; that is a run of its own, which starts no engines either. Doing it again reuses everything;
after an interruption it goes on.

Not here: configurations (`reprocessing`), what is done to an iteration (`rlpipe.reprocess.branch`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.output import outlive_the_worker
from flows.reprocessing import Reprocessing, reprocessing, training
from flows.stopping import or_cancelled
from flows.train import train as train_flow
from rlpipe.config.load import home as default_home
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
from tasks.begin import check_same_run
from tasks.reprocess import opened, put_side_by_side
from tasks.reprocess import reprocess as reprocess_iteration


def run_name() -> str:
    """The flow run's name in Prefect: the new branch's."""
    parameters = flow_run.parameters
    return parameters.get("run") or f"{parameters['of']}.reprocessed"


@flow(name="reprocess", flow_run_name=run_name, on_running=[outlive_the_worker])
async def reprocess(
    of: str,
    iterations: str | None = None,
    run: str | None = None,
    overrides: Sequence[str] = (),
    train: str | None = None,
    train_overrides: Sequence[str] = (),
    store: str | None = None,
    jobs: int = 2,
) -> dict[str, Any]:
    """Old and new figures; with `train` also that run's summary, under `trained`, or `Cancelled` if
    it was.

    Raises: ConfigError at once for bad input; RewardError, DeadlineExceeded; ObjectMissing,
    ObjectCorrupt; as the train flow.

    Args: of: The run whose stored rollouts are reprocessed. iterations: `A:B`, from A up to B
    without B; without: all that are stored. run: Name of the new branch; without `OF.reprocessed`.
    overrides: What shall be different, `dotted.key=value`, such as `reward.function={type: math}`,
    `rollout.dynamic_sampling_filter_path=mine.py:keep`, `advantage.advantage_estimator=rloo`.
    train: Name of a run that is trained from the result without sampling; without: none is.
    train_overrides: Settings of that run alone. store: URL of the store; without that of the run.
    jobs: Iterations under way at once.
    """
    home = default_home()
    asked = reprocessing(
        home, of=of, iterations=iterations, run=run, overrides=overrides, store=store
    )
    check_same_branch(asked)
    recipe = training(home, asked, train, train_overrides) if train else None
    config = asked.config
    files = asked.source.files
    with Progress(config.run, len(asked.iterations)) as progress:
        async with opened(of, config, files, home / config.run, progress):
            await asyncio.to_thread(begin_branch, asked)
            started_s = time.perf_counter()
            made = await all_of(config.run, asked.iterations, jobs)
            seconds = time.perf_counter() - started_s
            notes = {one["iteration"]: one["without"] for one in made if one["without"]}
            said = await put_side_by_side(config.run, asked.iterations, notes)
    said = {**said, "reused": sum(one["reused"] for one in made), "seconds": seconds}
    return await or_cancelled(and_trained(said, str(recipe), train)) if recipe else said


def check_same_branch(asked: Reprocessing) -> None:
    """A branch that is there goes on only with the configuration it was started with, as a run
    does; but its length, which grows with the source, decides nothing where nothing is trained.
    Raises: ConfigError naming each key that differs."""
    branches = Branches(asked.source.files)
    if found := branches.find(asked.config.run):
        check_same_run(
            branches, asked.config.model_copy(update={"num_rollout": found.config["num_rollout"]})
        )


def begin_branch(asked: Reprocessing) -> None:
    """Start the branch, or find it started from the same commit and weights. Raises:
    ObjectConflict."""
    branches = Branches(asked.source.files)
    found = branches.find(asked.config.run)
    config = found.config if found else asked.config.model_dump(mode="json")
    branches.create(asked.config.run, config, asked.init, asked.parent)


async def and_trained(said: dict[str, Any], recipe: str, run: str | None) -> dict[str, Any]:
    """The old and new figures, and the summary of the run that is trained from the result."""
    return {**said, "trained": await train_flow(recipe, (), run)}


async def all_of(run: str, iterations: Sequence[int], jobs: int) -> list[dict[str, Any]]:
    """Every iteration, so many at once, in order. Raises: what the first that fails raises, once
    those under way are over."""
    room = asyncio.Semaphore(max(1, jobs))

    async def one(k: int) -> dict[str, Any]:
        async with room:
            return await reprocess_iteration(run, k)

    try:
        async with asyncio.TaskGroup() as group:
            under_way = [group.create_task(one(k)) for k in iterations]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from several
    return [task.result() for task in under_way]
