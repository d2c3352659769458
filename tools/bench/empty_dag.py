"""CPU seconds of Prefect itself: iterations whose six stages do nothing.

    python -m tools.bench.empty_dag --iterations 60

A flow runs a subflow for each iteration, which runs six tasks one after another, as a train run
does. The server is one like that of a train run, with a database of its own. The difference to
the flow process and the server of a real run is the work of rlpipe in these two processes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from tools.local_prefect import local_prefect

STAGES = ("rollout", "reward", "advantage", "train", "sync", "checkpoint")
WARM_UP = 10
"""Iterations before the first measured one."""
LATER_S = 12.0
"""The client and the server send and store what is left of the last iterations within this time."""


class Spent(NamedTuple):
    """Seconds of the wall clock and of two processes."""

    wall_s: float
    flow_s: float
    server_s: float


def main() -> int:
    """Print seconds by iteration."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.empty_dag", description=__doc__)
    parser.add_argument("--iterations", type=int, default=60)
    iterations = parser.parse_args().iterations
    if iterations < 1:
        parser.error(f"--iterations: found {iterations}, expected at least 1")
    with tempfile.TemporaryDirectory() as home, local_prefect(Path(home)) as url:
        spent = asyncio.run(measure(iterations, listener(url)))
    wall_s, flow_s, server_s = (seconds / iterations for seconds in spent)
    print(
        f"{iterations} empty iterations, each: {wall_s:.3f} s, "
        f"flow process {flow_s:.3f} CPU s, Prefect server {server_s:.3f} CPU s"
    )
    return 0


async def measure(iterations: int, server: psutil.Process) -> Spent:
    """Run the iterations. `server`: the process of the Prefect server."""
    # After `local_prefect` has set Prefect's folder.
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    async def nothing(run: str, k: int) -> dict[str, int]:
        return {"k": k}

    stages = [
        task(name=stage, task_run_name=f"{stage}-{{k}}", cache_policy=NO_CACHE, retries=2)(nothing)
        for stage in STAGES
    ]

    @flow(flow_run_name="{run}-{k}", persist_result=False)
    async def iteration(run: str, k: int) -> dict[str, int]:
        for stage in stages:
            await stage(run, k)
        return {"k": k}

    @flow
    async def train() -> Spent:
        for k in range(WARM_UP):
            await iteration("empty", k)
        before = reading(server)
        for k in range(WARM_UP, WARM_UP + iterations):
            await iteration("empty", k)
        wall_s = time.monotonic() - before.wall_s
        await asyncio.sleep(LATER_S)
        after = reading(server)
        return Spent(wall_s, after.flow_s - before.flow_s, after.server_s - before.server_s)

    return await train()


def reading(server: psutil.Process) -> Spent:
    """Return the clock and the CPU seconds so far of this process and of the server."""
    own, theirs = psutil.Process().cpu_times(), server.cpu_times()
    return Spent(time.monotonic(), own.user + own.system, theirs.user + theirs.system)


def listener(url: str) -> psutil.Process:
    """Return the process that listens on the port of a URL."""
    port = urlsplit(url).port
    for connection in psutil.net_connections("tcp"):
        address = connection.laddr
        if connection.status == psutil.CONN_LISTEN and address and address.port == port:
            return psutil.Process(connection.pid)
    raise RuntimeError(f"no process listens on port {port}")


if __name__ == "__main__":
    sys.exit(main())
