"""Iterations as flow runs of their own: each in a process that a worker starts, with a Retry button
in Prefect's pages.

One more than S + 1 is open, so that its start (some seconds) overlaps with the iteration before.
Each has an idempotency key made of the store, the branch and k: a run that is started again finds
the flow runs it opened before, and puts back those that did not come to their commit. One that
fails is put back `orchestration.retries` times; a person's Retry is as good.

Not here: what such a flow run does (`iteration_run`), or the deployment's declaration
(`deployments`).
"""

from __future__ import annotations

import asyncio
import os
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
from tasks.record import handle
from tasks.turn import is_committed

GPUS = "CUDA_VISIBLE_DEVICES"
LOOK_INTERVAL_S = 0.5
CRASH_REPORTS_S = 15.0
"""A worker reports a crash twice, up to 11 s apart; a state set in between would be overwritten."""
END_TIMEOUT_S = 20.0
"""A worker gives a cancelled process 30 s, of which this one needs some for a checkpoint."""
CANCELLED_WITHIN_S = 45.0
"""A flow run that we see being cancelled for longer has no worker any more that would end it
(Prefect itself takes minutes)."""


def open_iterations(config: RunConfig) -> Iterations:
    """The iterations of a run in flight, as `orchestration.iterations` says."""
    return (
        Deployed(config) if config.orchestration.iterations == "deployment" else InProcess(config)
    )


