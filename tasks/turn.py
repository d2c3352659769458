"""Whose turn it is: the three gates of an iteration, and the driver's look at what is committed.

With S = async_buffer_size, S + 1 iterations are in flight. Iteration k may sample once a weight
version of at least k - S has been pushed, which is when the iteration that pushed it is committed,
use the trainer once k - 1 is committed, and give engines its weights once those before are
evaluated, if they are to be. All are conditions on the store: they hold across processes and
survive any of them. There are no locks.

Not here: in what order iterations are opened (`flows.train`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from rlpipe.config.data import EvalDataset
from rlpipe.config.run import RunConfig
from rlpipe.errors import DeadlineExceeded, RlpipeError
from rlpipe.lineage.stage_inputs import eval_inputs
from rlpipe.store.branches import commit_name
from rlpipe.types import Node, Stage
from tasks.context import RunContext, context

FIRST_LOOK_S = 0.05
LAST_LOOK_S = 1.0
ABANDON_TIMEOUT_S = 10.0


async def turn_to_sample(run: str, k: int) -> None:
    """Wait until the weights that iteration k may sample from are committed. Raises: as
    `turn_to_train`."""
    it = await context(run)
    before = sampled_after(k, it.config.async_buffer_size, it.config.sync.update_weights_interval)
    await until(it, lambda: is_committed(it, before), k, f"the commit of iteration {before}")


async def turn_to_train(run: str, k: int) -> None:
    """Wait until iteration k - 1 is committed, and what must be known of its weights first is
    measured, and not yet good enough.

    A run that is good enough (`stop_when`) ends its open iterations here.

    Raises: DeadlineExceeded after `orchestration.timeout_s`; Fenced if another driver has the
    branch.
    """
    it = await context(run)
    await until(it, lambda: is_committed(it, k - 1), k, f"the commit of iteration {k - 1}")
    if not evaluated_beside(it.config, k):
        await until_measured(it, k)


async def turn_to_push(run: str, k: int) -> None:
    """Wait until the weights that iteration k began with are evaluated, if they are to be: engines
    hold them until then.

    Raises: as `turn_to_train`.
    """
    await until_measured(await context(run), k)


async def until_measured(it: RunContext, k: int) -> None:
    """Wait for a due evaluation of the weights after k iterations, while there is a process that
    does it."""
    if (
        it.driven
        and evaluation_due(it.config, k)
        and not await asyncio.to_thread(is_measured, it, k)
    ):
        it.progress.stage("eval", note=f"weights {k} are being evaluated")
        await until(
            it,
            lambda: is_measured(it, k),
            k,
            f"an evaluation after {k} iterations that asks for more",
        )


def sampled_after(k: int, buffer_size: int, interval: int) -> int:
    """The iteration whose commit says that engines hold weights which iteration k may sample from;
    negative: the first ones do.

    Pushed are the versions that `interval` divides. As buffer_size ≥ interval - 1, it is never k or
    a later one.
    """
    return -(-(k - buffer_size) // interval) * interval - 1


async def until(it: RunContext, reached: Callable[[], bool], k: int, waited_for: str) -> None:
    """Wait for what the store has to say: looked at when this process commits something, and in
    growing intervals.

    Raises: DeadlineExceeded, Fenced, StoreError.
    """
    deadline_s = time.monotonic() + it.config.orchestration.timeout_s
    pause_s = FIRST_LOOK_S
    while True:
        news = it.news
        if await asyncio.to_thread(reached):
            return
        await asyncio.to_thread(it.epoch.check_driver)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(
                "an iteration's turn did not come in time",
                where=f"{it.config.run}, iteration {k}",
                found=f"not there: {waited_for}",
                expected=f"within {it.config.orchestration.timeout_s:g} s (orchestration.timeout_s)",
                do="see why the iterations before did not finish; the same command goes on from the last one committed",
            )
        with suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), min(pause_s, left_s))
        pause_s = min(2 * pause_s, LAST_LOOK_S)


def is_committed(it: RunContext, k: int) -> bool:
    """Is iteration k in the store? What comes before the branch's first one always is."""
    return k < it.first or it.files.exists(f"branches/{commit_name(it.config.run, k)}.json")


def is_measured(it: RunContext, version: int) -> bool:
    """Is every held-out set scored with the weights after `version` iterations, and shall the run
    go on?

    Weights that had to be rebuilt since, and came out different, need not be scored again.
    """
    of_version = {it.recorded_before(version), it.weights_before(version)}
    found = [_measurement(it, dataset, of_version) for dataset in it.config.evaluation.datasets]
    metrics = {
        name: value for node in found if node for name, value in node.outputs["metrics"].items()
    }
    return all(found) and not good_enough(it.config, metrics)


def _measurement(it: RunContext, dataset: EvalDataset, any_of: Iterable[str]) -> Node | None:
    digests = [eval_inputs(it.config, dataset, weights, it.contracts).digest for weights in any_of]
    return next((node for digest in digests if (node := it.nodes.find(Stage.EVAL, digest))), None)


def good_enough(config: RunConfig, metrics: Mapping[str, float]) -> bool:
    """Has an evaluation reached what `stop_when` asks for?"""
    stop = config.stop_when
    return stop is not None and metrics.get(stop.metric, float("-inf")) >= stop.at_least


def evaluation_due(config: RunConfig, version: int) -> bool:
    """Before the first iteration, after every `eval_interval`, and after the last."""
    if not config.evaluation.datasets or config.debug.debug_train_only:
        return False
    if version == 0:
        return not config.evaluation.skip_eval_before_train
    interval = config.evaluation.eval_interval
    return version == config.num_rollout or (interval is not None and version % interval == 0)


def evaluated_beside(config: RunConfig, version: int) -> bool:
    """Are these weights evaluated while the next iteration samples and trains, up to its push?

    Not if the engines have not been given them, share the trainer's GPUs, or if nothing is trained
    before the result is known (`stop_when`).
    """
    free = version % config.sync.update_weights_interval == 0 and not config.resources.colocate
    return (
        evaluation_due(config, version)
        and 0 < version < config.num_rollout
        and free
        and config.stop_when is None
    )


async def abandon(run: str, k: int | None = None) -> None:
    """Abort the requests in flight (of one iteration, or of all), as far as their actors still
    answer; finished groups stay."""
    it = await context(run)
    with suppress(RlpipeError):
        await asyncio.to_thread(it.epoch.check)  # a driver that was replaced has nothing to abort
        await it.cluster.generator.abandon(k, deadline_s=ABANDON_TIMEOUT_S)
