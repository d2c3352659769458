"""Join a Ray cluster, or start a local one for this process.

The local Ray is the embedded default. It writes only below `{home}/.ray`, collects no usage
statistics, starts no dashboard, accepts only clients of this machine that have its token, and ends
with this process.

Entry points: `connect`, `begin_connecting` and `disconnect` for a driver, `join` for a tool that
inspects a running cluster, `claim_gpus` for the machine's GPUs.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import ray
from ray._private import parameter as ray_parameters
from ray._private import services as ray_services
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.util import get_node_ip_address

from rlpipe.actors.ray import access as ray_access
from rlpipe.actors.ray import gpu_locks
from rlpipe.actors.ray import watch as ray_watch
from rlpipe.actors.ray import worker as forked_worker
from rlpipe.actors.ray.layout import group_shapes
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ActorLost, ResourceError
from rlpipe.system import forked, leftovers

# The kernel limits the path of a Unix socket to 107 bytes.
LONGEST_SOCKET_FOLDER = 107 - len(
    "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.12345"
)
CONNECT_TIMEOUT_S = 5.0
NICENESS = "RAY_worker_niceness"
OBJECT_STORE_BYTES = 256 * 1024**2
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HOW_TO_JOIN = (
    "check the address with `ray status`; a driver must run on a node of the cluster and see its "
    "raylet among the processes (on Kubernetes: shareProcessNamespace); a cluster with a token "
    "needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH (the cluster of "
    "`rlpipe up`: `. $RLPIPE_HOME/.up/env`, by default runs/.up/env)"
)
HOW_TO_SHARE = "resources.colocate=true places the engines on the trainer's GPUs; "
GROUP_USERS = {"shared": "trainer and engines together"}
_started_here = threading.Event()
"""Set if this process started the Ray that it uses."""
_connecting = threading.Lock()
"""Held while a thread of this process starts, joins or leaves a Ray as a driver."""
_begun: Future[None] = Future()
"""Not done while a start of `begin_connecting`, or its `then`, runs."""
_begun.set_result(None)


def connect(resources: ResourcesConfig, home: Path, *, namespace: str) -> None:
    """Make this process a Ray driver, unless it is one already.

    A Ray that has died is left first, and another one is started or joined. Raises: ResourceError
    if the cluster at `resources.ray_address` or RAY_ADDRESS cannot be joined, or a local Ray cannot
    be started.
    """
    _begun.result()
    with _connecting:
        _connect(resources, home, namespace)
    # Ray's library replaces the handler in any thread, and `_init` restores it in the main thread.
    _install_sigterm_handler(signal.getsignal(signal.SIGTERM))


def begin_connecting(
    resources: ResourcesConfig,
    home: Path,
    *,
    namespace: str,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Start a local Ray in a thread, unless there is one or the run joins a cluster.

    `connect` waits for it. Ray's servers and first workers start while this process imports others.
    `then` is called in the thread once Ray runs; `connect` waits for this too, `disconnect` does
    not. Its errors are left to the call that needs the result.
    """
    global _begun
    joins = resources.ray_address or os.environ.get("RAY_ADDRESS", "local") != "local"
    if joins or ray.is_initialized() or not _begun.done():
        return
    began = threading.Event()
    begun: Future[None] = Future()
    # A cancelled wait must not cancel it.
    begun.set_running_or_notify_cancel()

    def start() -> None:
        # After a failure `connect` tries again and raises the error. The thread must not end.
        try:
            with suppress(Exception):
                with _connecting:
                    began.set()
                    _connect(resources, home, namespace)
                then()
        finally:
            begun.set_result(None)
        # Ray's servers end with the thread that started them (PR_SET_PDEATHSIG).
        threading.Event().wait()

    # Ray warns that a thread cannot set its SIGTERM handler, which `connect` would replace.
    ray_worker.logger.addFilter(_is_not_about_sigterm)
    # The process may end before it uses Ray.
    atexit.register(disconnect)
    _begun = begun
    threading.Thread(target=start, name="Ray start", daemon=True).start()
    # From here on, `connect` and `disconnect` wait for the thread's start of Ray.
    began.wait()


async def begun_start() -> None:
    """Wait as `connect` for a start that `begin_connecting` began; a cancelled wait ends at once.

    `asyncio.run` turns the first Ctrl-C into a cancelled task, which `connect` does not see.
    """
    await asyncio.wrap_future(_begun)


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("SIGTERM handler is not set")


