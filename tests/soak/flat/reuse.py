"""Time an iteration that is done:  python -m tests.soak.flat.reuse --run NAME --home runs/flat

Opens the run, calls the iteration flow again for a committed iteration (`--iteration`, default 0),
and prints `{"seconds": [...]}` (JSON). Every stage is answered from the store, so this is the cost
of a retry without the work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

from rlpipe.config.load import HOME_VARIABLE, home, validate
from rlpipe.store.run_file import get_run
from tools.local_prefect import drain, local_prefect

TIMES = 5


def main() -> int:
    """Measure and print. Exit codes: 0 done."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.flat.reuse",
        description="Time an iteration that is done already.",
    )
    parser.add_argument("--run", required=True)
    parser.add_argument("--home", help=f"where runs are kept (default: ${HOME_VARIABLE} or ./runs)")
    parser.add_argument("--iteration", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.home:
        os.environ[HOME_VARIABLE] = str(Path(arguments.home).absolute())
    with local_prefect(home()):
        seconds = asyncio.run(measure(arguments.run, arguments.iteration))
    print(json.dumps({"seconds": seconds}))
    return 0


async def measure(run: str, k: int) -> list[float]:
    """Return the seconds of TIMES calls of iteration k, after one that warms up.

    Raises: as `iteration`.
    """
    from prefect import flow

    from flows.iteration import iteration
    from rlpipe.actors.ray.local_ray import disconnect
    from rlpipe.observe.progress import Progress
    from tasks.context import close_context, open_context

    config = validate(get_run(home(), run).config)
    found: list[float] = []

    @flow(name="reuse")
    async def again() -> None:
        for _ in range(TIMES + 1):
            start = time.perf_counter()
            nodes = await iteration(run, k)
            found.append(round(time.perf_counter() - start, 3))
            assert all(node.reused for node in nodes.values()), (
                f"not all of iteration {k} was reused: {nodes}"
            )

    await open_context(config, home(), Progress(run, config.num_rollout))
    try:
        await again()
    finally:
        await close_context(run, end_actors=True)
        await drain()
        disconnect()
    return found[1:]


if __name__ == "__main__":
    sys.exit(main())
