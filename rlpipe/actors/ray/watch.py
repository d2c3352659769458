"""Detect that the Ray of this process has died, and leave it.

For a driver, Ray is dead when its GCS server or the raylet of the driver's node has ended. Ray
itself reports this late or never: calls to actors wait for ever, and a driver without a GCS server
is ended by Ray's own code after a minute, without an error that can be caught. So a thread checks
every half second. When Ray is dead, the thread

1. fails every waiting call (`calls.gather`), and every later call to actors of that Ray, with
   ActorLost,
2. kills the processes that a Ray of this process left running: actors, engines, router,
3. leaves the cluster, so that `local_ray.connect` can start or join another.

A Ray that this process started is dead when one of its processes has ended. A joined Ray is dead
when one of its two ports has refused `DEAD_AFTER_CHECKS` connections in a row.

Entry points: `watch_own`, `watch_joined`, `current`, `stop`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray._private import worker

from rlpipe.errors import ActorLost
from rlpipe.system.child_processes import ended_how

CHECK_INTERVAL_S = 0.5
DEAD_AFTER_CHECKS = 5
CONNECT_TIMEOUT_S = 3.0
LEAVE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET)
SERVERS = ("raylet", "gcs_server")
RAYLET_VARIABLE = "RAY_RAYLET_PID"
"""Ray sets this variable in each worker process; processes that an actor starts inherit it."""


class RayWatch:
    """A thread that watches one Ray."""

    def __init__(
        self, check: Callable[[], str | None], *, name: str, leave: Callable[[], None]
    ) -> None:
        """`check` returns why Ray is dead, or None. `name` of this Ray, for the error."""
        self._check = check
        self._name = name
        self._leave = leave
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._why: str | None = None
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        # A thread: the event loop of a flow may be blocked in a call to the dead Ray.
        self._thread = threading.Thread(target=self._run, name="Ray watch", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> ActorLost | None:
        """Error of the dead Ray; None while it is alive."""
        if self._why is None:
            return None
        do = (
            "the stage is tried again on another Ray; if the run ends, the same command continues "
            "from the newest commit"
        )
        return ActorLost("Ray has died", where=self._name, found=self._why, do=do)

    def until_lost(self) -> asyncio.Future[None]:
        """Return a future of the running loop that is done once Ray is dead.

        The caller cancels it after use.
        """
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        entry = (loop, waiting)
        with self._lock:
            self._waiting.add(entry)
            if self._why is not None:
                waiting.set_result(None)
        waiting.add_done_callback(lambda _: self._forget(entry))
        return waiting

    def wait_until_left(self) -> None:
        """Wait until the thread has left a dead Ray."""
        self._thread.join(LEAVE_TIMEOUT_S)

    def stop(self) -> None:
        """Stop watching, because this process leaves the cluster itself."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped.wait(CHECK_INTERVAL_S):
            if why := self._check():
                # first the waiting calls: `leave` may take seconds
                self._notify(why)
                self._leave()
                return

    def _notify(self, why: str) -> None:
        with self._lock:
            self._why = why
            waiting = list(self._waiting)
        for loop, future in waiting:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_set_done, future)

    def _forget(self, entry: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]) -> None:
        with self._lock:
            self._waiting.discard(entry)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_current: RayWatch | None = None


def watch_own() -> None:
    """Watch the Ray that this process has just started."""
    global _current
    node: Any = worker._global_node
    raylet = node.all_processes["raylet"][0].process.pid

    def check() -> str | None:
        ended = [
            (name, process.poll()) for name, process in node.dead_processes() if name in SERVERS
        ]
        return ", ".join(f"its {name}: {ended_how(status)}" for name, status in ended) or None

    def leave() -> None:
        # Ray leaves actors and the processes that they started running.
        end_workers(raylet)
        ray.shutdown()

    _current = RayWatch(check, name="the run's own Ray", leave=leave)


def watch_joined(address: str) -> None:
    """Watch the Ray that this process has just joined."""
    global _current
    own_node = ray.get_runtime_context().get_node_id()
    ports = {"GCS server": _host_and_port(ray.get_runtime_context().gcs_address)}
    for node in ray.nodes():
        if node["NodeID"] == own_node:
            ports["raylet of this node"] = (node["NodeManagerAddress"], node["NodeManagerPort"])
    missed = dict.fromkeys(ports, 0)

    def check() -> str | None:
        for name, (host, port) in ports.items():
            missed[name] = 0 if _accepts(host, port) else missed[name] + 1
            if missed[name] >= DEAD_AFTER_CHECKS:
                return f"its {name} at {host}:{port} accepts no connection"
        return None

    _current = RayWatch(check, name=f"the Ray at {address}", leave=ray.shutdown)


def current() -> RayWatch | None:
    """Return the watch of the Ray that this process uses or used last.

    None in a process that is no driver, such as an actor.
    """
    return _current


def stop() -> None:
    """Stop watching, before this process leaves its Ray."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


def end_workers(raylet_pid: int) -> None:
    """Kill every process that this raylet or its workers left running."""
    workers = [process for process in psutil.process_iter() if _is_below(process, raylet_pid)]
    for process in workers:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(workers, timeout=END_TIMEOUT_S)


def _is_below(process: psutil.Process, raylet_pid: int) -> bool:
    try:
        raylet = process.environ().get(RAYLET_VARIABLE)
        return process.pid != os.getpid() and raylet == str(raylet_pid)
    except (psutil.Error, OSError):
        return False


def _accepts(host: str, port: int) -> bool:
    """True unless the port refuses the connection or the host cannot be reached."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except (ConnectionRefusedError, TimeoutError):
        return False
    except OSError as error:
        # Other errors are of this process, such as too many open files, and do not concern Ray.
        return error.errno not in UNREACHABLE
    return True


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
