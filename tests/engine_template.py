"""Fork the servers of tests from a process that has imported SGLang. Not a test.

    with forked_engines():
        server.start()

The imports take 12 CPU seconds, most of a start. `tests/engines/sglang/test_process.py` starts a
server as usual. `tests.flows.shared_servers` is the template of whole runs.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

from rlpipe.system.forked import VARIABLE
from rlpipe.system.orphan import end_with
from rlpipe.system.template import ENVIRONMENT, ROOM, Template, listening
from tools.template import COMMAND_ROOM, usable

REPOSITORY = Path(__file__).resolve().parents[1]


@contextmanager
def forked_engines() -> Iterator[None]:
    """Fork servers that start in this block, if the machine has no GPU and enough memory."""
    variables = {}
    if usable():
        variables[VARIABLE], _ = _started()
    with patch.dict(os.environ, variables):
        yield


@cache
def _started() -> tuple[str, subprocess.Popen[bytes]]:
    """Start the template, and wait for its imports; return the path of its socket.

    The template ends with this process.
    """
    folder = Path(tempfile.mkdtemp(prefix="rlpipe-engines-"))
    atexit.register(shutil.rmtree, folder)
    path = folder / "template"
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    with listening(Path(f"{path}-engine")) as listener, path.with_suffix(".log").open("wb") as log:
        descriptor = listener.fileno()
        words = [str(os.getpid()), str(descriptor), " " * COMMAND_ROOM]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine_template", *words],
            pass_fds=[descriptor],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), **ROOM},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    # A client gives up after 20 s, in which the imports of a busy machine may not end.
    ready = any(line == b"ready\n" for line in process.stdout)
    assert ready, path.with_suffix(".log").read_text()
    return str(path), process


def main(parent: int, descriptor: int) -> None:
    """Import the packages of a server and fork this process for each client."""
    began_s = time.time()
    end_with(parent)
    from rlpipe.engines.sglang import cpu_launch

    cpu_launch.load()
    template = Template(socket.socket(fileno=descriptor), began_s)
    print("ready", flush=True)
    sys.exit(template.serve().run())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
