"""First weights are loaded again from their source and compared with the record
(rlpipe.actors.trainer.first_weights)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.actors.trainer.first_weights import check_first_weights, made_with
from rlpipe.config.train import TrainConfig
from rlpipe.errors import Mismatch
from rlpipe.lineage.states import lineage_to
from rlpipe.model_dir import model_fingerprint
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.gc import unreachable
from rlpipe.store.objects.files import Files
from rlpipe.store.retention import Retention, spare_checkpoints
from rlpipe.types import Node, Stage
from tests.actors.trainer.trained import Trained, configuration, tiny_model, trained


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(tiny_model(tmp_path / "model"))


def changed(model: Path) -> None:
    """Change one bit of the model file."""
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)


async def lose(run: Trained) -> None:
    """Kill all ranks, and start blank ones."""
    run.trainer.kill()
    await run.set_up_for(run.config)


def states(run: Trained, branch: str) -> list[str]:
    trains = [commit.nodes[Stage.TRAIN] for commit in run.branches.walk(branch)]
    return [
        run.nodes.get(Stage.TRAIN, digest).outputs["state_digest"] for digest in reversed(trains)
    ]


@pytest.mark.long
@pytest.mark.integration
async def test_a_run_that_loses_its_trainer_before_any_checkpoint_continues_bit_for_bit(
    tmp_path: Path, model: Path, local_ray: str
):
    files = Files(tmp_path / "store")
    async with trained(configuration(str(model), "whole"), files, tmp_path) as whole:
        await whole.begin()
        await whole.iterate(2)
        run = await whole.set_up_for(configuration(str(model), "run"))
        init = await run.begin()
        await lose(run)
        assert (
            await run.trainer_states.restore(init, version=0, epoch=1) == init
            and await run.trainer.held() == init
        )
        await run.iterate(1)
        await lose(run)
        await run.iterate(1)
        assert states(run, "run") == states(run, "whole")
        assert await run.trainer_states.restore(init, version=0, epoch=1) == init, (
            "also of ranks that have trained"
        )
    assert files.list("checkpoints") == []
    assert [path for path in unreachable(files, grace_s=-60) if not path.startswith("data/")] == []


@pytest.mark.long
@pytest.mark.integration
async def test_a_run_that_started_from_another_run_loads_that_checkpoint_again(
    tmp_path: Path, model: Path, local_ray: str
):
    files = Files(tmp_path / "store")
    async with trained(configuration(str(model), "source"), files, tmp_path) as source:
        await source.begin()
        await source.iterate(2)
        checkpoint = await source.checkpoint()
        await source.iterate(1)
        await source.checkpoint()
        warm = await source.set_up_for(configuration(str(model), "warm"))
        init = await warm.begin(checkpoint)
        await lose(warm)
        assert await warm.trainer_states.restore(init, version=0, epoch=1) == init
    assert spare_checkpoints(files, Retention(1), grace_s=-60) == [], (
        "`warm` starts from the older checkpoint"
    )
    path = warm.nodes.get(Stage.CHECKPOINT, checkpoint).files[0].path
    files.delete(path)
    assert files.url(path) in [finding.where for finding in check_branch(files, "warm")]


@pytest.mark.long
@pytest.mark.integration
async def test_weights_and_reference_of_a_changed_model_are_refused(
    tmp_path: Path, model: Path, local_ray: str
):
    files = Files(tmp_path / "store")
    config = configuration(str(model), "run", advantage={"reference": True})
    assert config.advantage.reference
    async with trained(config, files, tmp_path) as run:
        init = await run.begin()
        await run.iterate(1)
        await run.checkpoint()
        newest = run.branches.newest("run")
        assert newest is not None
        state = newest.nodes[Stage.TRAIN]
        changed(model)
        await lose(run)
        with pytest.raises(
            Mismatch,
            match=r"(?s)first weights of the run.*state_digest.*restore the earlier contents",
        ):
            await run.trainer_states.restore(init, version=0, epoch=1)
        assert lineage_to(run.nodes, state, init).base_stage is Stage.CHECKPOINT
        with pytest.raises(
            Mismatch,
            match=r"(?s)first weights of the run.*weights_digest.*restore the earlier contents",
        ):
            await run.trainer_states.restore(state, version=1, epoch=1)
        changed(model)
        assert await run.trainer_states.restore(state, version=1, epoch=1) == state


def spec(model: Path, **other: Any) -> Any:
    train = TrainConfig.model_validate(other)
    return SimpleNamespace(
        sources={},
        model_dir=str(model),
        work_dir=str(model.parent / "run"),
        world_size=2,
        train=train,
    )


def node(model: Path, **outputs: Any) -> Node:
    fingerprint = model_fingerprint(str(model), model.parent / "remembered.json")
    config = {
        "model": fingerprint,
        "layout": {"ranks": 2},
        "parallel": TrainConfig().parallel.identity(),
    }
    return Node(
        stage=Stage.INIT,
        digest="i",
        config=config,
        outputs={"made_with": made_with(TrainConfig()), "weights_digest": "w", **outputs},
    )


def test_an_equal_digest_does_not_read_the_directory_and_another_digest_is_an_error(
    tmp_path: Path, model: Path
):
    init = node(model)
    check_first_weights(init, spec(tmp_path / "gone"), "weights_digest", "w")
    with pytest.raises(
        Mismatch, match=r"(?s)weights_digest v .*weights_digest w .*check other inputs"
    ):
        check_first_weights(init, spec(model), "weights_digest", "v")


@pytest.mark.parametrize(
    ("train", "outputs"),
    [
        ({"parallel": {"tensor_model_parallel_size": 2}}, {}),
        ({"megatron": {"num_layers_in_first_pipeline_stage": 1}}, {}),
        ({}, {"made_with": {**made_with(TrainConfig()), "packages": {"mbridge": "another"}}}),
        ({}, {"made_with": None}),
    ],
)
def test_if_digests_are_not_comparable_the_contents_of_the_directory_are_compared(
    model: Path, train: dict, outputs: dict
):
    init = node(model, **outputs)
    check_first_weights(init, spec(model, **train), "weights_digest", "v")
    changed(model)
    with pytest.raises(Mismatch, match=r"(?s)contents.*restore the earlier contents"):
        check_first_weights(init, spec(model, **train), "weights_digest", "w")


@pytest.mark.long
@pytest.mark.integration
async def test_another_model_as_reference_is_loaded_again_and_compared(
    tmp_path: Path, model: Path, local_ray: str
):
    files = Files(tmp_path / "store")
    other = Path(tiny_model(tmp_path / "other", seed=5))
    config = configuration(
        str(model), "run", advantage={"reference": True}, reference={"ref_load": str(other)}
    )
    async with trained(config, files, tmp_path) as run:
        init = await run.begin()
        await run.iterate(1)
        await run.checkpoint()
        outputs = run.nodes.get(Stage.INIT, init).outputs
        assert outputs["reference_digest"] != outputs["weights_digest"]
        newest = run.branches.newest("run")
        assert newest is not None
        state = newest.nodes[Stage.TRAIN]
        await lose(run)
        assert await run.trainer_states.restore(init, version=0, epoch=1) == init
        await lose(run)
        assert await run.trainer_states.restore(state, version=1, epoch=1) == state
        changed(other)
        for digest, version in ((init, 0), (state, 1)):
            await lose(run)
            with pytest.raises(Mismatch, match="reference_digest"):
                await run.trainer_states.restore(digest, version=version, epoch=1)
