"""Send weights from the trainer to the engines, for the fleet.

`WeightSender.send` locks the trainer, restores the weights if the trainer holds none, enters the
push phase on shared GPUs, holds generation requests, and pushes. Weights in files need no trainer.
`ClusterState` has the conductor's actors; `RequestHold` holds and releases requests in the
generator.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from ray.actor import ActorHandle

from rlpipe.actors.engines.files_sync import FilesSync
from rlpipe.actors.engines.fleet import Fleet, Receivers, Weights
from rlpipe.actors.ray.calls import call
from rlpipe.actors.ray.layout import shared_trainer_ranks
from rlpipe.actors.sharing import GpuSharing, Phase
from rlpipe.actors.specs import ClusterSpec
from rlpipe.actors.trainer.group import TrainerGroup, TrainerLock
from rlpipe.config.run import RunConfig
from rlpipe.errors import ActorLost, Mismatch, RlpipeError
from rlpipe.system.parts import Parts

CALL_TIMEOUT_S = 60.0


@dataclass
class ClusterState:
    """Actors and settings of the open cluster, shared by the conductor and the weight sender.

    The conductor replaces them when it opens or closes the cluster.
    """

    spec: ClusterSpec | None = None
    generator: ActorHandle | None = None
    fleet: Fleet | None = None
    trainer: TrainerLock = field(default_factory=TrainerLock)
    sharing: GpuSharing = field(default_factory=GpuSharing)

    @property
    def config(self) -> RunConfig:
        assert self.spec is not None, "open the cluster first"
        return self.spec.config

    @property
    def running_fleet(self) -> Fleet:
        assert self.fleet is not None, "this run has no engines"
        return self.fleet

    @property
    def requests(self) -> RequestHold:
        assert self.generator is not None, "open the cluster first"
        return RequestHold(self.generator, self.config)

    @property
    def trainer_timeout_s(self) -> float:
        """Seconds that the current user of the trainer may take."""
        return self.config.train.timeout_s + CALL_TIMEOUT_S

    async def enter(self, phase: Phase) -> None:
        """Enter a phase of shared GPUs. The caller holds the trainer lock."""
        await self.sharing.enter(phase, self.trainer.group, self.fleet)


class RequestHold:
    """Holds requests in the generator while engines cannot sample.

    A generator that has died sends no requests, so its loss is ignored.
    """

    def __init__(self, generator: ActorHandle, config: RunConfig) -> None:
        self._generator = generator
        self._config = config

    async def hold(self) -> None:
        """Hold requests until `release`, because engines release their memory.

        Requests in flight end before: they finish (`sync.in_flight` drain), or are aborted.
        """
        mode = "drain" if self._config.sync.in_flight == "drain" else "abort"
        # The hold expires if the conductor dies before the release.
        await self._hold(mode, self._config.orchestration.timeout_s)

    async def release(self) -> None:
        """Send requests again."""
        with suppress(ActorLost):
            await self._release()

    @asynccontextmanager
    async def during_push(self) -> AsyncIterator[None]:
        """Hold requests during the block, in the mode of `sync.in_flight`."""
        await self._hold(self._config.sync.in_flight, self._config.sync.timeout_s + CALL_TIMEOUT_S)
        try:
            yield
        finally:
            with suppress(RlpipeError):  # a hold expires by itself
                await self._release()

    async def _hold(self, mode: str, expires_s: float) -> None:
        # A drain waits for requests in flight, which have this deadline themselves.
        drain_s = self._config.engine.request_timeout_s
        hold = self._generator.hold.remote(mode, deadline_s=drain_s, expires_s=expires_s)
        with suppress(ActorLost):
            await call(hold, where="generator.hold", deadline_s=drain_s + CALL_TIMEOUT_S)

    async def _release(self) -> None:
        await call(
            self._generator.release.remote(), where="generator.release", deadline_s=CALL_TIMEOUT_S
        )


class WeightSender:
    """The `Send` function of the fleet."""

    def __init__(self, cluster: str, state: ClusterState) -> None:
        self._cluster = cluster
        self._state = state

    async def can_send(self, weights: Weights) -> bool:
        """True if `send` would neither wait for the trainer nor interrupt its phase."""
        state = self._state
        # In other phases a push would take the memory of the trainer's work.
        if state.spec is None or not state.sharing.sampling:
            return False
        if state.config.sync.through_files and await self._files().is_written(weights):
            return True
        if state.trainer.group is None or state.trainer.taken:
            return False
        async with state.trainer.exclusive("can_send", CALL_TIMEOUT_S) as trainer:
            return await trainer.held() in (weights.digest, None)

    async def send(self, weights: Weights, to: Receivers, *, force: bool) -> dict[str, Any] | None:
        """Send weights, as `fleet.Send`."""
        state = self._state
        parts = Parts()
        config = state.config
        if config.sync.through_files:
            sent = await self._files().send(
                weights,
                to,
                state.running_fleet.engines,
                trainer=lambda: self._trainer_with(weights, config, parts, force=force),
                loading=lambda: self._loading_files(idle=to.idle),
            )
            return None if sent is None else _with_parts(sent, parts)
        async with self._trainer_with(weights, config, parts, force=force) as trainer:
            if trainer is None:
                return None
            # With shared GPUs the push phase holds requests.
            hold = not (to.idle or state.sharing.active)
            async with state.requests.during_push() if hold else nullcontext():
                with parts.part("mark engines"):
                    urls = await to.begin_push(to.urls())
                with parts.part("push"):
                    answers = await trainer.call(
                        "push",
                        held=weights.digest,
                        engines=urls,
                        stamp=weights.stamp,
                        sync=config.sync,
                        shared_ranks=self._shared_ranks(urls),
                        deadline_s=config.sync.timeout_s + CALL_TIMEOUT_S,
                    )
                # rank 0 talked to the engines and knows which ones got the weights
                with parts.part("mark engines"):
                    await to.end_push(answers[0]["unknown"])
        return _with_parts(answers[0], parts)

    def _files(self) -> FilesSync:
        assert self._state.spec is not None
        return FilesSync(self._state.spec, self._cluster)

    def _shared_ranks(self, urls: Sequence[str]) -> dict[str, list[int]]:
        """Return the trainer ranks on the GPUs of each engine that shares GPUs, by URL."""
        resources = self._state.config.resources
        by_url = {}
        for engine in self._state.running_fleet.engines:
            ranks = shared_trainer_ranks(engine.number, resources)
            if engine.url in urls and ranks is not None:
                by_url[engine.url] = ranks
        return by_url

    @asynccontextmanager
    async def _trainer_with(
        self, weights: Weights, config: RunConfig, parts: Parts, *, force: bool
    ) -> AsyncIterator[TrainerGroup | None]:
        """Lock the trainer and yield it with these weights, restored if it held none.

        Yield None if it holds other weights, unless `force`. `parts` get the seconds of a restore
        and of the switch of shared GPUs.
        """
        state = self._state
        timeout_s = config.sync.timeout_s + CALL_TIMEOUT_S + config.train.timeout_s
        async with state.trainer.exclusive("push", timeout_s) as trainer:
            # None: the ranks hold nothing, so a restore takes no weights from another stage.
            if not force and await trainer.held() not in (weights.digest, None):
                yield None
                return
            async with self._sampling_resumed():
                # A restore trains batches, which needs more memory than a push.
                if state.sharing.active and await trainer.held() != weights.lineage.target:
                    await state.enter("train")
                with parts.part("restore"):
                    await _restore(trainer, weights, config)
                with parts.part("switch"):
                    await state.enter("push")
                yield trainer

    @asynccontextmanager
    async def _loading_files(self, *, idle: bool) -> AsyncIterator[None]:
        """Let engines load weights from files: allocate their memory, and hold requests."""
        state = self._state
        if state.sharing.active:
            async with (
                state.trainer.exclusive("load weights", state.trainer_timeout_s),
                self._sampling_resumed(),
            ):
                await state.enter("push")
                yield
            return
        async with nullcontext() if idle else state.requests.during_push():
            yield

    @asynccontextmanager
    async def _sampling_resumed(self) -> AsyncIterator[None]:
        """Return to the phase `sample` after the block, if shared GPUs were in that phase.

        So a rollout continues after one restarted engine got its weights.
        """
        state = self._state
        sampled = state.sharing.active and state.sharing.sampling
        try:
            yield
        finally:
            if sampled:
                await state.enter("sample")


def _with_parts(sent: dict[str, Any], parts: Parts) -> dict[str, Any]:
    """Replace the steps of a push by all parts of the stage so far."""
    parts.inside("push", sent["steps"])
    rest = {key: value for key, value in sent.items() if key != "steps"}
    return {**rest, "parts": parts.seconds}


async def _restore(trainer: TrainerGroup, weights: Weights, config: RunConfig) -> None:
    """Make the trainer hold these weights. Raises: Mismatch; as `TrainerGroup.ensure`."""
    deadline_s = config.checkpoint.timeout_s + len(weights.lineage.replay) * config.train.timeout_s
    restored = await trainer.ensure(weights.lineage, deadline_s=deadline_s)
    if restored and restored["mismatch"]:
        raise Mismatch(
            "the published weights cannot be rebuilt bit for bit",
            where=f"nodes/train/{restored['mismatch']}.json",
            expected="the recorded state_digest",
            do="no action: the next stage that needs the weights reports how the run continues",
        )
