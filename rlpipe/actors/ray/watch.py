"""Notice that the Ray this process uses has died, and leave it.

A Ray is dead for a driver when its GCS server or the raylet of the driver's node has ended. Ray
itself says so late or not at all: calls to actors wait without an end, and a driver whose GCS
server is gone is ended by Ray's own code after a minute, without an error that anyone could catch.
So a thread looks every half second. When Ray is dead, the thread

1. fails every call that waits (`calls.gather`) with ActorLost, and every later one through actors
   of that Ray,
2. kills what the Ray of this process leaves running: actors, engines, router,
3. leaves the cluster, so that `local_ray.connect` can start or join one again.

The Ray that this process started is judged by its processes. Another one is judged by whether its
two ports accept a connection: after `DEAD_AFTER_LOOKS` looks in vain it counts as dead.

Not here: starting Ray again (`local_ray.connect`), and trying the stage again (`tasks.record`).
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

LOOK_INTERVAL_S = 0.5
DEAD_AFTER_LOOKS = 5
CONNECT_TIMEOUT_S = 3.0
LEAVE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET)
SERVERS = ("raylet", "gcs_server")
RAYLET_VARIABLE = "RAY_RAYLET_PID"
"""What Ray puts in the environment of each worker process; the processes that an actor starts
inherit it."""


class RayWatch:
    """The watch over one Ray. `look` answers why it is dead, or None."""

    def __init__(
        self, look: Callable[[], str | None], *, whose: str, leave: Callable[[], None]
    ) -> None:
        self._look = look
        self._whose = whose
        self._leave = leave
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._why: str | None = None
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        self._thread = threading.Thread(target=self._run, name="Ray watch", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> ActorLost | None:
        """Why nothing can be asked of this Ray any more; None while it is alive."""
        if self._why is None:
            return None
        do = "the stage is tried again on another Ray; if the run ends, the same command goes on from what is committed"
        return ActorLost("Ray has died", where=self._whose, found=self._why, do=do)

    def until_lost(self) -> asyncio.Future[None]:
        """A future of the running loop that is done once Ray is dead. Cancel it after use."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        entry = (loop, waiting)
        with self._lock:
            self._waiting.add(entry)
            if self._why is not None:
                waiting.set_result(None)
        waiting.add_done_callback(lambda _: self._forget(entry))
        return waiting

    def left(self) -> None:
        """Wait until a Ray that is dead has been left."""
        self._thread.join(LEAVE_TIMEOUT_S)

    def stop(self) -> None:
        """Look no more: this process leaves the cluster itself."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_INTERVAL_S):
            if why := self._look():
                self._tell(why)
                self._leave()
                return

    def _tell(self, why: str) -> None:
        with self._lock:
            self._why = why
            waiting = list(self._waiting)
        for loop, future in waiting:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, future)

    def _forget(self, entry: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]) -> None:
        with self._lock:
            self._waiting.discard(entry)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_current: RayWatch | None = None


def watch_own() -> None:
    """Watch over the Ray that this process has just started."""
    global _current
    node: Any = worker._global_node
    raylet = node.all_processes["raylet"][0].process.pid

    def look() -> str | None:
        ended = [
            (name, process.poll()) for name, process in node.dead_processes() if name in SERVERS
        ]
        return ", ".join(f"its {name}: {ended_how(status)}" for name, status in ended) or None

    def leave() -> None:
        end_workers(raylet)
        ray.shutdown()

    _current = RayWatch(look, whose="the run's own Ray", leave=leave)


def watch_joined(address: str) -> None:
    """Watch over the Ray that this process has just joined."""
    global _current
    here = ray.get_runtime_context().get_node_id()
    ports = {"GCS server": _place(ray.get_runtime_context().gcs_address)}
    for node in ray.nodes():
        if node["NodeID"] == here:
            ports["raylet of this node"] = (node["NodeManagerAddress"], node["NodeManagerPort"])
    missed = dict.fromkeys(ports, 0)

    def look() -> str | None:
        for name, (host, port) in ports.items():
            missed[name] = 0 if _accepts(host, port) else missed[name] + 1
            if missed[name] >= DEAD_AFTER_LOOKS:
                return f"its {name} at {host}:{port} accepts no connection"
        return None

    _current = RayWatch(look, whose=f"the Ray at {address}", leave=ray.shutdown)


def current() -> RayWatch | None:
    """The watch over the Ray that this process uses or has used last; None in a process that is no
    driver, such as an actor."""
    return _current


def stop() -> None:
    """Stop watching, before this process leaves its Ray."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


def end_workers(raylet_pid: int) -> None:
    """Kill every process that this raylet, or what it started, has left running."""
    left = [process for process in psutil.process_iter() if _is_below(process, raylet_pid)]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=END_TIMEOUT_S)


def _is_below(process: psutil.Process, raylet_pid: int) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(RAYLET_VARIABLE) == str(
            raylet_pid
        )
    except (psutil.Error, OSError):
        return False


def _accepts(host: str, port: int) -> bool:
    """True unless nobody listens. An error of this process, such as too many open files, says
    nothing about Ray."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except (ConnectionRefusedError, TimeoutError):
        return False
    except OSError as error:
        return error.errno not in UNREACHABLE
    return True


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
