"""Whose turn shared GPUs are (rlpipe.actors.sharing). Trainer and engines are lists of what they
were told, in one order."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import pytest

from rlpipe.actors.sharing import ENGINE_PARTS, PHASE_OF, PHASES, TRAINER_PARTS, GpuSharing, Phase
from rlpipe.actors.trainer.rank_actors import TrainerRank
from rlpipe.config.model import ResourcesConfig
from rlpipe.engines.megatron.memory import PARTS
from rlpipe.engines.sglang.admin import MEMORY_TAGS
from rlpipe.errors import TrainerError
from rlpipe.observe.trace import FILE, read_trace

COLOCATED = ResourcesConfig(colocate=True)
SWITCH = ["release_memory", "trainer", "resume_memory"]


class Told:
    """Both sides of a GPU, and the generator: what is in memory, and the order in which they were
    told."""

    def __init__(self) -> None:
        self.trainer: set[str] = set(TRAINER_PARTS)
        self.engines: set[str] = set(ENGINE_PARTS)
        self.order: list[str] = []
        self.together: list[tuple[set[str], set[str]]] = []
        self.fails = False

    async def occupy(self, parts: Collection[str], *, deadline_s: float) -> list[dict[str, float]]:
        if self.fails:
            raise TrainerError("out of memory", where="trainer/0")
        self.trainer = set(parts)
        self._record("trainer")
        return [
            {"peak_bytes": 5.0, "kept_bytes": float(len(parts)), "used_bytes": 9.0},
            {"peak_bytes": 7.0, "kept_bytes": 0.0},
        ]

    async def release_memory(self, keep: Collection[str]) -> None:
        self.engines &= set(keep)
        self._record("release_memory")

    async def resume_memory(self, tags: Collection[str]) -> None:
        self.engines |= set(tags)
        self._record("resume_memory")

    async def hold(self) -> None:
        self.order.append("hold")

    async def release(self) -> None:
        self.order.append("release")

    def _record(self, call: str) -> None:
        self.order.append(call)
        self.together.append((set(self.trainer), set(self.engines)))


def shared(
    told: Told, resources: ResourcesConfig = COLOCATED, trace: Path | None = None
) -> GpuSharing:
    return GpuSharing(resources, hold=told.hold, release=told.release, trace=trace)


async def test_an_iteration_s_phases_are_never_in_memory_together():
    told = Told()
    sharing = shared(told)
    iteration: list[Phase] = [
        "start",
        "train",
        "push",
        "sample",
        "score",
        "train",
        "push",
        "sample",
    ]
    for phase in iteration:
        await sharing.enter(phase, told, told)
        assert (told.trainer, told.engines) == (
            set(PHASES[phase].trainer),
            set(PHASES[phase].engines),
        )
    both = {phase: (set(awake.trainer), set(awake.engines)) for phase, awake in PHASES.items()}
    for trainer, engines in told.together[2:]:
        assert any(trainer <= allowed[0] and engines <= allowed[1] for allowed in both.values()), (
            trainer,
            engines,
        )


async def test_requests_are_held_before_engines_give_up_memory_until_they_have_all_of_it():
    told = Told()
    sharing = shared(told)
    await sharing.enter("score", told, told)
    await sharing.enter("sample", told, told)
    assert told.order == ["hold", *SWITCH, *SWITCH, "release"]


async def test_who_keeps_its_memory_is_told_to_keep_all_of_it_in_every_phase():
    told = Told()
    sharing = shared(told, ResourcesConfig(colocate=True, offload_train=False))
    await sharing.enter("sample", told, told)
    assert told.trainer == set(TRAINER_PARTS)
    assert sharing.startable
    told = Told()
    sharing = shared(told, ResourcesConfig(colocate=True, offload_rollout=False))
    await sharing.enter("train", told, told)
    assert told.engines == set(ENGINE_PARTS)


async def test_a_phase_is_entered_again_for_processes_that_were_started_meanwhile_but_counted_once(
    tmp_path: Path,
):
    told = Told()
    late = Told()
    sharing = shared(told, trace=tmp_path)
    await sharing.enter("score", told, None)
    await sharing.enter("score", told, late)
    assert late.engines == set()
    assert [(entry["from"], entry["to"]) for entry in sharing.take_log()] == [(None, "score")]
    assert sharing.take_log() == []
    events, _ = read_trace(tmp_path / FILE)
    assert [(event.stage, event.event) for event in events] == [
        ("switch to score", "begin"),
        ("switch to score", "end"),
    ]


async def test_the_log_says_what_a_switch_cost_and_what_was_in_use():
    told = Told()
    sharing = shared(told)
    await sharing.enter("train", told, told)
    (entry,) = sharing.take_log()
    assert entry.pop("seconds") >= 0
    assert entry == {
        "from": None,
        "to": "train",
        "trainer_peak_bytes": 7.0,
        "trainer_bytes": 4.0,
        "used_bytes": 9.0,
    }


async def test_engines_are_started_only_where_the_trainer_has_no_memory_and_the_phase_waits_for_them():
    told = Told()
    sharing = shared(told)
    async with sharing.room_to_start() as awake:
        assert awake is None, "before the first phase nobody knows what the trainer has"
    await sharing.enter("train", told, told)
    async with sharing.room_to_start() as awake:
        assert awake is None
    await sharing.enter("sample", told, told)
    async with sharing.room_to_start() as awake:
        assert awake is not None
        assert set(awake.engines) == set(ENGINE_PARTS)
        switch = asyncio.create_task(sharing.enter("score", told, told))
        await asyncio.sleep(0)
        assert (sharing.now, switch.done()) == ("sample", False)
    await switch
    assert sharing.now == "score"


async def test_after_a_switch_that_failed_nobody_samples_and_the_next_one_puts_it_right():
    told = Told()
    sharing = shared(told)
    await sharing.enter("sample", told, told)
    told.fails = True
    with pytest.raises(TrainerError):
        await sharing.enter("score", told, told)
    assert (sharing.now, sharing.sampling, sharing.startable) == (None, False, False)
    told.fails = False
    await sharing.enter("sample", told, told)
    assert (sharing.sampling, told.engines, told.trainer) == (True, set(ENGINE_PARTS), set())


async def test_with_gpus_of_their_own_nobody_is_told_anything():
    told = Told()
    sharing = GpuSharing()
    await sharing.enter("train", told, told)
    assert (told.order, sharing.sampling, sharing.active) == ([], True, False)


def test_the_table_s_names_are_those_of_trainer_and_engines():
    assert set(TRAINER_PARTS) == set(PARTS)
    assert set(ENGINE_PARTS) == set(MEMORY_TAGS)
    assert all(callable(getattr(TrainerRank, method)) for method in PHASE_OF)
