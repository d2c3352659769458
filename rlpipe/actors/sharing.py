"""Phases of GPUs that trainer and engines share (`resources.colocate`).

    phase     trainer memory     memory of each engine      work
    sample    –                  weights, cache, graphs     rollouts, evaluations, restart of an
                                                            engine
    score     weights, teacher   –                          advantage stage
    train     all                –                          optimizer steps, restore, checkpoints,
                                                            set-up
    push      weights            weights                    push of weights, scoring of samples for
                                                            the comparison
    start     –                  –                          start of engines while none is up

A switch first releases the memory that the next phase does not use, then allocates what it needs,
so that both are never in memory together. From the end of `sample` to the next `sample` the
generator holds requests; requests in flight are aborted and continue from their tokens. An engine
that released its weights gets them by a push before it samples.

Entering the current phase again is allowed and sets the memory of all present processes. A rank or
an engine that was restarted uses all of its memory until the next phase corrects that, before
another process allocates memory.

Entry point: `GpuSharing`. Each switch is logged (`take_log`) and written to the run's trace.
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
TRAINER_PARTS = ("weights", "optimizer", "gradients", "teacher")
ENGINE_PARTS = ("weights", "kv_cache", "cuda_graph")


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Parts of trainer and engines in GPU memory during a phase."""

    trainer: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()


PHASES: dict[Phase, PhaseMemory] = {
    "sample": PhaseMemory(engines=ENGINE_PARTS),
    "score": PhaseMemory(trainer=("weights", "teacher")),
    "train": PhaseMemory(trainer=TRAINER_PARTS),
    "push": PhaseMemory(trainer=("weights",), engines=("weights",)),
    "start": PhaseMemory(),
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
"""Phase of each method of `TrainerRank`. Other methods use no GPU memory."""


class TrainerMemory(Protocol):
    """The trainer's side of a switch (`TrainerGroup`)."""

    async def occupy(self, parts: Collection[str], *, deadline_s: float) -> list[dict[str, float]]:
        """Keep only these parts on all ranks; return the memory report of each rank."""
        ...


class EngineMemory(Protocol):
    """The engines' side of a switch (`Fleet`)."""

    async def release_memory(self, keep: Collection[str]) -> None:
        """Release all memory of all engines except these tags."""
        ...

    async def resume_memory(self, tags: Collection[str]) -> None:
        """Allocate the memory of these tags again, on all engines."""
        ...


class GpuSharing:
    """Current phase of a cluster. Without shared GPUs (`resources` None) it does nothing."""

    def __init__(
        self,
        resources: ResourcesConfig | None = None,
        *,
        hold: Callable[[], Awaitable[None]] | None = None,
        release: Callable[[], Awaitable[None]] | None = None,
        trace: Path | None = None,
    ) -> None:
        """`hold` and `release` requests in the generator. `trace`: folder of the run's trace."""
        self._resources = resources
        self._hold = hold
        self._release = release
        self._trace = trace
        self._switching = asyncio.Lock()
        self._log: list[dict[str, Any]] = []
        self.now: Phase | None = None
        """The phase; None before the first one, during a switch, and after a failed switch."""
        self.switches = 0

    @property
    def active(self) -> bool:
        """True if trainer and engines share GPUs."""
        return self._resources is not None

    @property
    def sampling(self) -> bool:
        """True if engines may generate."""
        return not self.active or self.now == "sample"

    @property
    def startable(self) -> bool:
        """True if the trainer's memory leaves room to start an engine."""
        # A trainer that never releases memory was there when the engines first started.
        if self._resources is None or not self._resources.trainer_sleeps:
            return True
        return self.now is not None and not self.memory(self.now).trainer

    @property
    def _unchanging(self) -> bool:
        """True if both sides have all of their memory in every phase, and have it already.

        A call to the trainer would only return its cached memory to the GPU.
        """
        resources = self._resources
        assert resources is not None
        return self.switches > 0 and not (resources.trainer_sleeps or resources.engines_sleep)

    def memory(self, phase: Phase) -> PhaseMemory:
        """Return the parts in GPU memory during a phase.

        Without offloading, trainer or engines keep all parts in every phase.
        """
        wanted = PHASES[phase]
        resources = self._resources
        assert resources is not None
        trainer = wanted.trainer if resources.trainer_sleeps else TRAINER_PARTS
        return PhaseMemory(trainer, wanted.engines if resources.engines_sleep else ENGINE_PARTS)

    async def enter(
        self, phase: Phase, trainer: TrainerMemory | None, engines: EngineMemory | None
    ) -> None:
        """Switch to this phase. A side that does not exist yet (None) takes part in the next one.

        Raises: TrainerError, ActorLost, DeadlineExceeded if the trainer fails to release or
        allocate memory. An engine that fails is ended.
        """
        if self._resources is None:
            return
        async with self._switching:
            before = self.now
            self.now = None  # stays None if the switch fails: the memory is then unknown
            start = time.perf_counter()
            # A repeated phase is neither traced nor logged: it only corrects restarted processes.
            with self._traced(phase) if before != phase else contextlib.nullcontext():
                reports = await self._switch(phase, trainer, engines)
            self.now = phase
            if before != phase:
                self.switches += 1
                seconds = time.perf_counter() - start
                self._log.append(_log_entry(before, phase, seconds, reports))

    async def _switch(
        self, phase: Phase, trainer: TrainerMemory | None, engines: EngineMemory | None
    ) -> list[dict[str, float]]:
        assert self._resources is not None
        wanted = self.memory(phase)
        # Hold requests before memory is released: a request to such an engine would fail.
        if phase != "sample" and self._hold is not None and engines is not None:
            await self._hold()
        if engines is not None:
            await engines.release_memory(wanted.engines)
        # `occupy` both releases and allocates, so it runs between the two calls of the engines.
        reports: list[dict[str, float]] = []
        if trainer is not None and not self._unchanging:
            deadline_s = self._resources.start_timeout_s
            reports = await trainer.occupy(wanted.trainer, deadline_s=deadline_s)
        if engines is not None:
            await engines.resume_memory(wanted.engines)
        if phase == "sample" and self._release is not None and engines is not None:
            await self._release()
        return reports

    @contextlib.asynccontextmanager
    async def room_to_start(self) -> AsyncIterator[PhaseMemory | None]:
        """Block switches; yield the memory that an engine may keep that is started now.

        None: no engine may be started.
        """
        if self._resources is None:
            yield PhaseMemory(TRAINER_PARTS, ENGINE_PARTS)
            return
        async with self._switching:  # the start of an engine must not overlap with a switch
            yield self.memory(self.now) if self.now is not None and self.startable else None

    def take_log(self) -> list[dict[str, Any]]:
        """Return the switches since the last call.

        Each is `{"from", "to", "seconds", "trainer_peak_bytes", "trainer_bytes", "used_bytes"}`:
        the peak of a rank's process in the phase that ended (0 without CUDA), the rank's memory
        after the switch, and the used memory of its GPU after the switch, engines included. Each
        number is the maximum over ranks.
        """
        log = self._log
        self._log = []
        return log

    def _traced(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        if self._trace is None:
            return contextlib.nullcontext()
        return traced(self._trace, f"switch to {phase}", None)


def _log_entry(
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
