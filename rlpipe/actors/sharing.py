"""Whose turn a colocated cluster's GPUs are, and what is in their memory then.

    phase     of the trainer        of each engine                   for
    sample    –                     weights, cache, graphs           rollouts, evaluations; an engine that is started again
    score     weights, teacher      –                                the advantage stage
    train     all of it             –                                optimizer steps, restoring, checkpoints, set-up
    push      weights               weights                          weights on their way to engines, scoring samples to compare
    start     –                     –                                engines that have to be started while none is up

Of two phases, what the second does not have goes first, then what it has more comes: never both at
once. From the end of `sample` to the next one requests are held in the generator, and what is in
flight is aborted: it goes on from its tokens. Weights that an engine gave up are pushed anew before
it samples.

Entering a phase is repeatable: it says what shall be the case, of whatever processes there are now.
A rank or an engine that was started again has everything, and that is put right with the next
phase, before anybody else takes memory. What a switch cost and what was in use is kept until
somebody asks (`take_log`), and in the run's trace.

Not here: how memory is given up (`engines.megatron.memory`, `EngineActor.keep`), or which stage
comes when (the driver).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rlpipe.config.model import ResourcesConfig
from rlpipe.observe.trace import traced

Phase = Literal["sample", "score", "train", "push", "start"]
OF_TRAINER = ("weights", "optimizer", "gradients", "teacher")
OF_ENGINES = ("weights", "kv_cache", "cuda_graph")


@dataclass(frozen=True, slots=True)
class Awake:
    """What is in GPU memory during a phase."""

    trainer: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()


PHASES: dict[Phase, Awake] = {
    "sample": Awake(engines=OF_ENGINES),
    "score": Awake(trainer=("weights", "teacher")),
    "train": Awake(trainer=OF_TRAINER),
    "push": Awake(trainer=("weights",), engines=("weights",)),
    "start": Awake(),
}
PHASE_OF: dict[str, Phase] = {
    "initialise": "train",
    "restore": "train",
    "advantage": "score",
    "train": "train",
    "require_room": "train",
    "save": "train",
    "push": "push",
    "probe": "push",
    "compare": "sample",
}
"""Method of `TrainerRank` → the phase it is called in. What is not here uses no GPU memory."""


class Ranks(Protocol):
    """The trainer's side (`TrainerGroup`)."""

    async def occupy(self, parts: Collection[str], *, deadline_s: float) -> list[dict[str, float]]:
        """All ranks keep these parts, and no others."""
        ...


class Servers(Protocol):
    """The engines' side (`Fleet`)."""

    async def keep(self, tags: Collection[str]) -> None:
        """All engines give up all but these."""
        ...

    async def take(self, tags: Collection[str]) -> None:
        """All engines take these back."""
        ...


class Sharing:
    """The turns of one cluster. Where trainer and engines have GPUs of their own (`resources` None)
    it does nothing."""

    def __init__(
        self,
        resources: ResourcesConfig | None = None,
        *,
        hold: Callable[[], Awaitable[None]] | None = None,
        release: Callable[[], Awaitable[None]] | None = None,
        trace: Path | None = None,
    ) -> None:
        """`hold` and `release`: of requests, in the generator. `trace`: folder of the run's
        trace."""
        self._resources = resources
        self._hold = hold
        self._release = release
        self._trace = trace
        self._turn = asyncio.Lock()
        self._log: list[dict[str, Any]] = []
        self.now: Phase | None = None
        """The phase; None before the first, and between two."""
        self.switches = 0

    @property
    def active(self) -> bool:
        """Are there GPUs to share?"""
        return self._resources is not None

    @property
    def sampling(self) -> bool:
        """May engines be asked to generate?"""
        return not self.active or self.now == "sample"

    @property
    def startable(self) -> bool:
        """May an engine be started, as far as the trainer is concerned?"""
        if self._resources is None or not self._resources.trainer_sleeps:
            return True
        return self.now is not None and not self.awake(self.now).trainer

    def awake(self, phase: Phase) -> Awake:
        """What is in GPU memory during a phase, if who does not give up memory keeps it all the
        time."""
        wanted = PHASES[phase]
        resources = self._resources
        assert resources is not None
        trainer = wanted.trainer if resources.trainer_sleeps else OF_TRAINER
        return Awake(trainer, wanted.engines if resources.engines_sleep else OF_ENGINES)

    async def enter(self, phase: Phase, ranks: Ranks | None, servers: Servers | None) -> None:
        """Have this phase from now on, until the next one. Those that are not there yet (None) take
        part in the next.

        Raises: TrainerError, ActorLost, DeadlineExceeded if the trainer does not give up or take
        what it should; an engine that does not is ended.
        """
        if self._resources is None:
            return
        async with self._turn:
            before = self.now
            self.now = None
            wanted = self.awake(phase)
            start = time.perf_counter()
            with self._traced(phase) if before != phase else contextlib.nullcontext():
                reports = await self._switch(phase, wanted, ranks, servers)
            self.now = phase
            if before != phase:
                self.switches += 1
                self._log.append(_entry(before, phase, time.perf_counter() - start, reports))

    async def _switch(
        self, phase: Phase, wanted: Awake, ranks: Ranks | None, servers: Servers | None
    ) -> list[dict[str, float]]:
        assert self._resources is not None
        if phase != "sample" and self._hold is not None and servers is not None:
            await self._hold()
        if servers is not None:
            await servers.keep(wanted.engines)
        reports = (
            []
            if ranks is None
            else await ranks.occupy(wanted.trainer, deadline_s=self._resources.start_timeout_s)
        )
        if servers is not None:
            await servers.take(wanted.engines)
        if phase == "sample" and self._release is not None and servers is not None:
            await self._release()
        return reports

    @contextlib.asynccontextmanager
    async def room_to_start(self) -> AsyncIterator[Awake | None]:
        """While this lasts the phase stays as it is. What an engine may keep that is started now;
        None: it may not be started."""
        if self._resources is None:
            yield Awake(OF_TRAINER, OF_ENGINES)
            return
        async with self._turn:
            yield self.awake(self.now) if self.now is not None and self.startable else None

    def take_log(self) -> list[dict[str, Any]]:
        """The switches since this was last asked.

        Each is `{"from", "to", "seconds", "trainer_peak_bytes", "trainer_bytes", "used_bytes"}`:
        the most that any rank's process had of its GPU during the phase that ended (0 without
        CUDA), then what it keeps, and what is in use of its GPU after the switch, engines included;
        of all ranks the largest.
        """
        log = self._log
        self._log = []
        return log

    def _traced(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        return (
            contextlib.nullcontext()
            if self._trace is None
            else traced(self._trace, f"switch to {phase}", None)
        )


def _entry(
    before: Phase | None, phase: Phase, seconds: float, reports: list[dict[str, float]]
) -> dict[str, Any]:
    def largest(name: str) -> float:
        return max((report.get(name, 0.0) for report in reports), default=0.0)

    return {
        "from": before,
        "to": phase,
        "seconds": seconds,
        "trainer_peak_bytes": largest("peak_bytes"),
        "trainer_bytes": largest("kept_bytes"),
        "used_bytes": largest("used_bytes"),
    }
