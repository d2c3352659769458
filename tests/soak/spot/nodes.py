"""A Ray cluster of labelled nodes on this machine. A node ends at once, as a spot machine does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from rlpipe.actors.ray import access

RESERVED = {"kind": "reserved"}
SPOT = {"kind": "spot"}
NODE = """
import json, sys, time
from ray._private.node import Node
from ray._private.parameter import RayParams
given = {name: value for name, value in json.loads(sys.argv[1]).items() if value is not None}
parameters = RayParams(
    node_ip_address="127.0.0.1",
    num_gpus=0,
    object_store_memory=80_000_000,
    include_log_monitor=False,
    include_dashboard=False,
    **given,
)
is_head = "gcs_address" not in given
node = Node(parameters, head=is_head, shutdown_at_exit=True, spawn_reaper=True)
print(node.gcs_address, flush=True)
time.sleep(10**6)
"""


class RayNode:
    """One node of the cluster: a process with raylet and workers below it."""

    def __init__(
        self, home: Path, labels: dict[str, str], num_cpus: int, head: str | None = None
    ) -> None:
        """`head`: address of the cluster to join; None starts one. Its token is the home's."""
        # Ray's sockets have paths of at most 107 characters.
        self._folder = tempfile.TemporaryDirectory(prefix="rlpipe-node-")
        spec = {
            "gcs_address": head,
            "labels": labels,
            "num_cpus": num_cpus,
            "temp_dir": self._folder.name,
        }
        self._log = (home / "nodes.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-c", NODE, json.dumps(spec)],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **access.settings(home), "RAY_worker_niceness": "0"},
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, f"the node did not start; see {home / 'nodes.log'}"

    def kill(self) -> None:
        """Kill all processes of the node at once. Ray knows of it 10 to 20 s later."""
        node = psutil.Process(self.process.pid)
        processes = [*node.children(recursive=True), node]
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=30)
        self._close()

    def end(self) -> None:
        """Let the node leave the cluster, and end it."""
        self.process.terminate()
        self._close()

    def _close(self) -> None:
        self.process.wait(60)
        self._log.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._folder.cleanup()
