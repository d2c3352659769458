"""Wait for the commits that sampling, training and pushing depend on.

With S = async_buffer_size, S + 1 iterations are in flight. Iteration k

- samples once the iteration that pushed a weight version of at least k - S is committed;
- uses the trainer once iteration k - 1 is committed;
- pushes its weights once due evaluations of the weights before are recorded.

All three are conditions on the store. They hold across processes, survive the death of any of them,
and need no locks. `flows.in_flight` opens the iterations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from rlpipe.config.data import EvalDataset
from rlpipe.config.run import RunConfig
from rlpipe.errors import DeadlineExceeded, RlpipeError
from rlpipe.lineage.stage_inputs import eval_inputs
from rlpipe.store.branches import commit_name
from rlpipe.types import Node, Stage
from tasks.context import RunContext, context

FIRST_POLL_S = 0.05
LAST_POLL_S = 1.0
ABORT_TIMEOUT_S = 10.0


async def wait_to_sample(run: str, k: int) -> None:
    """Wait until the weights that iteration k may sample from are committed.

    Raises: as `wait_to_train`.
    """
    ctx = await context(run)
    config = ctx.config
    before = commit_before_sampling(
        k, most_ahead(config), config.sync.update_weights_interval, config.start_rollout_id
    )
    await wait_until(ctx, lambda: is_committed(ctx, before), k, f"the commit of iteration {before}")


async def wait_to_train(run: str, k: int) -> None:
    """Wait until iteration k - 1 is committed, and evaluated if training depends on the result.

    A run whose stop condition is met (`stop_when`) ends its open iterations here.
    Raises: DeadlineExceeded after `orchestration.timeout_s`; Fenced if another driver has the
    branch.
    """
    ctx = await context(run)
    await wait_until(ctx, lambda: is_committed(ctx, k - 1), k, f"the commit of iteration {k - 1}")
    if not evaluates_concurrently(ctx, k):
        await wait_for_evaluation(ctx, k)


async def wait_to_push(run: str, k: int) -> None:
    """Wait until the initial weights of iteration k are evaluated, if an evaluation is due.

    Engines hold these weights until the push. Raises: as `wait_to_train`.
    """
    await wait_for_evaluation(await context(run), k)


async def wait_for_evaluation(ctx: RunContext, k: int) -> None:
    """Wait for a due evaluation of the weights after k iterations, if the run has a driver."""
    if (
        ctx.has_driver
        and evaluation_due(ctx.config, k)
        and not await asyncio.to_thread(is_evaluated, ctx, k)
    ):
        with ctx.progress.running("eval", k, note=f"weights {k} are being evaluated"):
            await wait_until(
                ctx,
                lambda: is_evaluated(ctx, k),
                k,
                f"an evaluation after {k} iterations that does not meet stop_when",
            )


def most_ahead(config: RunConfig) -> int:
    """Return the number of weight versions that a rollout may run ahead of training.

    With `selection: first_finished` the number is smaller than async_buffer_size. Many groups stay
    open until the next iteration. Those that began with the oldest weights allowed would then be
    too old.
    """
    if not config.rollout.pooled:
        return config.async_buffer_size
    least = config.sync.update_weights_interval - 1
    return min(config.async_buffer_size, max(1, least))


def pushed_at_interval(config: RunConfig, version: int) -> bool:
    """True for every `update_weights_interval`-th version, counted on from slime's."""
    return (config.start_rollout_id + version) % config.sync.update_weights_interval == 0


def commit_before_sampling(k: int, buffer_size: int, interval: int, done: int = 0) -> int:
    """Return the iteration whose commit proves that engines hold weights which iteration k may use.

    Negative: the first weights suffice. Versions that with `done` iterations of slime are divisible
    by `interval` are pushed. As buffer_size ≥ interval - 1, the result is less than k.
    """
    oldest = k - buffer_size
    if oldest <= 0:
        return -1
    # Round up to the next pushed version v; iteration v - 1 pushed it.
    return -(-(done + oldest) // interval) * interval - done - 1


async def wait_until(ctx: RunContext, reached: Callable[[], bool], k: int, condition: str) -> None:
    """Wait until `reached` is True. Check after each change, and at growing intervals.

    Raises: DeadlineExceeded, Fenced, StoreError.
    """
    deadline_s = time.monotonic() + ctx.config.orchestration.timeout_s
    pause_s = FIRST_POLL_S
    while True:
        # Taken before the check: a change during the check is not missed.
        changed = ctx.store_changed
        if await asyncio.to_thread(reached):
            return
        # A replaced driver would wait for commits that another process makes.
        await asyncio.to_thread(ctx.epoch.check_driver)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(
                "an iteration waited too long for the iterations before",
                where=f"{ctx.config.run}, iteration {k}",
                found=f"not in the store: {condition}",
                expected=f"within {ctx.config.orchestration.timeout_s:g} s "
                "(orchestration.timeout_s)",
                do="see why the iterations before did not finish; the same command continues "
                "after the last commit",
            )
        with suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), min(pause_s, left_s))
        # Each poll of an S3 store is a request.
        pause_s = min(2 * pause_s, LAST_POLL_S)


def is_committed(ctx: RunContext, k: int) -> bool:
    """True if iteration k is in the store. Iterations before a fork's first one always are."""
    return k < ctx.first_iteration or ctx.files.exists(
        f"branches/{commit_name(ctx.config.run, k)}.json"
    )


def is_evaluated(ctx: RunContext, version: int) -> bool:
    """True if every held-out set has scores of this version and the run shall continue.

    Weights that were rebuilt with other bits since need no second evaluation.
    """
    weights = {ctx.recorded_before(version), ctx.weights_before(version)}
    nodes = [_evaluation_node(ctx, dataset, weights) for dataset in ctx.config.evaluation.datasets]
    metrics = {
        name: value for node in nodes if node for name, value in node.outputs["metrics"].items()
    }
    stop = ctx.config.stop_when
    return all(nodes) and not (stop is not None and stop.is_met(metrics))


def _evaluation_node(ctx: RunContext, dataset: EvalDataset, weights: Iterable[str]) -> Node | None:
    for state in weights:
        inputs = eval_inputs(ctx.config, dataset, state, ctx.contracts)
        if node := ctx.nodes.find(Stage.EVAL, inputs.digest):
            return node
    return None


def evaluation_due(config: RunConfig, version: int) -> bool:
    """True before the first iteration, after every `eval_interval`, and after the last."""
    if not config.evaluation.datasets or config.debug.debug_train_only:
        return False
    if version == 0:
        return not config.evaluation.skip_eval_before_train
    interval = config.evaluation.eval_interval
    done = config.start_rollout_id + version
    return version == config.num_rollout or (interval is not None and done % interval == 0)


def evaluates_concurrently(ctx: RunContext, version: int) -> bool:
    """True if these weights are evaluated while the next iteration samples and trains.

    That needs pushed weights, engines on other GPUs than the trainer, and no `stop_when`, which
    makes training depend on the result.
    """
    config = ctx.config
    return (
        evaluation_due(config, version)
        and 0 < version < config.num_rollout
        and pushed_at_interval(config, version)
        and not ctx.cluster.shares_gpus
        and config.stop_when is None
    )


async def abort_requests(run: str, k: int | None = None) -> None:
    """Abort the requests of one iteration, or of all, if the actors answer.

    Finished groups stay.
    """
    ctx = await context(run)
    with suppress(RlpipeError):
        # A replaced driver must not abort the requests of its successor.
        await asyncio.to_thread(ctx.epoch.check)
        await ctx.cluster.generator.abandon(k, deadline_s=ABORT_TIMEOUT_S)
