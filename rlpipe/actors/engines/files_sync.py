"""`FilesSync`: send weights to engines through files (`sync.transport` is `disk` or `delta`).

    find the version, or have the trainer write it → each machine fetches it while its engines
    sample → pause → flush → load → check the stamp → resume

Only the write needs the trainer. A restarted engine gets the published version without it. A
version that no machine can fetch or no engine can load is removed, so that the next push writes
all weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rlpipe.actors.engines.fleet import Receivers, Weights
from rlpipe.actors.engines.supervised import SupervisedEngine
from rlpipe.actors.specs import ClusterSpec
from rlpipe.actors.trainer.group import TrainerGroup
from rlpipe.config.weight_file_hooks import post_write
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import RlpipeError, SyncError
from rlpipe.slime.args import slime_args
from rlpipe.sync.session import PushReport, Session, run_session
from rlpipe.sync.transports.versions import Version, WeightStore
from rlpipe.system.parts import Parts

CALL_TIMEOUT_S = 60.0
MIN_REMAINING_S = 1.0
"""A step gets at least this time, also after the push's deadline."""


class FilesSync:
    """Pushes of one run through files."""

    def __init__(self, spec: ClusterSpec, cluster: str) -> None:
        self.sync = spec.config.sync
        self.resume = not spec.config.resources.engines_sleep
        quantization = spec.config.engine.quantization
        self.store = WeightStore(self.sync.disk_dir(spec.store_root, quantization))
        self._args = None
        if self.sync.custom_update_weight_post_write_path is not None:
            self._args = slime_args(spec.config)
        self.mirror = self._mirror_folder(spec, cluster, quantization)
        """Folder of an engine's machine for its copy; None: engines load from the shared
        directory."""

    def _mirror_folder(
        self, spec: ClusterSpec, cluster: str, quantization: str | None
    ) -> Path | None:
        local = self.sync.update_weight_local_checkpoint_dir
        if self.sync.transport == "disk" and self.store.directory is not None and local is None:
            return None
        folder = Path(local, cluster) if local else Path(spec.home, cluster, "weights")
        return folder.with_name(f"{folder.name}-{quantization}") if quantization else folder

    async def is_written(self, weights: Weights) -> bool:
        """True if the store has these weights."""
        return await asyncio.to_thread(self.store.find, weights.stamp) is not None

    async def send(
        self,
        weights: Weights,
        to: Receivers,
        engines: Sequence[SupervisedEngine],
        *,
        trainer: Callable[[], AbstractAsyncContextManager[TrainerGroup | None]],
        loading: Callable[[], AbstractAsyncContextManager[None]],
    ) -> dict[str, Any] | None:
        """Send weights as `fleet.Send` does.

        `engines`: all engines of the fleet, which fetch for their machines.
        `trainer`: gives the trainer with these weights; None if it is not available, and then the
        result is None.
        `loading`: context of the load, in which the caller holds requests.
        In the result, `bytes` are those of the files, and `share` is their part of all weights.
        Raises: SyncError if no engine can load them; StoreError, StoreFull; errors of the trainer.
        """
        start_s = time.monotonic()
        parts = Parts()
        version = await asyncio.to_thread(self.store.find, weights.stamp)
        if version is None:
            async with trainer() as group:
                if group is None:
                    return None
                # Restoring the trainer has its own deadline.
                start_s = time.monotonic()
                with parts.part("write"):
                    version = await self._write(group, weights, to.urls())
        # Also for a version that an earlier attempt wrote: it can have ended before this call.
        where = self.store.location(weights.stamp)
        await asyncio.to_thread(post_write, self.sync, self._args, where, to.urls())
        end_s = start_s + self.sync.timeout_s
        with parts.part("fetch"):
            folders, unknown = await self._fetch(weights.stamp, to.urls(), engines, end_s)
        async with loading():
            urls = await to.begin_push(list(folders))
            report = await self._load_all(weights.stamp, {url: folders[url] for url in urls}, end_s)
            unknown |= report.unknown
            await to.end_push(unknown)
        return {
            "bytes": version.size_bytes,
            "seconds": time.monotonic() - start_s,
            "share": version.size_bytes / max(version.full_bytes, 1),
            "paused_s": report.paused_s,
            "steps": {**parts.seconds, **report.steps},
            "unknown": unknown,
        }

    async def _write(
        self, trainer: TrainerGroup, weights: Weights, engines: Sequence[str]
    ) -> Version:
        """Have the trainer write a version. Remove older ones after a full version."""
        base = await self._base(trainer, weights.stamp)
        await asyncio.to_thread(self.store.remove, weights.stamp)
        shares = await trainer.call(
            "write",
            held=weights.digest,
            stamp=weights.stamp,
            base=base.stamp if base else None,
            sync=self.sync,
            engines=list(engines),
            deadline_s=self.sync.timeout_s + CALL_TIMEOUT_S,
        )
        version = self.store.join(weights.stamp, base, self.sync, shares)
        await asyncio.to_thread(self.store.publish, version)
        if base is None and not self.sync.update_weight_disk_keep_files:
            await asyncio.to_thread(self.store.remove_others, version)
        return version

    async def _base(self, trainer: TrainerGroup, stamp: str) -> Version | None:
        """Return the version to write changes of; None to write all weights.

        All ranks must remember it, the store must have it, and its chain must not be too long.
        """
        if self.sync.transport != "delta":
            return None
        stamps = set(await trainer.call("remembers", deadline_s=CALL_TIMEOUT_S))
        base_stamp = stamps.pop() if len(stamps) == 1 else None
        if base_stamp is None or base_stamp == stamp:
            return None
        base = await asyncio.to_thread(self.store.find, base_stamp)
        return base if base and base.links < self.sync.update_weight_full_interval else None

    async def _fetch(
        self, stamp: str, urls: Sequence[str], engines: Sequence[SupervisedEngine], end_s: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the folder of each engine, and the reason for each engine without one.

        Raises: SyncError if no engine has a folder.
        """
        if self.mirror is None:
            return dict.fromkeys(urls, str(self.store.path(stamp))), {}
        by_url = {engine.url: engine for engine in engines}
        results = await asyncio.gather(
            *(self._fetch_one(stamp, by_url.get(url), end_s) for url in urls)
        )
        folders: dict[str, str] = {}
        unknown: dict[str, str] = {}
        for url, result in zip(urls, results, strict=True):
            if isinstance(result, RlpipeError):
                unknown[url] = f"fetch: {result}"
            else:
                folders[url] = result
        if not folders:
            await asyncio.to_thread(self.store.remove, stamp)
            raise SyncError(
                "no engine's machine has the weights", where=f"push of {stamp}", found=unknown
            )
        return folders, unknown

    async def _fetch_one(
        self, stamp: str, engine: SupervisedEngine | None, end_s: float
    ) -> str | RlpipeError:
        if engine is None:
            return SyncError("the engine's server is gone")
        try:
            return await engine.fetch_weights(
                self.store.root,
                stamp,
                str(self.mirror),
                _remaining(end_s),
                before=self.sync.custom_pull_weights_pre_read_path,
            )
        except RlpipeError as error:
            return error

    async def _load_all(self, stamp: str, folders: Mapping[str, str], end_s: float) -> PushReport:
        """Have each engine load its folder. Raises: SyncError if no engine can."""
        try:
            return await run_session(
                list(folders),
                stamp,
                lambda session: self._load(session, folders),
                timeout_s=_remaining(end_s),
            )
        except SyncError:
            await asyncio.to_thread(self.store.remove, stamp)
            raise

    async def _load(self, session: Session, folders: Mapping[str, str]) -> None:
        async def load(engine: Engine) -> None:
            await engine.update_from_disk(folders[engine.url], weight_version=session.stamp)

        mode = "retract" if self.sync.in_flight == "in_place" else "abort"
        await session.open(mode, begin=False)
        await session.each("load", load)
        if self.sync.check_weight_update_equal:
            await session.overwrite()
            await session.each("load again", load)
            await session.compare()
        await session.resume(sampling=self.resume)


def _remaining(end_s: float) -> float:
    return max(end_s - time.monotonic(), MIN_REMAINING_S)