def _connect(resources: ResourcesConfig, home: Path, namespace: str) -> None:
    dead = _leave_dead()
    if ray.is_initialized():
        return
    # before `ray.init`, and inherited by its processes
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    environment_address = os.environ.get("RAY_ADDRESS")
    # "local" is Ray's own name for a local cluster
    address = resources.ray_address or (
        None if environment_address == "local" else environment_address
    )
    try:
        if address:
            _init(_access_settings(address, home), address=address, namespace=namespace)
            ray_watch.watch_joined(address)
        else:
            _start(resources, home, namespace)
            _started_here.set()
            ray_watch.watch_own()
    except (OSError, RayError, RuntimeError, ValueError) as error:
        of_config = resources.ray_address or not address
        lines = [
            *([f"the Ray in use has died: {dead.where}, {dead.found}"] if dead else []),
            f"{address or 'a local cluster'}: {error}",
            # Ray repeats the message of some causes.
            *([str(error.__cause__)] if str(error.__cause__ or error) != str(error) else []),
        ]
        raise ResourceError(
            "Ray did not start or cannot be reached",
            where="resources.ray_address" if of_config else "RAY_ADDRESS",
            found="\n".join(lines),
            do=HOW_TO_JOIN
            if address
            else f"read the logs under {temporary_folder(home)}; on a busy machine, try again",
        ) from error


def _start(resources: ResourcesConfig, home: Path, namespace: str) -> None:
    # two CPUs more than bundles, for tasks that look at the placement
    num_cpus = resources.trainer_ranks + resources.critic_ranks + resources.rollout_num_gpus + 2
    leftovers.sweep()
    with _without_unused_processes():
        session = _init(
            {**ray_access.settings(home), **_niceness()},
            address="local",
            namespace=namespace,
            num_cpus=num_cpus,
            include_dashboard=False,
            # small: bulk data goes through the store, not through Ray
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(temporary_folder(home)),
        )
    # The next start removes it: until then its logs tell why a run failed.
    leftovers.record(os.getpid(), session)


@contextmanager
def _without_unused_processes() -> Iterator[None]:
    """Make `ray.init` start neither autoscaler nor log monitor nor API server.

    A local Ray gets no nodes, no driver shows the logs of workers, and the API server of a Ray
    without a dashboard only sends usage statistics, which are off. Together they took 1.5 CPU
    seconds of a start, which waited for the API server, and 0.06 of an iteration for polling.
    `ray.init` has no arguments for them; the parameters that it fills have, except for the server.
    """
    parameters = ray_parameters.RayParams
    start_api_server = ray_services.start_api_server
    fewer: dict[str, Any] = {"include_log_monitor": False, "no_monitor": True}
    if os.environ.get(forked.VARIABLE):
        fewer["worker_path"] = forked_worker.__file__
    ray_parameters.RayParams = partial(parameters, **fewer)
    ray_services.start_api_server = lambda *_, **__: ("", None)
    try:
        yield
    finally:
        ray_parameters.RayParams = parameters
        ray_services.start_api_server = start_api_server


def _niceness() -> dict[str, str]:
    """Return the variable that gives workers of a local Ray the priority of this process.

    By default Ray runs workers at nice 15, so any other program of the machine starves the run.
    """
    return {NICENESS: os.environ.get(NICENESS, "0")}


def _leave_dead() -> ActorLost | None:
    """Leave a Ray that has died. Return its error, or None if Ray is alive.

    This process keeps its GPU locks.
    """
    watch = ray_watch.current()
    dead = watch.lost if watch is not None else None
    if watch is None or dead is None:
        return None
    watch.wait_until_left()
    ray_watch.stop()
    if ray.is_initialized():
        ray.shutdown()
    ray_access.restore()
    _started_here.clear()
    return dead


def address() -> str:
    """Return `host:port` of the cluster that this process uses."""
    return ray.get_runtime_context().gcs_address


