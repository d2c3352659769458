"""Joining a Ray cluster, or starting a local one for this process.

The local one is the embedded default: everything it writes goes under `{home}/.ray`, it takes no usage statistics, starts
no dashboard, and ends with the process that started it.

Not here: what runs on it (`cluster`).
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray

from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

LONGEST_SOCKET_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.12345")
CONNECT_TIMEOUT_S = 5.0
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
    if resources.ray_address:
        where: dict[str, Any] = {"address": resources.ray_address}
    else:
        where = {
            "num_cpus": resources.trainer_ranks + resources.critic_ranks + resources.rollout_num_gpus + 2,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(temporary_folder(home)),
        }
    try:
        if resources.ray_address:
            _listens(resources.ray_address)
        _init(**where, **common)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        address = resources.ray_address or "a local cluster"
        raise ResourceError(
            "Ray did not start or cannot be reached",
            where="resources.ray_address",
            found=f"{address}: {error}",
            do=f"check the address with `ray status`, or the logs under {home}/.ray",
        ) from error


def address() -> str:
    """`host:port` at which another process can join the cluster that this one is in."""
    return ray.get_runtime_context().gcs_address


def join(address: str, *, namespace: str) -> bool:
    """Make this process a driver of the cluster at `address`, if it is still there. Is it one now?"""
    try:
        _listens(address)
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        _init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, OSError, RuntimeError):
        return False
    return True


def _listens(address: str) -> None:
    """Ray itself asks for minutes where nobody answers. Raises: OSError. `auto` and such, which name no port, are left to Ray."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _init(**arguments: Any) -> None:
    """`ray.init`, after which SIGTERM is for whom it was before: Ray would print a stack and abort."""
    before = signal.getsignal(signal.SIGTERM)
    ray.init(**arguments)
    if threading.current_thread() is threading.main_thread() and before is not None:
        signal.signal(signal.SIGTERM, before)


def disconnect() -> None:
    """Leave the cluster; a local one ends with it."""
    if ray.is_initialized():
        ray.shutdown()


def temporary_folder(home: Path) -> Path:
    """`{home}/.ray`, or where that path is too long for Unix sockets (107 bytes) one in TMPDIR, else in /tmp."""
    name = f"rlpipe-ray-{os.getuid()}"
    places = (home / ".ray", Path(tempfile.gettempdir()) / name, Path("/tmp") / name)
    folder = next((place for place in places if len(str(place)) <= LONGEST_SOCKET_FOLDER), places[-1])
    folder.mkdir(parents=True, exist_ok=True)
    return folder
