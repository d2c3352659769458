"""`FilesSync`: weights to engines through files: written by the trainer, brought to the engines'
machines, loaded by the servers.

    find the version, or let the trainer write it → each machine brings it, while its engines go on
    sampling → pause → flush → load → echo → continue

Only writing needs the trainer: an engine that comes back is given what is there already. A version
that no machine can bring, or no engine can load, is removed, so that the next push writes all of
it.

Not here: the files (`rlpipe.sync`), or what becomes of an engine that did not get them (the fleet).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rlpipe.actors.engines.fleet import Receivers, Weights
from rlpipe.actors.engines.kept_engine import KeptEngine
from rlpipe.actors.specs import ClusterSpec
from rlpipe.actors.trainer.group import TrainerGroup
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import RlpipeError, SyncError
from rlpipe.sync.session import Session, push_session
from rlpipe.sync.transports.base import PushReport
from rlpipe.sync.transports.versions import Version, WeightStore

CALL_TIMEOUT_S = 60.0
LEAST_S = 1.0
"""What is left of a push's time is never less."""


class FilesSync:
    """Of one run."""

    def __init__(self, spec: ClusterSpec, cluster: str) -> None:
        self.sync = spec.config.sync
        self.goes_on = not spec.config.resources.engines_sleep
        quantization = spec.config.engine.quantization
        self.store = WeightStore(self.sync.disk_dir(spec.store_root, quantization))
        local = self.sync.update_weight_local_checkpoint_dir
        in_place = (
            self.sync.transport == "disk" and self.store.directory is not None and local is None
        )
        copies = Path(local, cluster) if local else Path(spec.home, cluster, "weights")
        self.mirror = (
            None
            if in_place
            else copies.with_name(f"{copies.name}-{quantization}")
            if quantization
            else copies
        )
        """Where an engine's machine keeps its copy; None: engines load from the shared
        directory."""

    async def there(self, weights: Weights) -> bool:
        """Have these weights been written?"""
        return await asyncio.to_thread(self.store.find, weights.stamp) is not None

    async def send(
        self,
        weights: Weights,
        to: Receivers,
        kept: Sequence[KeptEngine],
        *,
        trainer: Callable[[], AbstractAsyncContextManager[TrainerGroup | None]],
        held: Callable[[], AbstractAsyncContextManager[None]],
    ) -> dict[str, Any] | None:
        """As `fleet.Send`, to those of the engines that are `kept`.

        `bytes` are those of the files, and `share` is their part of all weights. `trainer`: the
        trainer with these weights, or None if it may not be had. `held`: meanwhile no requests are
        sent. Raises: SyncError if no engine can load them; StoreError, StoreFull; what the trainer
        raises.
        """
        start_s = time.monotonic()
        version = await asyncio.to_thread(self.store.find, weights.stamp)
        if version is None:
            async with trainer() as group:
                if group is None:
                    return None
                start_s = time.monotonic()
                version = await self._write(group, weights)
        end_s = start_s + self.sync.timeout_s
        folders, unknown = await self._bring(weights.stamp, to.urls(), kept, end_s)
        async with held():
            urls = await to.begin(list(folders))
            report = await self._loaded(weights.stamp, {url: folders[url] for url in urls}, end_s)
            unknown |= report.unknown
            await to.end(unknown)
        share = version.size_bytes / max(version.full_bytes, 1)
        seconds = time.monotonic() - start_s
        outcome = {
            "share": share,
            "paused_s": report.paused_s,
            "steps": report.steps,
            "unknown": unknown,
        }
        return {"bytes": version.size_bytes, "seconds": seconds, **outcome}

    async def _write(self, trainer: TrainerGroup, weights: Weights) -> Version:
        """Let the trainer write a version. Older ones go once a full one is there."""
        base = await self._base(trainer, weights.stamp)
        await asyncio.to_thread(self.store.remove, weights.stamp)
        shares = await trainer.call(
            "write",
            held=weights.digest,
            stamp=weights.stamp,
            base=base.stamp if base else None,
            sync=self.sync,
            deadline_s=self.sync.timeout_s + CALL_TIMEOUT_S,
        )
        version = self.store.join(weights.stamp, base, self.sync, shares)
        await asyncio.to_thread(self.store.publish, version)
        if base is None and not self.sync.update_weight_disk_keep_files:
            await asyncio.to_thread(self.store.remove_others, version)
        return version

    async def _base(self, trainer: TrainerGroup, stamp: str) -> Version | None:
        """What changes can be written of: what all ranks remember, if it is there, and not the end
        of too long a chain."""
        if self.sync.transport != "delta":
            return None
        remembered = set(await trainer.call("remembers", deadline_s=CALL_TIMEOUT_S))
        base = remembered.pop() if len(remembered) == 1 else None
        if base is None or base == stamp:
            return None
        found = await asyncio.to_thread(self.store.find, base)
        return found if found and found.links < self.sync.update_weight_full_interval else None

    async def _bring(
        self, stamp: str, urls: Sequence[str], kept: Sequence[KeptEngine], end_s: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The folder that each engine can load, and why others have none. Raises: SyncError if none
        has one."""
        if self.mirror is None:
            return dict.fromkeys(urls, str(self.store.path(stamp))), {}
        engines = {engine.url: engine for engine in kept}
        found = dict(
            zip(
                urls,
                await asyncio.gather(
                    *(self._brought(stamp, engines.get(url), end_s) for url in urls)
                ),
                strict=True,
            )
        )
        folders = {url: folder for url, folder in found.items() if isinstance(folder, str)}
        unknown = {
            url: f"bring: {error}" for url, error in found.items() if isinstance(error, RlpipeError)
        }
        if not folders:
            await asyncio.to_thread(self.store.remove, stamp)
            raise SyncError(
                "no engine's machine has the weights", where=f"push of {stamp}", found=unknown
            )
        return folders, unknown

    async def _brought(
        self, stamp: str, engine: KeptEngine | None, end_s: float
    ) -> str | RlpipeError:
        if engine is None:
            return SyncError("its server is gone")
        try:
            return await engine.bring(self.store.root, stamp, str(self.mirror), _left(end_s))
        except RlpipeError as error:
            return error

    async def _loaded(self, stamp: str, folders: Mapping[str, str], end_s: float) -> PushReport:
        """Raises: SyncError if no engine could load its folder."""
        try:
            return await push_session(
                list(folders),
                stamp,
                lambda session: self._load(session, folders),
                timeout_s=_left(end_s),
            )
        except SyncError:
            await asyncio.to_thread(self.store.remove, stamp)
            raise

    async def _load(self, session: Session, folders: Mapping[str, str]) -> None:
        async def load(engine: Engine) -> None:
            await engine.update_from_disk(folders[engine.url], weight_version=session.stamp)

        await session.hold("retract" if self.sync.in_flight == "in_place" else "abort")
        await session.each("load", load)
        if self.sync.check_weight_update_equal:
            await session.overwrite()
            await session.each("load again", load)
            await session.compare()
        await session.resume(goes_on=self.goes_on)


def _left(end_s: float) -> float:
    return max(end_s - time.monotonic(), LEAST_S)
