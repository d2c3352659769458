"""Reprocess stored rollouts of a run: new rewards, filters and advantages on a new branch.

The flow compares old and new results. It samples nothing and starts no engine or trainer. With
`train`, a separate run trains from the result; it starts no engines either. A second call reuses
all nodes; a call after an interruption continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.derived_runs import Reprocessing, reprocessing, training_recipe
from flows.output import outlive_the_worker
from flows.stopping import result_or_cancelled
from flows.train import train as train_flow
from rlpipe.config.load import home as default_home
from rlpipe.lineage.continuation import check_same_run
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
from tasks.reprocess import compare_runs, opened
from tasks.reprocess import reprocess as reprocess_iteration


def run_name() -> str:
    """Return the name of the flow run in Prefect: the name of the new branch."""
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
    """Reprocess iterations of a run, then compare old and new.

    Returns old and new figures; with `train` also the summary of that run under `trained`, or the
    state `Cancelled`. Raises: ConfigError for wrong input; RewardError, DeadlineExceeded;
    ObjectMissing, ObjectCorrupt; as the train flow.

    Args:
        of: Required. Run with the stored rollouts. Example: `spell_backward`
        iterations: Optional, by default all stored ones. From A up to B without B, as `A:B`.
            Example: `0:20`
        run: Optional, by default `<of>.reprocessed`. Name of the new run. Example: `strict`
        overrides: Optional. Settings that differ, an item each: of the reward, of filters, of the
            advantage. Example: `advantage.advantage_estimator=rloo`
        train: Optional. Name of a run that trains from the result without sampling.
            Example: `strict-trained`
        train_overrides: Optional. Settings of that run only, an item each.
            Example: `train.optimizer.lr=2e-6`
        store: Optional, by default the store of the run. URL of the store.
            Example: `s3://bucket/runs`
        jobs: Optional. Iterations that are reprocessed at once. Example: `4`
    """
    home = default_home()
    branch = reprocessing(
        home, of=of, iterations=iterations, run=run, overrides=overrides, store=store
    )
    check_same_branch(branch)
    recipe = training_recipe(home, branch, train, train_overrides) if train else None
    config = branch.config
    files = branch.source.files
    with Progress(config.run, len(branch.iterations)) as progress:
        async with opened(of, config, files, home / config.run, progress):
            await asyncio.to_thread(begin_branch, branch)
            started_s = time.perf_counter()
            results = await reprocess_all(config.run, branch.iterations, jobs)
            seconds = time.perf_counter() - started_s
            notes = {
                result["iteration"]: result["without"] for result in results if result["without"]
            }
            figures = await compare_runs(config.run, branch.iterations, notes)
    reused = sum(result["reused"] for result in results)
    figures = {**figures, "reused": reused, "seconds": seconds}
    if recipe is None:
        return figures
    return await result_or_cancelled(train_from_result(figures, str(recipe), train))


def check_same_branch(branch: Reprocessing) -> None:
    """Refuse an existing branch that was started with another configuration.

    The length of the branch may differ: it grows with the source and decides no result here.
    Raises: ConfigError naming each key that differs.
    """
    branches = Branches(branch.source.files)
    if existing := branches.find(branch.config.run):
        length = {"num_rollout": existing.config["num_rollout"]}
        check_same_run(branches, branch.config.model_copy(update=length))


def begin_branch(branch: Reprocessing) -> None:
    """Create the branch, or find it with the same commit and weights. Raises: ObjectConflict."""
    branches = Branches(branch.source.files)
    existing = branches.find(branch.config.run)
    config = existing.config if existing else branch.config.model_dump(mode="json")
    branches.create(branch.config.run, config, branch.init, branch.parent)


async def train_from_result(
    figures: dict[str, Any], recipe: str, run: str | None
) -> dict[str, Any]:
    """Return the figures, with the summary of the run that trains from the result."""
    return {**figures, "trained": await train_flow(recipe, (), run)}


async def reprocess_all(run: str, iterations: Sequence[int], jobs: int) -> list[dict[str, Any]]:
    """Reprocess iterations, `jobs` at once; return results in order. Raises: the first error."""
    limit = asyncio.Semaphore(max(1, jobs))

    async def one(k: int) -> dict[str, Any]:
        async with limit:
            return await reprocess_iteration(run, k)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(k)) for k in iterations]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from several
    return [task.result() for task in tasks]
