"""Reprocess the stored rollouts of a run: new rewards, filters and advantages under a new branch, compared with the old ones.

Nothing is sampled and no engine or trainer is started, unless a run shall be trained from the result; that is a run of its own,
which starts no engines either. Doing it again reuses everything; after an interruption it goes on.

Not here: configurations (`reprocessing`), what is done to an iteration (`rlpipe.reprocess`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.output import outlive_the_worker
from flows.reprocessing import reprocessing, training
from flows.train import train as train_flow
from rlpipe.config.load import home as default_home
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
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
    """Old and new figures; with `train` also that run's summary, under `trained`.

    `of`: the run whose rollouts; `iterations`: `A:B` (default: all); `run`: the new branch (default: `OF.reprocessed`);
    `overrides`: what shall be different, `dotted.key=value`, such as `reward.function={type: math}`,
    `rollout.dynamic_sampling_filter_path=…`, `advantage.advantage_estimator=rloo`. `train`: name of a run that trains from the
    result, with `train_overrides`. `store`: URL (default: that of `of`). `jobs`: iterations under way at once.
    Raises: ConfigError at once for bad input; RewardError, DeadlineExceeded; ObjectMissing, ObjectCorrupt; as the train flow.
    """
    home = default_home()
    asked = reprocessing(home, of=of, iterations=iterations, run=run, overrides=overrides, store=store)
    recipe = training(home, asked, train, train_overrides) if train else None
    config, files = asked.config, asked.source.files
    with Progress(config.run, len(asked.iterations)) as progress:
        async with opened(of, config, files, home / config.run, progress):
            branches = Branches(files)
            await asyncio.to_thread(branches.create, config.run, config.model_dump(mode="json"), asked.init, asked.parent)
            made = await all_of(config.run, asked.iterations, jobs)
            notes = {one["iteration"]: one["without"] for one in made if one["without"]}
            said = await put_side_by_side(config.run, asked.iterations, notes)
    said = {**said, "reused": sum(one["reused"] for one in made)}
    return {**said, "trained": await train_flow(str(recipe), (), train)} if recipe else said


async def all_of(run: str, iterations: Sequence[int], jobs: int) -> list[dict[str, Any]]:
    """Every iteration, so many at once, in order. Raises: what the first that fails raises, once those under way are over."""
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
