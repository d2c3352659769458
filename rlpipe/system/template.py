"""`Template`: a process that has imported large packages and forks itself for each program.

    request = Template(listener).serve()    # returns in a forked process only
    sys.exit(request.run())

A forked process has the arguments, environment, folder, standard streams and limits that the client
sent (`rlpipe.system.forked`), and starts without the imports. Two conditions make it equal to a
process that was started as usual:

- The template has one thread. A lock that another thread holds at a fork stays locked for ever.
- No file of an imported module has changed since the import. Else the template accepts no client,
  and clients start their programs as usual.

The template must not use CUDA, and must start no pool of threads: OpenBLAS and Arrow would start
some when they are imported (`ENVIRONMENT`).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.system import orphan
from rlpipe.system.forked import SIGNALS

ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Variables of a template without which its packages start threads."""
ROOM = {"RLPIPE_TEMPLATE_ROOM": " " * 8000}
"""More bytes in a template's environment, which forked processes overwrite (`_show`)."""
REQUEST_TIMEOUT_S = 10.0
MAX_REQUEST_BYTES = 200_000
NUM_DESCRIPTORS = 4


@dataclass(frozen=True)
class Request:
    """A request in the process that was forked for it."""

    module: str
    arguments: list[str]

    def run(self) -> Any:
        """Call the module's `main`."""
        module = importlib.import_module(self.module)
        # Processes that the program spawns import its main module again.
        sys.modules["__main__"] = module
        return module.main(self.arguments)


class Template:
    """Forks this process on request."""

    def __init__(self, listener: socket.socket, began_s: float) -> None:
        """`listener`: of `listening`. `began_s`: time before the first import, since the epoch."""
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._files = dict(_files())
        self._stale = any(changed_ns > 1e9 * began_s for changed_ns, _ in self._files.values())
        gc.collect()
        # Collections of forked processes would copy every page of what exists now.
        gc.freeze()

    def serve(self) -> Request:
        """Answer requests; return in the forked processes.

        Ends this process once a file has changed and all forked processes have ended.
        """
        while self._selector.get_map():
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._report(key)
                elif (client := self._accept()) is not None:
                    pid = os.fork()
                    if pid == 0:
                        self._close()
                        client.connection.close()
                        return _become(client.request, client.descriptors)
                    self._watch(pid, client)
        sys.exit(0)

    def _accept(self) -> _Client | None:
        """Return the next client; None if this process cannot be forked for it."""
        connection, _ = self._listener.accept()
        connection.settimeout(REQUEST_TIMEOUT_S)
        client = _Client(connection, {}, [])
        try:
            message, client.descriptors, _, _ = socket.recv_fds(
                connection, MAX_REQUEST_BYTES, NUM_DESCRIPTORS
            )
            client.request = json.loads(message)
        except (OSError, ValueError):
            client.close()
            return None
        if self._stale or any(self._files.get(name) != now for name, now in _files()):
            self._refuse_all()
        elif self._is_usable(client):
            return client
        client.close()
        return None

    def _refuse_all(self) -> None:
        """Refuse this and all later clients at once, also if another process has the socket."""
        self._selector.unregister(self._listener)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.setblocking(False)
        with suppress(OSError):
            while True:
                self._listener.accept()[0].close()
        self._listener.close()

    def _is_usable(self, client: _Client) -> bool:
        """True if a fork for this client is equal to a usual start."""
        return (
            len(client.descriptors) == NUM_DESCRIPTORS
            and client.request["nice"] >= os.nice(0)
            and len(list(Path("/proc/self/task").iterdir())) == 1
        )

    def _watch(self, pid: int, client: _Client) -> None:
        """Tell the client the process, and later its exit status (`_report`)."""
        descriptor = os.pidfd_open(pid)
        self._selector.register(descriptor, selectors.EVENT_READ, (pid, client.connection))
        try:
            socket.send_fds(client.connection, [str(pid).encode()], [descriptor])
        except OSError:
            # The client has stopped waiting, and starts its program as usual.
            os.kill(pid, signal.SIGKILL)
        client.close_descriptors()

    def _report(self, key: selectors.SelectorKey) -> None:
        pid, connection = key.data
        _, status = os.waitpid(pid, 0)
        with suppress(OSError):
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        self._selector.unregister(key.fileobj)
        os.close(key.fd)
        connection.close()

    def _close(self) -> None:
        """Close everything in a forked process: clients wait for the end of their connection."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                _, connection = key.data
                connection.close()
                os.close(key.fd)
        self._listener.close()
        self._selector.close()


@dataclass
class _Client:
    """A process that asks for a fork."""

    connection: socket.socket
    request: dict[str, Any]
    descriptors: list[int]

    def close(self) -> None:
        self.connection.close()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def listening(path: Path) -> socket.socket:
    """Return a socket for `Template`. Clients may connect before it serves, and wait."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def _files() -> Iterable[tuple[str, tuple[int, int]]]:
    """Yield the file of each imported module, with the time of its last change and its size."""
    for module in list(sys.modules.values()):
        name = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(name, str):
            try:
                status = os.stat(name)  # noqa: PTH116 - of 5000 files, at each fork
            except OSError:
                yield name, (0, 0)
            else:
                yield name, (status.st_mtime_ns, status.st_size)


def _become(request: dict[str, Any], descriptors: list[int]) -> Request:
    """Give this process, which has just been forked, what the client's child would have."""
    *streams, client = descriptors
    if request["leads_session"]:
        os.setsid()
    else:
        os.setpgid(0, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    environment: dict[str, str] = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["affinity"])
    os.nice(request["nice"] - os.nice(0))
    for number, limit in enumerate(request["limits"]):
        resource.setrlimit(number, limit)
    for name in SIGNALS:
        usual = signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL
        signal.signal(name, signal.SIG_IGN if name in request["ignored"] else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    sys.path[:] = request["path"]
    sys.argv = [str(importlib.import_module(request["module"]).__file__), *request["arguments"]]
    _show(environment, [sys.executable, "-m", request["module"], *request["arguments"]])
    if request["leads_session"]:
        orphan.end_with_descriptor(client)
    os.close(client)
    _use_threads(environment)
    return Request(request["module"], request["arguments"])


def _show(environment: dict[str, str], command: list[str]) -> None:
    """Let /proc/PID/cmdline and /proc/PID/environ show those of this process."""
    # Without this module the program names its process itself.
    if titles := sys.modules.get("setproctitle"):
        titles.setproctitle(" ".join(command))
    # `os.environ` has copies of its own since it was cleared.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(os.fsencode(f"{name}={value}\0") for name, value in environment.items())
    if len(text) < end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _use_threads(environment: dict[str, str]) -> None:
    """Set what libraries of a new process read or draw when they are loaded."""
    if random := sys.modules.get("numpy.random"):
        random.seed()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(_threads(environment, "OMP_NUM_THREADS"))
    for path in _loaded_openblas():
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"):
            if hasattr(library, name):
                threads = _threads(environment, "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
                getattr(library, name)(threads)


def _threads(environment: dict[str, str], *variables: str) -> int:
    """Return the number of the first variable that is set, else the number of CPUs."""
    # OMP_NUM_THREADS may have a number for each level of nesting.
    texts = (environment.get(name, "").partition(",")[0] for name in variables)
    return next((int(text) for text in texts if text.isdecimal()), len(os.sched_getaffinity(0)))


def _loaded_openblas() -> set[str]:
    """Return the paths of the OpenBLAS of NumPy and of SciPy."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "openblas" in line}
