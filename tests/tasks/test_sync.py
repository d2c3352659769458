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


@pytest.mark.parametrize(
    ("stamps", "samples", "calls"),
    [(["v"], 4, ["probe", "compare"]), (["v"], 0, []), ([None], 4, [])],
    ids=["four samples", "no samples", "no engine with weights"],
)
async def test_a_probe_has_the_metrics_of_rank_0_and_needs_samples_and_engines(
    stamps: list[str | None], samples: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
):
    called: list[str] = []
    measured = {"engine": "e", "difference": 1e-6, "largest": 2e-6, "noise": 1e-7}
    answer = [{**measured, "stale_share": None, "stale_error": None}]

    async def call(method: str, **_: Any) -> list[Any]:
        called.append(method)
        return [answer, []] if method == "compare" else []

    async def engines() -> list[dict[str, Any]]:
        return [{"url": "http://e", "stamp": stamp} for stamp in stamps]

    async def hold(*_: Any) -> str:
        return "w"

    monkeypatch.setattr(sync, "hold", hold)
    settings = SimpleNamespace(probe_samples=samples, timeout_s=1.0, max_logprob_difference=0.1)
    config = SimpleNamespace(
        run="run",
        sync=settings,
        engine=SimpleNamespace(quantization=None),
        model=SimpleNamespace(dtype="float32"),
    )
    cluster = SimpleNamespace(engines=engines, trainer=SimpleNamespace(call=call))
    run: Any = SimpleNamespace(config=config, cluster=cluster)
    metrics = await sync.probe(run, "w", "batch", 1)
    assert called == calls
    assert metrics.get("sync/logprob_difference") == (1e-6 if calls else None)
