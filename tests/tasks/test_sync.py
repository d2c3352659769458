"""Pushes of weights as a stage (tasks.sync)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tasks import sync
from tasks.sync import publish_reused


@pytest.mark.parametrize(("committed", "published"), [(False, [("w", 119, True)]), (True, [])])
async def test_a_recorded_push_is_repeated_for_new_engines_until_the_iteration_is_committed(
    committed: bool, published: list[Any], monkeypatch: pytest.MonkeyPatch
):
    """A rollout in flight gave new engines version 118. Rollout 121 needs at least 119, and starts
    after the commit of iteration 118.
    """
    calls: list[Any] = []

    async def publish(_ctx: Any, weights: str, *, version: int, everyone: bool) -> dict[str, Any]:
        calls.append((weights, version, everyone))
        return {}

    monkeypatch.setattr(sync, "publish", publish)
    files = SimpleNamespace(exists=lambda name: committed)
    run: Any = SimpleNamespace(files=files, first_iteration=0, config=SimpleNamespace(run="run"))
    await publish_reused(run, 118, "w")
    assert calls == published
