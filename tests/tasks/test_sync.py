"""Pushes of weights as a stage (tasks.sync)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.lineage.stage_inputs import sync_inputs
from rlpipe.observe.progress import Progress
from rlpipe.types import NodeRef, Stage
from tasks import sync as sync_module
from tasks.sync import sync

TRAIN = NodeRef(stage=Stage.TRAIN, digest="w", reused=True, outputs={})
BATCH = NodeRef(stage=Stage.ADVANTAGE, digest="b", reused=True, outputs={})


@pytest.mark.parametrize(
    ("committed", "interval", "done", "published"),
    [
        (False, 1, 0, [("w", 119, True)]),
        (True, 1, 0, []),
        (False, 2, 0, []),
        (False, 2, 3, [("w", 119, True)]),
    ],
)
async def test_a_recorded_push_is_repeated_for_new_engines_until_the_iteration_is_committed(
    committed: bool,
    interval: int,
    done: int,
    published: list[Any],
    monkeypatch: pytest.MonkeyPatch,
):
    """A rollout in flight gave new engines version 118. Rollout 121 needs at least 119, and starts
    after the commit of iteration 118. Version 119 is pushed only if the interval divides it,
    with the iterations that slime has done.
    """
    calls: list[Any] = []

    async def publish(_ctx: Any, weights: str, *, version: int, everyone: bool) -> dict[str, Any]:
        calls.append((weights, version, everyone))
        return {}

    run: Any = SimpleNamespace(
        nodes=SimpleNamespace(find=lambda *_: sync_inputs("w").node(outputs={"version": 119})),
        files=SimpleNamespace(exists=lambda _name: committed),
        first_iteration=0,
        progress=Progress("run", 1),
        config=SimpleNamespace(
            run="run",
            debug=SimpleNamespace(load_debug_rollout_data=None),
            num_rollout=1000,
            start_rollout_id=done,
            sync=SimpleNamespace(update_weights_interval=interval),
        ),
    )

    async def context(_run: str) -> Any:
        return run

    monkeypatch.setattr(sync_module, "context", context)
    monkeypatch.setattr(sync_module, "publish", publish)
    stage: Any = sync
    # The function itself: a task would need Prefect's server.
    state = await stage.__wrapped__("run", 118, TRAIN, BATCH)
    assert state.name == "Reused"
    assert calls == published
