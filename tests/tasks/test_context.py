"""Who may open a run, and that one which cannot be opened leaves nobody locked out (tasks.context,
without any actor)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tasks.context
from rlpipe.errors import Fenced, ResourceError
from rlpipe.observe.progress import Progress
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import RunFile, write_run
from tasks.context import close_context, join_context, open_context
from tests.tasks.test_begin import config


async def test_a_run_whose_actors_do_not_come_up_may_be_opened_again_at_once(
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


async def test_so_may_one_whose_record_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tasks.context, "_record", full)
    with pytest.raises(OSError, match="No space left"):
        await open_context(config(run="mine"), tmp_path, Progress("mine", 3))
    assert Epochs(Files(tmp_path / "store")).acquire("mine", takeover=False).number == 2


@pytest.mark.parametrize(("run_count", "k", "alone"), [(1, 0, False), (2, 0, True), (2, 1, False)])
async def test_an_iteration_goes_on_without_its_driver_if_it_was_put_back_and_is_the_next(
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
    monkeypatch.setattr(tasks.context, "_open", opened)
    monkeypatch.setattr(
        tasks.context,
        "this_flow_run",
        SimpleNamespace(run_count=run_count, parameters={"run": "mine", "k": k}),
    )
    if alone:
        assert (await join_context("mine")).epoch.stand_in
    else:
        with pytest.raises(Fenced, match="it puts this one back"):
            await join_context("mine")


async def test_a_store_that_is_away_when_a_run_is_let_go_holds_up_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
):
    loop = asyncio.get_running_loop()
    heard = list[bool]()

    def release() -> None:
        back = threading.Event()
        loop.call_soon_threadsafe(back.set)
        heard.append(back.wait(5.0))

    it: Any = SimpleNamespace(epoch=SimpleNamespace(release=release))
    monkeypatch.setitem(tasks.context._OPEN, "mine", it)
    await close_context("mine", end_actors=False)
    assert heard == [True]
