"""Joining a Ray cluster, or starting a local one for this process.

The local one is the embedded default: everything it writes goes under `{home}/.ray`, it takes no
usage statistics, starts no dashboard, serves only who has its token, on this machine, and ends with
the process that started it. Its GPUs are the process's alone, as far as runs are concerned.

Not here: what runs on it (`cluster`), the token (`ray_access`), the locks of GPUs (`gpu_locks`).
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address

from rlpipe.actors.ray import access as ray_access
from rlpipe.actors.ray import gpu_locks
from rlpipe.actors.ray import watch as ray_watch
from rlpipe.actors.ray.layout import shapes
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ActorLost, ResourceError

LONGEST_SOCKET_FOLDER = 107 - len(
    "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.12345"
)
CONNECT_TIMEOUT_S = 5.0
OBJECT_STORE_BYTES = 256 * 1024**2
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
JOINING = (
    "check the address with `ray status`; a driver has to be on a node of the cluster and see its raylet among the processes "
    "(on Kubernetes: shareProcessNamespace); who joins a cluster that asks for a token needs RAY_AUTH_MODE=token and "
    "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH (the cluster of `make up`: `. runs/.up/env`)"
)
SHARE = "resources.colocate=true has the engines on the trainer's GPUs; "
SIDES = {"shared": "trainer and engines together"}
_own = threading.Event()
"""Has this process started the Ray that it uses?"""


def connect(resources: ResourcesConfig, home: Path, *, namespace: str) -> None:
    """Make this process a Ray driver, unless it is one already. A Ray that has died is left, and
    another started or joined.

    Raises: ResourceError if the cluster at `resources.ray_address` or RAY_ADDRESS cannot be joined,
    or a local one not started.
    """
    dead = _leave_dead()
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    of_environment = os.environ.get("RAY_ADDRESS")
    address = resources.ray_address or (None if of_environment == "local" else of_environment)
    try:
        if address:
            _init(_way_in(address, home), address=address, namespace=namespace)
            ray_watch.watch_joined(address)
        else:
            _init(
                ray_access.settings(home),
                address="local",
                namespace=namespace,
                num_cpus=resources.trainer_ranks
                + resources.critic_ranks
                + resources.rollout_num_gpus
                + 2,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(temporary_folder(home)),
            )
            _own.set()
            ray_watch.watch_own()
    except (OSError, RayError, RuntimeError, ValueError) as error:
        raise ResourceError(
            "Ray did not start or cannot be reached",
            where="resources.ray_address"
            if resources.ray_address or not address
            else "RAY_ADDRESS",
            found="\n".join(
                [
                    *([f"the one in use has died: {dead.where}, {dead.found}"] if dead else []),
                    f"{address or 'a local cluster'}: {error}",
                    *([str(error.__cause__)] if error.__cause__ else []),
                ]
            ),
            do=JOINING if address else f"see the logs under {home}/.ray",
        ) from error


def _leave_dead() -> ActorLost | None:
    """Leave a Ray that has died, as far as that is not done yet: how it died. This process keeps
    its GPUs."""
    watch = ray_watch.current()
    dead = watch.lost if watch is not None else None
    if watch is None or dead is None:
        return None
    watch.left()
    ray_watch.stop()
    if ray.is_initialized():
        ray.shutdown()
    ray_access.restore()
    _own.clear()
    return dead


def address() -> str:
    """`host:port` at which another process can join the cluster that this one is in."""
    return ray.get_runtime_context().gcs_address


async def have_gpus(resources: ResourcesConfig, who: str, *, engines: bool = True) -> None:
    """Have the GPUs of a Ray that this process has started, which other runs on this machine would
    use too.

    Raises: ResourceError if they are fewer than trainer and `engines` ask for (no node will join
    this Ray), or another run has one of them for longer than `resources.start_timeout_s`.
    """
    if not _own.is_set() or not (seen := int(ray.cluster_resources().get("GPU", 0))):
        return
    asked = {
        what: number * width
        for what, (number, width) in shapes(resources).items()
        if engines or what != "engines"
    }
    if sum(asked.values()) > seen:
        raise ResourceError(
            "this machine has not enough GPUs",
            where="resources",
            found=f"{seen} (CUDA_VISIBLE_DEVICES: {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})",
            expected=" and ".join(
                f"{number} for {SIDES.get(what, f'the {what}')}" for what, number in asked.items()
            ),
            do=f"{'' if resources.colocate else SHARE}ask for fewer (resources.actor_num_gpus_per_node, rollout_num_gpus), or "
            "join a cluster with more (resources.ray_address); CUDA_VISIBLE_DEVICES= samples and trains on CPUs",
        )
    if resources.exclusive_gpus:
        await gpu_locks.hold(gpu_locks.visible(seen), who=who, timeout_s=resources.start_timeout_s)


def join(address: str, home: Path, *, namespace: str) -> bool:
    """Make this process a driver of the cluster that another process of this home is in, if it is
    still there. Is it one now?"""
    _leave_dead()
    try:
        _init(_way_in(address, home), address=address, namespace=namespace)
        ray_watch.watch_joined(address)
    except (OSError, RayError, RuntimeError):
        return False
    return True


def _way_in(address: str, home: Path) -> dict[str, str]:
    """What to join the Ray at this address with, beside the user's environment. One that listens on
    the loopback interface alone was started for a home, which is taken to be this one.

    Raises: OSError where nobody listens: Ray itself would ask for minutes. `auto` and such, which
    name no port, are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return {}
    _listens(host.strip("[]"), int(port))
    if host not in LOOPBACK:
        return {ray_access.BEYOND_THIS_MACHINE: "1"}
    try:
        if not ip_address(own := get_node_ip_address()).is_loopback:
            _listens(own, int(port))
            return {}
    except OSError:
        pass
    return ray_access.settings(home)


def _listens(host: str, port: int) -> None:
    """Raises: OSError if nobody does."""
    socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()


def _init(access: Mapping[str, str], **arguments: Any) -> None:
    """`ray.init`, after which SIGTERM is for whom it was before: Ray would print a stack and
    abort."""
    before = signal.getsignal(signal.SIGTERM)
    ray_access.use(access)
    try:
        ray.init(log_to_driver=False, configure_logging=False, **arguments)
    except BaseException:
        ray_access.restore()
        raise
    if threading.current_thread() is threading.main_thread() and before is not None:
        signal.signal(signal.SIGTERM, before)


def disconnect() -> None:
    """Leave the cluster; a local one ends with it."""
    watched = ray_watch.current() is not None
    ray_watch.stop()
    if ray.is_initialized():
        ray.shutdown()
    elif not watched:
        return
    ray_access.restore()
    _own.clear()
    gpu_locks.release()


def temporary_folder(home: Path) -> Path:
    """`{home}/.ray`, or where that path is too long for Unix sockets (107 bytes) one in TMPDIR,
    else in /tmp. Nobody else can look into it. Raises: ResourceError."""
    name = f"rlpipe-ray-{os.getuid()}"
    places = (home / ".ray", Path(tempfile.gettempdir()) / name, Path("/tmp") / name)
    folder = next(
        (place for place in places if len(str(place)) <= LONGEST_SOCKET_FOLDER), places[-1]
    )
    return ray_access.private(folder)
