"""Replay of a branch from weight version 0 (rlpipe.actors.trainer.replay)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rlpipe.actors.trainer.replay import ComparedState, _on_ray, history_spans, replay
from rlpipe.config.load import validate_stored
from rlpipe.errors import ResourceError
from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage
from tests.actors.trainer.trained import OTHER_CPU, configuration, tiny_model, trained
from tools import replay as tool

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, local_ray: str) -> Path:
    """Home with the run `run`: warm start, three iterations, a segment of another CPU, two more."""
    home = tmp_path_factory.mktemp("home")
    asyncio.run(history(home, tiny_model(home / "model")))
    return home


async def history(home: Path, model: str) -> None:
    files = Files(home / "store")
    first = configuration(model, "warm")
    config = configuration(
        model, "run", model={"start_from": {"branch": "warm"}}, train={"optimizer": {"lr": 5e-4}}
    )
    async with trained(first, files, home) as warm:
        await warm.begin()
        await warm.iterate(2)
        checkpoint = await warm.checkpoint()
        run = await warm.set_up_for(config)
        await run.begin(start_from=checkpoint)
        await run.iterate(3)
        newest = run.branches.newest("run")
        assert newest is not None
    recorded = newest.nodes[Stage.TRAIN]
    async with trained(config, files, home, runtime_env=OTHER_CPU) as elsewhere:
        assert await elsewhere.trainer_states.restore(recorded, version=3, epoch=1) != recorded
    async with trained(config, files, home) as run:
        await run.iterate(2)


async def test_every_replayed_state_equals_the_record_through_warm_start_and_segment(home: Path):
    reported: list[ComparedState] = []
    result = await replay(Files(home / "store"), "run", home=home, on_state=reported.append)
    assert result.equal
    assert result.first_difference is None
    assert result.states == reported
    assert [(state.branch, state.stage, state.version) for state in reported] == [
        ("warm", "init", 0),
        ("warm", "train", 1),
        ("warm", "train", 2),
        ("warm", "checkpoint", 2),
        ("run", "init", 0),
        ("run", "train", 1),
        ("run", "train", 2),
        ("run", "train", 3),
        ("run", "segment", 3),
        ("run", "train", 4),
        ("run", "train", 5),
    ]
    assert json.loads(json.dumps(result.as_json()))["equal"]


async def test_on_another_cpu_the_replay_ends_at_the_first_different_state(home: Path):
    result = await replay(
        Files(home / "store"), "run", home=home, on_state=lambda _: None, runtime_env=OTHER_CPU
    )
    assert not result.equal
    assert [(state.stage, state.version, state.equal) for state in result.states] == [
        ("init", 0, True),
        ("train", 1, False),
    ]
    assert result.first_difference == result.states[-1]
    assert tool.summary(result).startswith("run: weight version 1 (train")


def test_the_command_line_reports_equal_states_and_a_missing_run(
    home: Path, monkeypatch, capsys, tmp_path: Path
):
    monkeypatch.setattr(tool, "disconnect", lambda: None)
    monkeypatch.setenv("RLPIPE_HOME", str(home))
    output = tmp_path / "replay.json"
    monkeypatch.setattr(
        "sys.argv", ["replay", "--run", "warm", "--home", str(home), "--json", str(output)]
    )
    assert tool.main() == 0
    assert "warm: 3 states, all bit for bit as recorded" in capsys.readouterr().out
    assert [state["equal"] for state in json.loads(output.read_text())["states"]] == [True] * 3
    monkeypatch.setattr("sys.argv", ["replay", "--run", "nothing", "--home", str(home)])
    assert tool.main() == 2
    assert "the run does not exist" in capsys.readouterr().err


def test_a_history_has_one_span_per_configuration(home: Path):
    files = Files(home / "store")
    warm, run = history_spans(files, "run")
    assert (warm.branch, len(warm.trains), run.branch, len(run.trains)) == ("warm", 2, "run", 5)
    assert warm.first_state == warm.init
    assert warm.next_first_state == warm.trains[-1].digest
    assert run.first_state == run.init
    assert run.next_first_state is None
    assert files.exists(f"nodes/checkpoint/{checkpoint_inputs(warm.trains[-1].digest).digest}.json")


def test_a_replay_runs_on_another_ray_than_the_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = validate_stored(Branches(Files(home / "store")).get("warm").config)
    there = {"ray_address": "127.0.0.1:1", "trainer_labels": {"kind": "reserved"}}
    of_cluster = config.model_copy(update={"resources": config.resources.model_copy(update=there)})
    assert _on_ray(of_cluster, None) == of_cluster
    assert _on_ray(of_cluster, "local") == config
    assert _on_ray(of_cluster, "b:2").resources.ray_address == "b:2"

    async def unreachable(*_: object, **__: object) -> None:
        raise ResourceError("Ray cannot be reached", where="resources.ray_address")

    monkeypatch.setattr(tool, "replay", unreachable)
    monkeypatch.setattr(tool, "disconnect", lambda: None)
    monkeypatch.setattr("sys.argv", ["replay", "--run", "warm", "--home", str(home)])
    assert tool.main() == 2
    assert tool.AGAIN in capsys.readouterr().err
