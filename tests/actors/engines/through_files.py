"""Pushes through files into a real engine: what tests of them share. Not a test.

The trainer's ranks are writers in this process; what an engine's actor does for its machine is done
here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from rlpipe.actors.engines.engine import EngineActor
from rlpipe.actors.engines.files_sync import FilesSync
from rlpipe.actors.engines.fleet import Receivers, Weights
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.train import SyncConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import RlpipeError
from rlpipe.lineage.states import Lineage
from rlpipe.sync.transports.base import Push as PushOfRank
from rlpipe.sync.transports.base import TransportSetup
from rlpipe.sync.transports.registry import TRANSPORTS
from rlpipe.types import Stage, WeightVersion
from tests.live_engine import log_probs

RANKS = 2
NOWHERE = "http://127.0.0.1:9"


def weights(version: int) -> Weights:
    digest = f"{version:032x}"
    stamp = WeightVersion(branch="run", version=version, digest=digest).stamp()
    return Weights(digest, version, stamp, Lineage(Stage.INIT, "init", digest, "init"))


class Group:
    """As a trainer group: ranks that hold one model."""

    def __init__(self, store_root: str, model_dir: Path, model: Any, sync: SyncConfig) -> None:
        self.model = model
        self.had = 0
        self.ranks: list[Any] = [
            TRANSPORTS[sync.transport](
                TransportSetup(
                    model_dir=model_dir,
                    sync=sync,
                    rank=rank,
                    world_size=RANKS,
                    files_root=sync.disk_dir(store_root, None),
                )
            )
            for rank in range(RANKS)
        ]

    async def call(self, method: str, *, deadline_s: float, **arguments: Any) -> list[Any]:
        if method == "remembers":
            return [rank.remembered for rank in self.ranks]
        stamp = arguments["stamp"]
        base = arguments["base"]
        self.had += 1
        push = PushOfRank(stamp, base=base)
        return [rank.send(self.model.state_dict().items(), push) for rank in self.ranks]


class Kept:
    """As an engine of the fleet, on a machine of its own."""

    def __init__(self, url: str, *, fails: bool = False) -> None:
        self.url = url
        self.fails = fails

    async def fetch_weights(
        self, root: str, stamp: str, folder: str, deadline_s: float, *, before: str | None = None
    ) -> str:
        if self.fails:
            raise RlpipeError("its disk is full")
        actor = EngineActor.__new__(EngineActor)
        return await asyncio.to_thread(
            actor.fetch_weights, root, stamp, folder, deadline_s, before=before
        )


class Push:
    """Pushes to the shared engine, and notes what happened in what order."""

    def __init__(self, live: Any, folder: Path, **sync: Any) -> None:
        """`live` has a `model` (the trainer's), its `model_dir` and a `server`."""
        if local := sync.get("update_weight_local_checkpoint_dir"):
            sync["update_weight_local_checkpoint_dir"] = str(folder / local)
        config = SyncConfig.model_validate(
            {"update_weight_buffer_size": 20_000, "timeout_s": 60.0, **sync}
        )
        spec: Any = SimpleNamespace(
            config=SimpleNamespace(sync=config, engine=EngineConfig(), resources=ResourcesConfig()),
            store_root=str(folder / "store"),
            home=str(folder / "home"),
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
            try:
                yield
            finally:
                self.log.append("released")

        async def begin_push(urls: Sequence[str]) -> list[str]:
            self.log.append("begin")
            return list(urls)

        async def end_push(unknown: Mapping[str, str]) -> None:
            self.log.append("end")

        to = Receivers(lambda: [kept.url for kept in self.kept], begin_push, end_push, idle=True)
        return await self.files.send(
            weights(version), to, cast("Any", self.kept), trainer=trainer, loading=held
        )

    async def scores(self) -> bool:
        """Return whether engine and trainer compute the same log-probs."""
        async with Engine(self.live.server.url) as engine:
            ((*found,),) = await engine.score([[5, 9, 20, 31]])
            stamp = await engine.weight_version()
        self.log.append(stamp)
        return bool(np.allclose(found, log_probs(self.group.model, [5], [9, 20, 31]), atol=1e-4))

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.group.model.parameters():
                parameter.mul_(1.01)
