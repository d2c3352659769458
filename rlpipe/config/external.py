"""What cannot be, where others have started the engines or the router.

Not here: whether they are there and serve the right model, which is asked of them
(`rlpipe.engines.sglang.external`).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.train import SyncConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def external_problem(
    resources: ResourcesConfig, engine: EngineConfig, sync: SyncConfig, store_root: str | None
) -> str | None:
    """Why these cannot go together; None if they can."""
    if engine.router_url is not None and engine.router:
        return f"engine.router = {engine.router} is for a router that the run starts, and engine.router_url is another's: {LEAVE}"
    if not resources.external_engines:
        return None
    if engine.sglang:
        return f"engine.sglang = {engine.sglang} is for engines that the run starts, not for resources.external_engines: {LEAVE}"
    elsewhere = [
        url for url in resources.external_engines if urlsplit(url).hostname not in LOOPBACK
    ]
    if not elsewhere:
        return None
    if sync.transport == "tensor":
        return (
            f"sync.transport: tensor goes through this machine's memory, but engines are at {', '.join(elsewhere)}: take "
            f"distributed, or disk with a directory that their machines see too"
        )
    directory = sync.update_weight_disk_dir or store_root or ""
    copied = sync.transport == "delta" or (
        sync.transport == "disk" and "://" in directory.removeprefix("file://")
    )
    if copied and sync.update_weight_local_checkpoint_dir is None:
        return (
            f"sync.transport: {sync.transport} brings files to engines' machines, where the run has no process of its own for "
            f"{', '.join(elsewhere)}: name a directory that they see too in sync.update_weight_local_checkpoint_dir"
        )
    return None


LEAVE = "leave one of the two out"
