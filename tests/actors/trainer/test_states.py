"""Restore of a state on a machine with other results (rlpipe.actors.trainer.states).

The trainers are real. The other machine is this one without its newer vector instructions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpipe.errors import Mismatch
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.lineage.states import state_node
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments, current_state
from rlpipe.types import Stage
from tests.actors.trainer.trained import OTHER_CPU, Trained, configuration, tiny_model, trained

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def home(tmp_path: Path, local_ray: str) -> Path:
    return tmp_path


async def newest_state(run: Trained) -> tuple[int, str]:
    """Return weight version and digest of the newest recorded state."""
    newest = run.branches.newest(run.config.run)
    assert newest is not None
    return newest.iteration + 1, newest.nodes[Stage.TRAIN]


async def test_on_another_cpu_the_branch_continues_from_one_segment_in_every_process(
    home: Path, model: str
):
    files = Files(home / "store")
    config = configuration(model, "run")
    async with trained(config, files, home) as run:
        await run.begin()
        await run.iterate(3)
        version, recorded = await newest_state(run)
    async with trained(config, files, home, runtime_env=OTHER_CPU) as run:
        held = await run.trainer_states.restore(recorded, version=version, epoch=1)
        assert held != recorded
        check_segment(run, held, recorded)
        again = await run.trainer_states.restore(recorded, version=version, epoch=1)
        assert again == held, "a later attempt in the same epoch uses the first segment"
        await run.iterate(1)
        assert [status["held"] for status in await run.trainer.call("status", deadline_s=60)] == [
            (await newest_state(run))[1]
        ]
        trained_from = run.nodes.get(Stage.TRAIN, (await newest_state(run))[1])
        assert trained_from.parents["before"] == held
        assert (
            run.nodes.get(Stage.ADVANTAGE, trained_from.parents["advantage"]).parents["before"]
            == held
        )
    async with trained(config, files, home) as run:
        assert await run.trainer_states.restore(held, version=version, epoch=2) == held
        answer = await run.trainer.call("status", deadline_s=60)
        assert [(status["held"], status["dirty"]) for status in answer] == [(held, False)]


def check_segment(run: Trained, held: str, recorded: str) -> None:
    """Check the segment's node, its checkpoint, and the branch's pointer."""
    node = state_node(run.nodes, held)
    recorded_node = run.nodes.get(Stage.TRAIN, recorded)
    first = run.branches.read("run", 0).nodes[Stage.TRAIN]
    outputs: dict[str, Any] = node.outputs
    assert node.stage is Stage.SEGMENT
    assert node.parents == {"weights": recorded, "base": run.branches.get("run").init}
    assert (outputs["recorded"], outputs["version"], outputs["replayed"]) == (
        recorded_node.outputs["state_digest"],
        3,
        3,
    )
    assert outputs["state_digest"] != outputs["recorded"]
    assert outputs["first_difference"] == first
    assert run.nodes.find(Stage.CHECKPOINT, checkpoint_inputs(held).digest)
    assert current_state(Segments(run.files), "run", 3, recorded) == held
    assert run.branches.read("run", 2).nodes[Stage.TRAIN] == recorded, "the commit is unchanged"


async def test_in_deterministic_mode_another_state_is_an_error_and_no_state_is_held(
    home: Path, model: str
):
    files = Files(home / "store")
    config = configuration(model, "run", deterministic=True)
    async with trained(config, files, home) as run:
        await run.begin()
        await run.iterate(2)
        version, recorded = await newest_state(run)
        first = run.branches.read("run", 0).nodes[Stage.TRAIN]
        outputs = await run.trainer.initialise(run.branches.get("run").init, None, deadline_s=60)
        assert outputs, "the trained state is gone"
        assert await run.trainer_states.restore(recorded, version=version, epoch=1) == recorded, (
            "on the same machine the state is the same"
        )
    before = sorted(files.list("branches"))
    async with trained(config, files, home, runtime_env=OTHER_CPU) as run:
        with pytest.raises(Mismatch) as caught:
            await run.trainer_states.restore(recorded, version=version, epoch=1)
        assert caught.value.where == f"nodes/train/{first}.json"
        answer = await run.trainer.call("status", deadline_s=60)
        assert [(status["held"], status["dirty"]) for status in answer] == [(None, True)]
    assert sorted(files.list("branches")) == before
    assert not files.list("nodes/segment")
