"""Settings of transports that tests construct. Not a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlpipe.config.train import SyncConfig
from rlpipe.sync.transports.base import TransportSetup


def transport_setup(
    model_dir: str | Path,
    *,
    buffer_size_bytes: int = 40_000,
    timeout_s: float = 60.0,
    sync: SyncConfig | None = None,
    **fields: Any,
) -> TransportSetup:
    """Return the setup of one rank. `sync` replaces the other settings."""
    default = SyncConfig(update_weight_buffer_size=buffer_size_bytes, timeout_s=timeout_s)
    return TransportSetup(model_dir=model_dir, sync=sync or default, **fields)
