"""Iterations as flow runs of a deployment: a worker starts a process for each; each has Retry.

S + 2 iterations are open, so that the start of the newest (some seconds) overlaps with the one
before. The idempotency key of a flow run contains store, branch and k: a restarted run finds the
flow runs that it opened before and reschedules those without a commit. A failed flow run is
rescheduled `orchestration.retries` times; Retry in Prefect's UI has the same effect.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Cancelled, Cancelling

from flows.in_flight import InProcess, IterationFailed, Iterations
from rlpipe.config.load import HOME_VARIABLE
from rlpipe.config.load import home as default_home
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError, DeadlineExceeded
from rlpipe.types import NodeRef
from tasks.context import RunContext, context, ray_has_died, recover
from tasks.ordering import is_committed
from tasks.record import handle

GPUS = "CUDA_VISIBLE_DEVICES"
POLL_INTERVAL_S = 0.5
CRASH_REPORTS_S = 15.0
"""A worker reports a crash twice, up to 11 s apart. The second report would overwrite our state."""
END_TIMEOUT_S = 20.0
"""A worker gives a cancelled process 30 s. The process needs some of them for a checkpoint."""
INPUT_ERROR = re.compile(r"exception: *(ConfigError|DataError)\b")
"""In a state's message: an error that each attempt would end with."""
CANCELLED_WITHIN_S = 45.0
"""A flow run in Cancelling for longer has no worker that would end it. Prefect needs minutes to
notice.
"""


def open_iterations(config: RunConfig) -> Iterations:
    """Return the iterations of a run, in the mode of `orchestration.iterations`."""
    if config.orchestration.iterations == "deployment":
        return DeployedIterations(config)
    return InProcess(config)


