"""A Prefect server of a run's own (tools.local_prefect)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tools.local_prefect import listens

LISTENS = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(60)"


def test_who_listens_at_a_port_is_told_from_who_does_not():
    with socket.create_server(("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]
        assert listens(os.getpid(), port)
        child = subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            theirs = int(child.stdout.readline())
            assert listens(child.pid, theirs) and not listens(child.pid, port)
            assert listens(os.getpid(), theirs), "what a process has started listens for it"
        finally:
            child.kill()
            child.wait()
        assert not listens(child.pid, theirs)
    assert not listens(os.getpid(), port)
