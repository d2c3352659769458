"""Keep a process that has imported the packages of engines and actors, so that they start faster.

    python -m tools.template PID DESCRIPTORS
    python -m tools.template --unused KEPT SECONDS DESCRIPTORS

Engines and Ray's workers of a run on CPUs are forked from it (`rlpipe.system.template`). A run
starts it and uses it as soon as it is ready. It ends as the Prefect server of the home
(`tools.kept_server`). It is two processes, one for engines and one for workers: SGLang must not
find megatron-core. They inherit their listening sockets, so that a client that comes at once waits.

Without CUDA only: a process that was forked after a use of CUDA cannot use it.

Entry point: `template_of_run`.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import json
import os
import re
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module, metadata
from pathlib import Path

import psutil

import rlpipe
from flows.environment import keep_caches_in
from rlpipe.system import leftovers
from rlpipe.system.forked import VARIABLE
from rlpipe.system.orphan import end_with
from rlpipe.system.project import PROJECT
from rlpipe.system.template import ENVIRONMENT, ROOM, Template, listening
from tools.kept_server import TEMPLATE, KeptServer, end_when_unused, idle_s

PROGRAMS = {
    "engine": "rlpipe.engines.sglang.cpu_launch",
    "worker": "rlpipe.actors.ray.worker",
}
"""Template → module that imports its packages (`load`) and is its program (`main`)."""
MIN_FREE_BYTES = 4 * 1024**3
"""A run on a machine with less free memory has no template, which takes about 1 GiB."""
PR_SET_PDEATHSIG = 1
COMMAND_ROOM = 4000
"""Length of an unused word of the template's command line: forked processes show theirs there."""
SESSION = re.compile(
    r"_|SHLVL|(OLD)?PWD|TERM\w*|COLUMNS|LINES|DISPLAY|WINDOWID|PYTEST_CURRENT_TEST|\w*SESSION\w*"
    r"|(SSH|TMUX|STY|MAKE|MFLAGS|PREFECT|VSCODE|GNOME_TERMINAL|KONSOLE)\w*"
)
"""Variables that may differ between two runs of one template: no package of it reads them."""


@contextmanager
def template_of_run(home: Path, *, wanted: bool) -> Iterator[None]:
    """Let this process and its children use the template of a home; start it if it does not run.

    A template that the environment names already is used as it is. Raises: ConfigError for a wrong
    RLPIPE_PREFECT_IDLE_S.
    """
    kept = own = None
    if wanted and not os.environ.get(VARIABLE) and usable():
        keep_caches_in(home)
        kept = KeptServer.of_home(home, TEMPLATE)
    if kept is None:
        yield
        return
    if not idle_s():
        path = kept.path.with_name(f"template-{os.getpid()}")
        own = start([str(os.getpid())], path)
        leftovers.record(own.pid, f"{glob.escape(str(path))}*")
        os.environ[VARIABLE] = str(path)
    elif path := _find_or_start(kept):
        os.environ[VARIABLE] = path
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        kept.leave()
        if own is not None:
            own.kill()
            own.wait()
            leftovers.remove(own.pid)


def usable() -> bool:
    """True on a machine without CUDA that has enough memory."""
    return (
        metadata.version("torch").endswith("+cpu")
        and psutil.virtual_memory().available >= MIN_FREE_BYTES
    )


def _find_or_start(kept: KeptServer) -> str | None:
    """Return the path of the home's template; start it if it does not run, or does not fit.

    None: other runs use one that does not fit.
    """
    with kept.starting():
        settings = _settings_digest()
        kept.use()
        if path := kept.find(settings):
            return path
        kept.leave()
        if not kept.end():
            return None
        kept.use()
        process = start(["--unused", str(kept.path), str(idle_s())], kept.path)
        kept.keep(process.pid, str(kept.path), settings)
        return str(kept.path)


def _settings_digest() -> str:
    """Return a digest of what processes inherit from a template, and of what it has imported."""
    variables = {k: v for k, v in os.environ.items() if not SESSION.fullmatch(k)}
    limits = Path("/proc/self/limits").read_text()
    group = Path("/proc/self/cgroup").read_text()
    # A template notices changed files too. With another digest, the run starts a new one at once.
    sources = [Path(rlpipe.__file__).parent, *map(Path, site.getsitepackages())]
    changed = [
        (str(path), path.stat().st_mtime_ns) for path in [*sources, *sources[0].rglob("*.py")]
    ]
    program = [sys.executable, idle_s(), limits, group, os.nice(0), sorted(changed)]
    return hashlib.sha256(json.dumps([variables, program], sort_keys=True).encode()).hexdigest()


def start(life: list[str], path: Path) -> subprocess.Popen[bytes]:
    """Start a template. `life`: words that say when it ends. `path`: of its sockets and log."""
    # The flow imports rlpipe from the current folder, if it was started as `python -m tools.train`.
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), **ROOM}
    with ExitStack() as opened:
        log = opened.enter_context(path.with_suffix(".log").open("wb"))
        listeners = [opened.enter_context(listening(Path(f"{path}-{name}"))) for name in PROGRAMS]
        descriptors = [listener.fileno() for listener in listeners]
        words = [*life, *map(str, descriptors), " " * COMMAND_ROOM]
        return subprocess.Popen(
            [sys.executable, "-m", "tools.template", *words],
            pass_fds=descriptors,
            # A package `tools` of the current folder must not hide ours. Not -P, which processes
            # that are forked from the template would have too.
            cwd=PROJECT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def main(descriptors: list[int]) -> None:
    """Import the packages of both templates and serve."""
    began_s = time.time()
    listeners = {
        name: socket.socket(fileno=number)
        for name, number in zip(PROGRAMS, descriptors, strict=True)
    }
    import_module("torch")
    leader = os.getpid()
    own, other = ("engine", "worker") if os.fork() == 0 else ("worker", "engine")
    if own == "engine":
        _end_with_parent(leader)
    listeners[other].close()
    import_module(PROGRAMS[own]).load()
    request = Template(listeners[own], began_s).serve()
    sys.exit(request.run())


def _end_with_parent(parent: int) -> None:
    """Let the kernel end this process with its parent. A process forked from this one stays."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    if (word := sys.argv.pop(1)) == "--unused":
        end_when_unused(Path(sys.argv.pop(1)), float(sys.argv.pop(1)))
    else:
        end_with(int(word))
    main([int(word) for word in sys.argv[1:-1]])
