"""Phases of shared GPUs (rlpipe.actors.sharing). Trainer and engines record their calls."""

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


class Recorder:
    """Trainer, engines and generator in one: their memory, and the order of the calls."""

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
    recorder: Recorder, resources: ResourcesConfig = COLOCATED, trace: Path | None = None
) -> GpuSharing:
    return GpuSharing(resources, hold=recorder.hold, release=recorder.release, trace=trace)


async def test_parts_of_two_phases_are_never_in_memory_together():
    recorder = Recorder()
    sharing = shared(recorder)
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
        await sharing.enter(phase, recorder, recorder)
        assert (recorder.trainer, recorder.engines) == (
            set(PHASES[phase].trainer),
            set(PHASES[phase].engines),
        )
    both = {phase: (set(awake.trainer), set(awake.engines)) for phase, awake in PHASES.items()}
    for trainer, engines in recorder.together[2:]:
        assert any(trainer <= allowed[0] and engines <= allowed[1] for allowed in both.values()), (
            trainer,
            engines,
        )


async def test_requests_are_held_from_before_the_release_of_memory_until_engines_have_all_of_it():
    recorder = Recorder()
    sharing = shared(recorder)
    await sharing.enter("score", recorder, recorder)
    await sharing.enter("sample", recorder, recorder)
    assert recorder.order == ["hold", *SWITCH, *SWITCH, "release"]


async def test_without_offloading_a_side_keeps_all_parts_in_every_phase():
    recorder = Recorder()
    sharing = shared(recorder, ResourcesConfig(colocate=True, offload_train=False))
    await sharing.enter("sample", recorder, recorder)
    assert recorder.trainer == set(TRAINER_PARTS)
    assert sharing.startable
    recorder = Recorder()
    sharing = shared(recorder, ResourcesConfig(colocate=True, offload_rollout=False))
    await sharing.enter("train", recorder, recorder)
    assert recorder.engines == set(ENGINE_PARTS)


async def test_if_both_sides_stay_only_the_first_phase_sets_memory():
    recorder = Recorder()
    stay = ResourcesConfig(colocate=True, offload_train=False, offload_rollout=False)
    sharing = shared(recorder, stay)
    recorder.trainer = {"weights"}  # as another run of the cluster left it
    await sharing.enter("train", recorder, recorder)
    assert (recorder.trainer, recorder.engines) == (set(TRAINER_PARTS), set(ENGINE_PARTS))
    recorder.order.clear()
    for phase in ("push", "sample", "score", "train"):
        await sharing.enter(phase, recorder, recorder)
    assert "trainer" not in recorder.order
    assert sharing.switches == 5


async def test_a_phase_entered_again_sets_the_memory_of_new_processes_and_is_logged_once(
    tmp_path: Path,
):
    recorder = Recorder()
    late = Recorder()
    sharing = shared(recorder, trace=tmp_path)
    await sharing.enter("score", recorder, None)
    await sharing.enter("score", recorder, late)
    assert late.engines == set()
    assert [(entry["from"], entry["to"]) for entry in sharing.take_log()] == [(None, "score")]
    assert sharing.take_log() == []
    events, _ = read_trace(tmp_path / FILE)
    assert [(event.stage, event.event) for event in events] == [
        ("switch to score", "begin"),
        ("switch to score", "end"),
    ]


async def test_the_log_has_the_time_and_memory_of_a_switch():
    recorder = Recorder()
    sharing = shared(recorder)
    await sharing.enter("train", recorder, recorder)
    (entry,) = sharing.take_log()
    assert entry.pop("seconds") >= 0
    assert entry == {
        "from": None,
        "to": "train",
        "trainer_peak_bytes": 7.0,
        "trainer_bytes": 4.0,
        "used_bytes": 9.0,
    }


async def test_engines_start_only_without_trainer_memory_and_block_the_next_switch():
    recorder = Recorder()
    sharing = shared(recorder)
    async with sharing.room_to_start() as awake:
        assert awake is None, "before the first phase the trainer's memory is unknown"
    await sharing.enter("train", recorder, recorder)
    async with sharing.room_to_start() as awake:
        assert awake is None
    await sharing.enter("sample", recorder, recorder)
    async with sharing.room_to_start() as awake:
        assert awake is not None
        assert set(awake.engines) == set(ENGINE_PARTS)
        switch = asyncio.create_task(sharing.enter("score", recorder, recorder))
        await asyncio.sleep(0)
        assert (sharing.now, switch.done()) == ("sample", False)
    await switch
    assert sharing.now == "score"


async def test_after_a_failed_switch_no_engine_samples_until_the_next_switch():
    recorder = Recorder()
    sharing = shared(recorder)
    await sharing.enter("sample", recorder, recorder)
    recorder.fails = True
    with pytest.raises(TrainerError):
        await sharing.enter("score", recorder, recorder)
    assert (sharing.now, sharing.sampling, sharing.startable) == (None, False, False)
    recorder.fails = False
    await sharing.enter("sample", recorder, recorder)
    assert (sharing.sampling, recorder.engines, recorder.trainer) == (
        True,
        set(ENGINE_PARTS),
        set(),
    )


async def test_without_shared_gpus_no_call_is_made():
    recorder = Recorder()
    sharing = GpuSharing()
    await sharing.enter("train", recorder, recorder)
    assert (recorder.order, sharing.sampling, sharing.active) == ([], True, False)


def test_the_names_in_the_table_are_those_of_trainer_and_engines():
    assert set(TRAINER_PARTS) == set(PARTS)
    assert set(ENGINE_PARTS) == set(MEMORY_TAGS)
    assert all(callable(getattr(TrainerRank, method)) for method in PHASE_OF)
