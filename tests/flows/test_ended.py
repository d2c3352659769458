"""Actors at the end of a run (flows.train.drive), without real actors."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from flows import train
from flows.stopping import Preempted, Stopping
from rlpipe.errors import StoreError
from tests.tasks.test_begin import config


@pytest.mark.parametrize(
    ("error", "cancelled", "ended"),
    [
        (Preempted("asked to stop"), True, True),
        (Preempted("asked to stop"), False, False),
        (StoreError("gone"), False, False),
    ],
    ids=["cancelled", "SIGTERM", "failed"],
)
async def test_a_cancelled_run_ends_its_actors_and_a_preempted_one_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, cancelled: bool, ended: bool
):
    message: list[Any] = []

    async def answer(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(train, "start_run", lambda *_, **__: answer(None))
    monkeypatch.setattr(train, "begin", lambda *_, **__: answer(0))
    monkeypatch.setattr(train, "context", lambda _: answer(None))
    monkeypatch.setattr(train, "Observer", lambda *_, **__: nullcontext())
    monkeypatch.setattr(train, "run_iterations", lambda *_: answer(error))
    monkeypatch.setattr(train, "is_being_cancelled", lambda: answer(cancelled))
    monkeypatch.setattr(train, "keep_if_held", lambda *_, **__: answer(message.append("kept")))
    monkeypatch.setattr(
        train, "close_context", lambda _, end_actors: answer(message.append(end_actors))
    )
    with pytest.raises(type(error)), Stopping(0) as stopping:
        await train.drive(config(), tmp_path, stopping, takeover=False)
    assert message == [*["kept"] * isinstance(error, Preempted), ended]
