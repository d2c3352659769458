"""Joining a Ray cluster, or starting a local one for this process.

The local one is the embedded default: everything it writes goes under `{home}/.ray`, it takes no usage statistics, starts
no dashboard, and ends with the process that started it.

Not here: what runs on it (`cluster`).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import ray

from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

LONGEST_SOCKET_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.12345")
OBJECT_STORE_BYTES = 256 * 1024**2


def connect(resources: ResourcesConfig, home: Path, *, namespace: str) -> None:
    """Make this process a Ray driver, unless it is one already.

    Raises: ResourceError if the cluster at `resources.ray_address` cannot be joined or a local one does not start.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"namespace": namespace, "log_to_driver": False, "configure_logging": False}
    try:
        if resources.ray_address:
            ray.init(address=resources.ray_address, **common)
        else:
            ray.init(
                num_cpus=resources.trainer_ranks + resources.rollout_num_gpus + 2,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(_temporary_folder(home)),
                **common,
            )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        address = resources.ray_address or "a local cluster"
        raise ResourceError(
            "Ray did not start or cannot be reached",
            where="resources.ray_address",
            found=f"{address}: {error}",
            do=f"check the address with `ray status`, or the logs under {home}/.ray",
        ) from error


def disconnect() -> None:
    """Leave the cluster; a local one ends with it."""
    if ray.is_initialized():
        ray.shutdown()


def _temporary_folder(home: Path) -> Path:
    """`{home}/.ray`, or a folder of the system's where that path is too long for Unix sockets (107 bytes)."""
    folder = home / ".ray"
    if len(str(folder)) > LONGEST_SOCKET_FOLDER:
        folder = Path(tempfile.gettempdir()) / f"rlpipe-ray-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
