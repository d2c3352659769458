"""A process that uses Ray stays master of its signals (rlpipe.actors.local_ray)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray

from rlpipe.actors.local_ray import connect
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import ResourceError

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from rlpipe.actors.local_ray import connect, disconnect
from rlpipe.config.model import ResourcesConfig

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
connect(ResourcesConfig(), Path(sys.argv[1]), namespace="signals")
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
disconnect()
sys.exit(7 if asked else 1)
"""


def test_an_address_where_no_cluster_is_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ResourceError, match=r"127.0.0.1:1: .*refused"):
        connect(ResourcesConfig(ray_address="127.0.0.1:1"), tmp_path, namespace="nowhere")


@pytest.mark.integration
def test_sigterm_is_heard_by_whom_it_was_before_ray_started(tmp_path: Path):
    assert subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=False).returncode == 7