class DeployedIterations(Iterations):
    """Flow runs of a deployment, opened by the current flow run."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, ahead=config.async_buffer_size + 1)
        self._policy = config.orchestration
        self._open: dict[int, UUID] = {}
        self._attempts_left: dict[int, int] = {}
        self._cancel_deadline_s: dict[int, float] = {}
        """Iteration → monotonic time until which a worker may take to end it."""
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> DeployedIterations:
        self._client: PrefectClient = await self._resources.enter_async_context(get_client())
        self._ctx: RunContext = await context(self._config.run)
        return self

    async def open(self, k: int) -> None:
        """Find or create the flow run of iteration k.

        Raises: ConfigError if the deployment does not exist.
        """
        self._attempts_left[k] = self._policy.retries
        # The init digest distinguishes runs of one name with different first weights.
        key = f"{self._ctx.files.root}#{self._config.run}#{self._ctx.init[:16]}#{k}"
        same_key = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
        found = await self._client.read_flow_runs(flow_run_filter=same_key, limit=1)
        if not found:
            self._open[k] = (await self._create(k, key)).id
            return
        self._open[k] = found[0].id
        if _has_type(found[0], StateType.CANCELLING):
            self._cancel_deadline_s[k] = time.monotonic() + CANCELLED_WITHIN_S
        elif _ended(found[0]) and not _just_crashed(found[0]) and not is_committed(self._ctx, k):
            await self._reschedule(k, after_s=0.0)
        else:
            # A flow run under the epoch of the previous driver fails at its commit: not its fault.
            self._attempts_left[k] += 1

    async def _create(self, k: int, key: str) -> FlowRun:
        try:
            return await arun_deployment(
                self._policy.deployment,
                parameters={"run": self._config.run, "k": k},
                flow_run_name=f"{self._config.run}-{k}",
                # 0: return at once instead of waiting for the flow run.
                timeout=0,
                idempotency_key=key,
                job_variables={f"env.{name}": value for name, value in self._environment().items()},
            )
        except ObjectNotFound as error:
            raise ConfigError(
                "the Prefect deployment does not exist",
                where="orchestration.deployment",
                found=self._policy.deployment,
                do="declare it with `python -m deployments.apply`, "
                "and start a worker: `prefect worker start --pool rlpipe`",
            ) from error

    def _environment(self) -> dict[str, str]:
        """Return the environment of the flow run's process: the home and the visible GPUs.

        A flow run that is retried after this process has ended uses these GPUs.
        """
        gpus = {GPUS: os.environ[GPUS]} if GPUS in os.environ else {}
        return {HOME_VARIABLE: str(default_home()), **gpus}

    async def result(self, k: int) -> dict[str, NodeRef]:
        """Wait for the commit of iteration k. Reschedule a flow run that ends without one.

        Raises: IterationFailed; DeadlineExceeded after `orchestration.timeout_s`.
        """
        for delay_s in self._delays(k):
            ended = await self._until_ended(k)
            if ended is None:
                return self._handles(k)
            state = ended.state
            assert state is not None
            same_again = INPUT_ERROR.search(state.message or "") is not None
            if delay_s is None or state.is_cancelled() or same_again:
                raise IterationFailed(
                    "the flow run of an iteration ended without a commit",
                    where=f"{ended.name} ({ended.id})",
                    # The message may be an error with lines `found:` and `do:` of its own.
                    found=f"{state.name}: {state.message}".replace("\n", "\n    "),
                    expected="a commit; wrong input is not retried"
                    if same_again
                    else f"a commit after at most {self._policy.retries} retries "
                    "(orchestration.retries)",
                    do="remove the cause, then press Retry on this run in Prefect's UI: "
                    "it reschedules that flow run",
                )
            self._ctx.progress.say(
                f"{ended.name}: {state.name}, retry in {delay_s:g} s: {state.message}"
            )
            await self._reschedule(k, after_s=delay_s)
        raise AssertionError("the last delay is None")

    def _delays(self, k: int) -> list[float | None]:
        return [
            self._policy.retry_delay_s * 2**number for number in range(self._attempts_left[k])
        ] + [None]

    async def _until_ended(self, k: int) -> FlowRun | None:
        """Return None once the iteration is committed, or its flow run if that ended before."""
        deadline_s = time.monotonic() + self._policy.timeout_s
        while True:
            run = await self._client.read_flow_run(self._open[k])
            # The commit counts, whatever state Prefect shows.
            if await asyncio.to_thread(is_committed, self._ctx, k):
                return None
            if k in self._cancel_deadline_s:
                await self._reschedule_once_cancelled(k, run)
            elif _ended(run) and not _just_crashed(run):
                return run
            # Another driver has taken over: its flow runs must not be rescheduled from here.
            if self._ctx.epoch.lost:
                raise self._ctx.epoch.lost
            # Processes of iterations join the Ray of this process: only this process restarts it.
            if ray_has_died():
                await recover(self._config.run)
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(
                    "an iteration did not finish in time",
                    where=f"{run.name} ({run.id})",
                    found=f"its flow run is {run.state_name}",
                    expected=f"a commit within {self._policy.timeout_s:g} s "
                    "(orchestration.timeout_s)",
                    do="check that a worker runs, and read its logs; if the process of the "
                    "flow run is gone, set the state to Crashed and retry this run",
                )
            self._ctx.progress.stage("flow run", k, note=f"{run.name}: {run.state_name}")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _reschedule(self, k: int, *, after_s: float) -> None:
        """Set AwaitingRetry, as Retry in Prefect's UI does, unless the flow run runs again."""
        await asyncio.sleep(after_s)
        run = await self._client.read_flow_run(self._open[k])
        if _ended(run) and not is_committed(self._ctx, k):
            await self._client.set_flow_run_state(run.id, AwaitingRetry(), force=True)

    async def _reschedule_once_cancelled(self, k: int, run: FlowRun) -> None:
        """Reschedule a flow run that the previous driver cancelled, once it has ended.

        A worker that died meanwhile ends nothing: after a deadline this process sets Cancelled.
        """
        if _has_type(run, StateType.CANCELLING) and time.monotonic() > self._cancel_deadline_s[k]:
            cancelled = Cancelled(message=f"no worker ended it within {CANCELLED_WITHIN_S:g} s")
            await self._client.set_flow_run_state(run.id, cancelled, force=True)
            run = await self._client.read_flow_run(run.id)
        if not _has_type(run, StateType.CANCELLING):
            del self._cancel_deadline_s[k]
            if _ended(run) and not _just_crashed(run):
                await self._reschedule(k, after_s=0.0)

    def _handles(self, k: int) -> dict[str, NodeRef]:
        commit = self._ctx.branches.read(self._config.run, k)
        nodes = (self._ctx.nodes.get(stage, digest) for stage, digest in commit.nodes.items())
        return {str(node.stage): handle(node, reused=False) for node in nodes}

    async def close(self) -> None:
        """Cancel open iterations and wait until their processes end.

        Those processes use the Ray and the actors of this process.
        """
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                results = await asyncio.gather(
                    *(self._end(k) for k in self._open), return_exceptions=True
                )
            for error in results:
                if isinstance(error, Exception):
                    self._ctx.progress.say(
                        f"{self._config.run}: cancelling a flow run failed: "
                        f"{type(error).__name__}: {error}"
                    )
        except TimeoutError:
            self._ctx.progress.say(
                f"{self._config.run}: a flow run of an iteration did not end "
                f"within {END_TIMEOUT_S:g} s"
            )
        finally:
            await self._resources.aclose()

    async def _end(self, k: int) -> None:
        run = await self._client.read_flow_run(self._open[k])
        if not _ended(run) and not is_committed(self._ctx, k):
            await self._client.set_flow_run_state(
                run.id, Cancelling(message="the run that opened this iteration has ended")
            )
        while not _ended(run):
            await asyncio.sleep(POLL_INTERVAL_S)
            run = await self._client.read_flow_run(run.id)


def _ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def _just_crashed(run: FlowRun) -> bool:
    """True if the worker may still report the crash again."""
    if run.state is None or not _has_type(run, StateType.CRASHED):
        return False
    return (datetime.now(UTC) - run.state.timestamp).total_seconds() < CRASH_REPORTS_S


def _has_type(run: FlowRun, state: StateType) -> bool:
    return run.state is not None and run.state.type == state