async def claim_gpus(resources: ResourcesConfig, owner: str, *, engines: bool = True) -> None:
    """Check and lock the GPUs of a Ray that this process started.

    Do nothing on a joined cluster, which schedules its GPUs itself. `engines`: False if the run has
    none. Raises: ResourceError if the machine has too few GPUs, or another run holds one for longer
    than `resources.start_timeout_s`.
    """
    num_gpus = int(ray.cluster_resources().get("GPU", 0)) if _started_here.is_set() else 0
    if not num_gpus:
        return
    needed = {
        use: bundles * width
        for use, (bundles, width) in group_shapes(resources).items()
        if engines or use != "engines"
    }
    # No other node joins a local Ray, so too few GPUs would only end in a placement timeout.
    if sum(needed.values()) > num_gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ResourceError(
            "this machine has not enough GPUs",
            where="resources",
            found=f"{num_gpus} (CUDA_VISIBLE_DEVICES: {visible})",
            expected=" and ".join(
                f"{count} for {GROUP_USERS.get(use, f'the {use}')}" for use, count in needed.items()
            ),
            do=f"{'' if resources.shares_gpus else HOW_TO_SHARE}ask for fewer "
            "(resources.actor_num_gpus_per_node, rollout_num_gpus), or join a cluster with more "
            "(resources.ray_address); an empty CUDA_VISIBLE_DEVICES samples and trains on CPUs",
        )
    if resources.exclusive_gpus:
        gpus = gpu_locks.visible(num_gpus)
        await gpu_locks.hold(gpus, owner=owner, timeout_s=resources.start_timeout_s)


def join(address: str, home: Path, *, namespace: str) -> bool:
    """Join the cluster of another process of this home. Return False if it is gone."""
    _leave_dead()
    try:
        _init(_access_settings(address, home), address=address, namespace=namespace)
        ray_watch.watch_joined(address)
    except (OSError, RayError, RuntimeError):
        return False
    return True


def _access_settings(address: str, home: Path) -> dict[str, str]:
    """Return the variables to join the Ray at this address, in addition to the user's environment.

    A Ray that listens only on the loopback interface was started for a home, which is taken to be
    this one. Raises: OSError if the port accepts no connection.
    """
    host, _, port = address.rpartition(":")
    # `auto` and similar addresses have no port; Ray resolves them
    if not host or not port.isdecimal() or "/" in host:
        return {}
    # Ray itself would try to connect for minutes.
    _check_listening(host.strip("[]"), int(port))
    if host not in LOOPBACK:
        return {ray_access.BEYOND_THIS_MACHINE: "1"}
    try:
        machine_address = get_node_ip_address()
        if not ip_address(machine_address).is_loopback:
            _check_listening(machine_address, int(port))
            return {}
    except OSError:
        pass
    return ray_access.settings(home)


def _check_listening(host: str, port: int) -> None:
    """Raises: OSError if the port accepts no connection."""
    socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()


def _init(access: Mapping[str, str], **arguments: Any) -> Path:
    """Call `ray.init` with these access variables, and keep the SIGTERM handler.

    Returns the folder of Ray's session. Raises: OSError, RayError, RuntimeError, ValueError.
    """
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    ray_access.apply(access)
    try:
        context: Any = ray.init(log_to_driver=False, configure_logging=False, **arguments)
    except BaseException as error:
        ray_access.restore()
        # Ray raises a plain Exception if its processes do not answer in 30 s, as on a busy machine.
        if type(error) is Exception:
            raise RuntimeError(str(error)) from error
        raise
    # Ray installs a handler that prints a stack and aborts.
    _install_sigterm_handler(sigterm_handler)
    return Path(context.address_info["session_dir"])


def _install_sigterm_handler(handler: Any) -> None:
    """Install the handler that `signal.getsignal` returned. Python allows it in the main thread."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def disconnect() -> None:
    """Leave the cluster. A local Ray ends.

    Do not wait for `then` of `begin_connecting`: it may read a store that does not answer.
    """
    with _connecting:
        if not _begun.done():
            # The first call of Ray in `then` would start a Ray that no process ends.
            os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
        _disconnect()


def _disconnect() -> None:
    watched = ray_watch.current() is not None
    ray_watch.stop()
    if ray.is_initialized():
        ray.shutdown()
    elif not watched:
        return
    ray_access.restore()
    _started_here.clear()
    gpu_locks.release()  # last: the actors that used the GPUs have ended
    leftovers.sweep()


def temporary_folder(home: Path) -> Path:
    """Return a private folder for Ray's files: `{home}/.ray` if its path is short enough.

    A longer path does not fit into the 107 bytes of a Unix socket; then the folder is in TMPDIR,
    else in /tmp. Raises: ResourceError if it belongs to another user.
    """
    name = f"rlpipe-ray-{os.getuid()}"
    candidates = (home / ".ray", Path(tempfile.gettempdir()) / name, Path("/tmp") / name)
    folder = next(
        (path for path in candidates if len(str(path)) <= LONGEST_SOCKET_FOLDER), candidates[-1]
    )
    return ray_access.private_folder(folder)