class Deployed(Iterations):
    """Flow runs of a deployment, children of the flow run that runs here."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, ahead=config.async_buffer_size + 1)
        self._policy = config.orchestration
        self._open: dict[int, UUID] = {}
        self._allowed: dict[int, int] = {}
        self._being_cancelled: dict[int, float] = {}
        """Iteration → until when (monotonic) a worker may take to end it."""
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> Deployed:
        self._client: PrefectClient = await self._resources.enter_async_context(get_client())
        self._it: RunContext = await context(self._config.run)
        return self

    async def open(self, k: int) -> None:
        """Find iteration k's flow run or make it. Raises: ConfigError if there is no such
        deployment."""
        self._allowed[k] = self._policy.retries
        key = f"{self._it.files.root}#{self._config.run}#{self._it.init[:16]}#{k}"
        sought = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
        found = await self._client.read_flow_runs(flow_run_filter=sought, limit=1)
        if not found:
            self._open[k] = (await self._create(k, key)).id
            return
        self._open[k] = found[0].id
        if _is(found[0], StateType.CANCELLING):
            self._being_cancelled[k] = time.monotonic() + CANCELLED_WITHIN_S
        elif _ended(found[0]) and not _just_crashed(found[0]) and not is_committed(self._it, k):
            await self._put_back(k, after_s=0.0)
        else:
            self._allowed[k] += (
                1  # one that runs under the driver before this one is refused when it commits
            )

    async def _create(self, k: int, key: str) -> FlowRun:
        try:
            return await arun_deployment(
                self._policy.deployment,
                parameters={"run": self._config.run, "k": k},
                flow_run_name=f"{self._config.run}-{k}",
                timeout=0,
                idempotency_key=key,
                job_variables={f"env.{name}": value for name, value in self._environment().items()},
            )
        except ObjectNotFound as error:
            raise ConfigError(
                "there is no such deployment",
                where="orchestration.deployment",
                found=self._policy.deployment,
                do="declare it with `python -m deployments.apply`, and start a worker: `prefect worker start --pool rlpipe`",
            ) from error

    def _environment(self) -> dict[str, str]:
        """Of its process: our home, and the GPUs that we see, which it uses if it is retried when
        we have ended."""
        gpus = {GPUS: os.environ[GPUS]} if GPUS in os.environ else {}
        return {HOME_VARIABLE: str(default_home()), **gpus}

    async def result(self, k: int) -> dict[str, NodeRef]:
        """Wait for its commit. A flow run that ends without is put back, as often as it may be.

        Raises: IterationFailed; DeadlineExceeded after `orchestration.timeout_s`.
        """
        for delay_s in self._delays(k):
            ended = await self._until_ended(k)
            if ended is None:
                return self._handles(k)
            state = ended.state
            assert state is not None
            if delay_s is None or state.is_cancelled():
                raise IterationFailed(
                    "the flow run of an iteration did not come to its commit",
                    where=f"{ended.name} ({ended.id})",
                    found=f"{state.name}: {state.message}",
                    expected=f"its commit, after at most {self._policy.retries} retries (orchestration.retries)",
                    do="press Retry on this run in Prefect's pages once the cause is gone: it puts that flow run back",
                )
            self._it.progress.say(
                f"{ended.name}: {state.name}, again in {delay_s:g} s: {state.message}"
            )
            await self._put_back(k, after_s=delay_s)
        raise AssertionError("the last delay is None")

    def _delays(self, k: int) -> list[float | None]:
        return [self._policy.retry_delay_s * 2**number for number in range(self._allowed[k])] + [
            None
        ]

    async def _until_ended(self, k: int) -> FlowRun | None:
        """None once it is committed; its flow run if that ended without."""
        deadline_s = time.monotonic() + self._policy.timeout_s
        while True:
            run = await self._client.read_flow_run(self._open[k])
            if await asyncio.to_thread(is_committed, self._it, k):
                return None
            if k in self._being_cancelled:
                await self._put_back_once_cancelled(k, run)
            elif _ended(run) and not _just_crashed(run):
                return run
            if self._it.epoch.lost:
                raise self._it.epoch.lost
            if (
                ray_has_died()
            ):  # its iterations run in other processes, which join the Ray that this one starts
                await recover(self._config.run)
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(
                    "an iteration did not finish in time",
                    where=f"{run.name} ({run.id})",
                    found=f"its flow run is {run.state_name}",
                    expected=f"its commit within {self._policy.timeout_s:g} s (orchestration.timeout_s)",
                    do="is a worker running? see its logs; if its process is gone, set its state to Crashed and retry this run",
                )
            self._it.progress.stage(f"iteration {k}", note=f"flow run {run.name}: {run.state_name}")
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _put_back(self, k: int, *, after_s: float) -> None:
        """What Retry in the pages does, unless somebody was faster."""
        await asyncio.sleep(after_s)
        run = await self._client.read_flow_run(self._open[k])
        if _ended(run) and not is_committed(self._it, k):
            await self._client.set_flow_run_state(run.id, AwaitingRetry(), force=True)

    async def _put_back_once_cancelled(self, k: int, run: FlowRun) -> None:
        """The run before this one cancelled it when that ended. A worker that died meanwhile ends
        nothing: then we do."""
        if _is(run, StateType.CANCELLING) and time.monotonic() > self._being_cancelled[k]:
            given_up = Cancelled(message=f"no worker ended it within {CANCELLED_WITHIN_S:g} s")
            await self._client.set_flow_run_state(run.id, given_up, force=True)
            run = await self._client.read_flow_run(run.id)
        if not _is(run, StateType.CANCELLING):
            del self._being_cancelled[k]
            if _ended(run) and not _just_crashed(run):
                await self._put_back(k, after_s=0.0)

    def _handles(self, k: int) -> dict[str, NodeRef]:
        commit = self._it.branches.read(self._config.run, k)
        nodes = (self._it.nodes.get(stage, digest) for stage, digest in commit.nodes.items())
        return {str(node.stage): handle(node, reused=False) for node in nodes}

    async def close(self) -> None:
        """Cancel what is not committed, and wait for the processes to end: they use this process's
        Ray and actors."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                ends = await asyncio.gather(
                    *(self._end(k) for k in self._open), return_exceptions=True
                )
            for error in (end for end in ends if isinstance(end, Exception)):
                self._it.progress.say(
                    f"{self._config.run}: a flow run was not cancelled: {type(error).__name__}: {error}"
                )
        except TimeoutError:
            self._it.progress.say(
                f"{self._config.run}: a flow run of an iteration did not end in {END_TIMEOUT_S:g} s"
            )
        finally:
            await self._resources.aclose()

    async def _end(self, k: int) -> None:
        run = await self._client.read_flow_run(self._open[k])
        if not _ended(run) and not is_committed(self._it, k):
            await self._client.set_flow_run_state(
                run.id, Cancelling(message="the run that opened it has ended")
            )
        while not _ended(run):
            await asyncio.sleep(LOOK_INTERVAL_S)
            run = await self._client.read_flow_run(run.id)


def _ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def _just_crashed(run: FlowRun) -> bool:
    """May the worker still report it again?"""
    if run.state is None or not _is(run, StateType.CRASHED):
        return False
    return (datetime.now(UTC) - run.state.timestamp).total_seconds() < CRASH_REPORTS_S


def _is(run: FlowRun, kind: StateType) -> bool:
    return run.state is not None and run.state.type == kind
