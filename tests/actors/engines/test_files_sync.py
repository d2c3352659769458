"""Weights through files into a real engine (rlpipe.actors.engines.files_sync)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlpipe.errors import SyncError
from tests.actors.engines.through_files import NOWHERE, Kept, Push, weights
from tests.live_engine import Live, live_engine, make_model


@pytest.fixture
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Live:
    """The shared engine, and weights of this test that it will hold."""
    live = live_engine(request.config)
    live.model = make_model(tmp_path / "other", seed=41)
    return live


@pytest.mark.integration
@pytest.mark.parametrize(
    "sync",
    [
        {"transport": "disk"},
        {"transport": "disk", "update_weight_local_checkpoint_dir": "mirrors"},
        {"transport": "disk", "check_weight_update_equal": True},
        {"transport": "delta"},
        {
            "transport": "delta",
            "update_weight_delta_encoding": "overwrite",
            "check_weight_update_equal": True,
        },
    ],
)
async def test_after_each_push_the_engine_is_the_new_model(
    live: Live, tmp_path: Path, sync: dict[str, Any]
):
    push = Push(live, tmp_path, **sync)
    for version in (1, 2, 3):
        push.step()
        sent = await push(version)
        assert sent is not None
        assert sent["unknown"] == {}
        assert sent["bytes"] > 0
        assert await push.scores()
    assert push.log == [
        word for v in (1, 2, 3) for word in ("held", "begin", "end", "released", weights(v).stamp)
    ]
    versions = [
        folder.name[:14]
        for folder in sorted(Path(push.files.store.path(weights(3).stamp)).parent.iterdir())
    ]
    assert versions == [
        f"weight_v{v:06d}" for v in ((3,) if sync["transport"] == "disk" else (1, 2, 3))
    ]


@pytest.mark.integration
async def test_an_engine_that_comes_back_needs_no_trainer(live: Live, tmp_path: Path):
    push = Push(live, tmp_path, transport="delta")
    assert await push(1, free=False) is None
    assert push.log == [], "nothing was begun"
    await push(1)
    push.step()
    await push(2)
    push.files.mirror = tmp_path / "new machine"
    assert await push.files.is_written(weights(2))
    assert await push(2, free=False) is not None
    assert await push.scores()
    assert push.group.had == 2


@pytest.mark.integration
async def test_a_long_chain_ends_in_all_weights(live: Live, tmp_path: Path):
    push = Push(live, tmp_path, transport="delta", update_weight_full_interval=2)
    shares = []
    for version in range(1, 6):
        with torch.no_grad():
            push.group.model.model.norm.weight.mul_(1.01)
        sent = await push(version)
        assert sent is not None
        shares.append(sent["share"] >= 1)
    assert shares == [True, False, True, False, True]
    assert await push.scores()


@pytest.mark.integration
async def test_who_cannot_bring_or_load_them_is_unknown_and_the_others_are_current(
    live: Live, tmp_path: Path
):
    push = Push(live, tmp_path, transport="delta")
    push.kept += [Kept(NOWHERE), Kept("http://127.0.0.1:8", fails=True)]
    sent = await push(1)
    assert sent is not None
    assert sorted(sent["unknown"]) == ["http://127.0.0.1:8", NOWHERE]
    assert "its disk is full" in sent["unknown"]["http://127.0.0.1:8"]
    assert await push.scores()


@pytest.mark.integration
async def test_what_nobody_can_bring_is_removed_and_written_anew(live: Live, tmp_path: Path):
    push = Push(live, tmp_path, transport="delta")
    await push(1)
    push.step()
    push.kept[0].fails = True
    push.log = []
    with pytest.raises(
        SyncError, match=r"(?s)no engine's machine has the weights.*its disk is full"
    ):
        await push(2)
    assert push.log == [], "no engine was touched"
    assert not await push.files.is_written(weights(2))
    push.kept[0].fails = False
    sent = await push(2)
    assert sent is not None and sent["share"] >= 1
    assert await push.scores()


@pytest.mark.integration
async def test_what_nobody_can_load_is_removed_and_written_anew(live: Live, tmp_path: Path):
    push = Push(live, tmp_path, transport="disk")
    there = push.kept
    push.kept = [Kept(NOWHERE)]
    with pytest.raises(SyncError, match="the weights arrived nowhere"):
        await push(1)
    assert push.log == ["held", "begin", "released"]
    assert not await push.files.is_written(weights(1))
    push.kept = there
    await push(1)
    assert await push.scores()
    assert push.group.had == 2
