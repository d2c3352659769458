"""Opening a run releases its epoch after a failure (tasks.context, without actors)."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tasks.context
from rlpipe.errors import DataError, Fenced, ResourceError
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import RunFile, write_run
from tasks.context import close_context, join_context, open_context
from tests.tasks.test_begin import config
from tools.train import context_warnings


async def test_a_run_can_be_opened_again_after_its_actors_failed_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(*_: Any, **__: Any) -> None:
        raise ResourceError("no room", where="resources")

    monkeypatch.setattr(tasks.context, "open_cluster", refuse)
    (tmp_path / "config.json").write_text("{}")
    run = config(
        run="mine", model={"source": {"type": "huggingface", "hf_checkpoint": str(tmp_path)}}
    )
    with pytest.raises(ResourceError, match="no room"):
        await open_context(run, tmp_path, Progress("mine", 3))
    assert Epochs(Files(tmp_path / "store")).acquire("mine", takeover=False).number == 2


async def test_a_prompt_too_long_for_a_made_model_is_refused_before_actors_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the actors start")

    monkeypatch.setattr(tasks.context, "open_cluster", refuse)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "label": "2"}\n' * 3)
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "1" * 600, "label": "2"}))
    maker = "deployments/recipes/tiny_models.py:make_spell_backward_model"
    prompts = {"type": "file", "paths": [str(tmp_path / "a.jsonl")]}
    held = {"name": "held", "prompts": {"type": "file", "paths": [str(tmp_path / "b.jsonl")]}}
    run = config(
        run="mine",
        model={"source": {"type": "made", "maker": maker}},
        data={"prompts": prompts},
        evaluation={"datasets": [held]},
    )
    with pytest.raises(DataError, match=r"(?s)the prompt is too long.*600 tokens.*at most 511"):
        await open_context(run, tmp_path, Progress("mine", 3))


async def test_a_response_limit_beyond_the_context_of_a_made_model_is_a_warning_once_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(*_: Any, **__: Any) -> None:
        raise ResourceError("no room", where="resources")

    monkeypatch.setattr(tasks.context, "open_cluster", refuse)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "label": "2"}\n')
    maker = "deployments/recipes/tiny_models.py:make_spell_backward_model"
    run = config(
        run="mine",
        model={"source": {"type": "made", "maker": maker}},
        data={"prompts": {"type": "file", "paths": [str(tmp_path / "a.jsonl")]}},
        rollout={
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 512,
        },
        evaluation={},
    )
    warned = []
    for _ in range(2):
        terminal = io.StringIO()
        with pytest.raises(ResourceError, match="no room"):
            await open_context(run, tmp_path, Progress("mine", 3, stream=terminal))
        warned.append("do not fit into the model's context of 512" in terminal.getvalue())
    # At the second start the model is there, and `rlpipe train` warns.
    assert warned == [True, False]
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    assert context_warnings(run)


async def test_a_run_can_be_opened_again_after_its_record_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tasks.context, "_run_file", full)
    with pytest.raises(OSError, match="No space left"):
        await open_context(config(run="mine"), tmp_path, Progress("mine", 3))
    assert Epochs(Files(tmp_path / "store")).acquire("mine", takeover=False).number == 2


@pytest.mark.parametrize(("run_count", "k", "alone"), [(1, 0, False), (2, 0, True), (2, 1, False)])
async def test_only_a_rescheduled_next_iteration_runs_without_a_driver(
    run_count: int, k: int, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def opened(*arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(epoch=arguments[-1])

    run = config(run="mine")
    files = Files(tmp_path / "store")
    Branches(files).create("mine", run.model_dump(mode="json"), "init")
    write_run(
        tmp_path,
        "mine",
        RunFile(store=files.root, config=run.model_dump(mode="json"), epoch=1, ray=None),
    )
    monkeypatch.setattr(tasks.context, "default_home", lambda: tmp_path)
    monkeypatch.setattr(tasks.context, "_open_run", opened)
    monkeypatch.setattr(
        tasks.context,
        "this_flow_run",
        SimpleNamespace(run_count=run_count, parameters={"run": "mine", "k": k}),
    )
    if alone:
        assert (await join_context("mine")).epoch.stand_in
    else:
        with pytest.raises(Fenced, match="it starts this task again"):
            await join_context("mine")


async def test_releasing_a_run_of_an_unreachable_store_does_not_block_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
):
    loop = asyncio.get_running_loop()
    heard = list[bool]()

    def release() -> None:
        back = threading.Event()
        loop.call_soon_threadsafe(back.set)
        heard.append(back.wait(5.0))

    ctx: Any = SimpleNamespace(epoch=SimpleNamespace(release=release))
    monkeypatch.setitem(tasks.context._OPEN, "mine", ctx)
    await close_context("mine", end_actors=False)
    assert heard == [True]
