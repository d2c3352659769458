"""Weights through files into a real engine (rlpipe.actors.files_sync).

The trainer's ranks are writers in this process; what an engine's actor does for its machine is done here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlpipe.actors.files_sync import FilesSync
from rlpipe.actors.fleet import Weights
from rlpipe.config.train import SyncConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import RlpipeError, SyncError
from rlpipe.lineage import Lineage
from rlpipe.sync.disk import WeightWriter
from rlpipe.sync.mirror import Mirror
from rlpipe.sync.versions import WeightStore
from rlpipe.types import Stage, WeightVersion
from tests.live_engine import Live, live_engine, log_probs, make_model

RANKS = 2
NOWHERE = "http://127.0.0.1:9"


def weights(version: int) -> Weights:
    digest = f"{version:032x}"
    stamp = WeightVersion(branch="run", version=version, digest=digest).stamp()
    return Weights(digest, version, stamp, Lineage(Stage.INIT, "init", digest, "init"))


class Group:
    """As a trainer group: ranks that hold one model."""

    def __init__(self, store_root: str, model_dir: Path, model: Any, sync: SyncConfig) -> None:
        store = WeightStore(sync.disk_dir(store_root))
        self.model, self.had = model, 0
        self.ranks = [WeightWriter(store, model_dir, sync, rank=rank, world_size=RANKS) for rank in range(RANKS)]

    async def call(self, method: str, *, deadline_s: float, **arguments: Any) -> list[Any]:
        if method == "remembers":
            return [rank.remembered for rank in self.ranks]
        stamp, base = arguments["stamp"], arguments["base"]
        self.had += 1
        return [rank.write(self.model.state_dict().items(), stamp, base) for rank in self.ranks]


class Kept:
    """As an engine of the fleet, on a machine of its own."""

    def __init__(self, url: str, *, fails: bool = False) -> None:
        self.url, self.fails = url, fails

    async def bring(self, root: str, stamp: str, folder: str, deadline_s: float) -> str:
        if self.fails:
            raise RlpipeError("its disk is full")
        return str(Mirror(folder).bring(WeightStore(root), stamp, timeout_s=deadline_s))


class Push:
    """Pushes to the shared engine, and notes what happened in what order."""

    def __init__(self, live: Live, folder: Path, **sync: Any) -> None:
        if local := sync.get("update_weight_local_checkpoint_dir"):
            sync["update_weight_local_checkpoint_dir"] = str(folder / local)
        config = SyncConfig.model_validate({"update_weight_buffer_size": 20_000, "timeout_s": 60.0, **sync})
        spec: Any = SimpleNamespace(
            config=SimpleNamespace(sync=config), store_root=str(folder / "store"), home=str(folder / "home")
        )
        self.files = FilesSync(spec, "cluster")
        self.group = Group(spec.store_root, live.model_dir, live.model, config)
        self.live, self.log = live, list[str]()
        self.kept = [Kept(live.server.url)]

    async def __call__(self, version: int, *, free: bool = True) -> dict[str, Any] | None:
        @asynccontextmanager
        async def trainer() -> AsyncIterator[Any]:
            yield self.group if free else None

        @asynccontextmanager
        async def held() -> AsyncIterator[None]:
            self.log.append("held")
            yield
            self.log.append("released")

        async def begin() -> None:
            self.log.append("begin")

        urls = [kept.url for kept in self.kept]
        return await self.files.send(weights(version), urls, cast("Any", self.kept), trainer=trainer, held=held, begin=begin)

    async def scores(self) -> bool:
        """Does the engine compute what the trainer's model computes?"""
        async with Engine(self.live.server.url) as engine:
            ((*found,),) = await engine.score([[5, 9, 20, 31]])
            stamp = await engine.weight_version()
        self.log.append(stamp)
        return bool(np.allclose(found, log_probs(self.group.model, [5], [9, 20, 31]), atol=1e-4))

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.group.model.parameters():
                parameter.mul_(1.01)


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
        {"transport": "delta", "update_weight_delta_encoding": "overwrite", "check_weight_update_equal": True},
    ],
)
async def test_after_each_push_the_engine_is_the_new_model(live: Live, tmp_path: Path, sync: dict[str, Any]):
    push = Push(live, tmp_path, **sync)
    for version in (1, 2, 3):
        push.step()
        sent = await push(version)
        assert sent is not None
        assert sent["unknown"] == {}
        assert sent["bytes"] > 0
        assert await push.scores()
    assert push.log == [word for v in (1, 2, 3) for word in ("held", "begin", "released", weights(v).stamp)]
    versions = [folder.name[:14] for folder in sorted(Path(push.files.store.path(weights(3).stamp)).parent.iterdir())]
    assert versions == [f"weight_v{v:06d}" for v in ((3,) if sync["transport"] == "disk" else (1, 2, 3))]


@pytest.mark.integration
async def test_an_engine_that_comes_back_needs_no_trainer(live: Live, tmp_path: Path):
    push = Push(live, tmp_path, transport="delta")
    assert await push(1, free=False) is None
    assert push.log == [], "nothing was begun"
    await push(1)
    push.step()
    await push(2)
    push.files.mirror = tmp_path / "new machine"
    assert await push.files.there(weights(2))
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
async def test_who_cannot_bring_or_load_them_is_unknown_and_the_others_are_current(live: Live, tmp_path: Path):
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
    push.kept[0].fails, push.log = True, []
    with pytest.raises(SyncError, match=r"(?s)no engine's machine has the weights.*its disk is full"):
        await push(2)
    assert push.log == [], "no engine was touched"
    assert not await push.files.there(weights(2))
    push.kept[0].fails = False
    sent = await push(2)
    assert sent is not None and sent["share"] >= 1
    assert await push.scores()


@pytest.mark.integration
async def test_what_nobody_can_load_is_removed_and_written_anew(live: Live, tmp_path: Path):
    push = Push(live, tmp_path, transport="disk")
    there, push.kept = push.kept, [Kept(NOWHERE)]
    with pytest.raises(SyncError, match="the weights arrived nowhere"):
        await push(1)
    assert push.log == ["held", "begin", "released"]
    assert not await push.files.there(weights(1))
    push.kept = there
    await push(1)
    assert await push.scores()
    assert push.group.had == 2
