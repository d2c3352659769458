"""Serve the deployments from this process, without a work pool:  python -m deployments.serve [FLOW ...] [--limit N]

    python -m deployments.serve train --limit 1 &
    python -m deployments.serve iteration evaluate reprocess convert audit

Each run is a process of its own, as under a worker. For one machine whose runs need no queues by
set of GPUs; schedules are paused while it is not served. Without FLOW all of them are.

Not here: which deployments there are (`declared`), or a work pool (`apply`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from prefect import serve
from prefect.deployments.runner import RunnerDeployment
from prefect.flows import Flow, load_flow_from_entrypoint

from deployments.apply import environment, place, server_named
from deployments.declared import FLOWS, ROOT, declared, entrypoints
from deployments.site import Site
from rlpipe.errors import ConfigError, ResourceError, RlpipeError

OPEN_ITERATIONS = frozenset({"train", "fork", "reprocess"})
"""Flows whose runs may wait for an iteration's flow run."""


async def served(site: Site, chosen: Sequence[str]) -> list[RunnerDeployment]:
    """The deployments of the chosen flows. Raises: ConfigError."""
    found = {
        name: entrypoint for name, entrypoint in entrypoints().items() if name in (chosen or FLOWS)
    }
    kinds: dict[str, Flow[..., Any]] = {
        name: load_flow_from_entrypoint(str(ROOT / path)) for name, path in found.items()
    }
    return [
        await kinds[one.flow].ato_deployment(
            name=one.name,
            parameters=one.parameters,
            schedules=one.timetables,
            tags=list(one.tags),
            description=kinds[one.flow].description,
        )
        for one in declared(site, set(kinds))
    ]


def check_limit(chosen: Sequence[str], limit: int | None) -> None:
    """An iteration must never wait for the place of the run that waits for it. Raises:
    ConfigError."""
    flows = set(chosen or FLOWS)
    if limit is not None and "iteration" in flows and flows & OPEN_ITERATIONS:
        raise ConfigError(
            "runs and their iterations cannot share a limit: a run would wait for an iteration that waits for its place",
            where="--limit",
            found=f"{limit} for {', '.join(sorted(flows & (OPEN_ITERATIONS | {'iteration'})))}",
            do=f"serve {', '.join(sorted(OPEN_ITERATIONS))} with a limit, and `iteration` from another process without",
        )


def main() -> int:
    """Parse, serve until it is stopped. Exit codes: 0 done, 1 no server, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m deployments.serve", description="Serve the deployments without a work pool."
    )
    parser.add_argument(
        "flows", nargs="*", metavar="FLOW", help=f"of {', '.join(FLOWS)} (default: all)"
    )
    parser.add_argument(
        "--site", help="YAML file with schedules and settings: deployments/site.example.yaml"
    )
    parser.add_argument("--home", help="where runs are kept (default: $RLPIPE_HOME or ./runs)")
    parser.add_argument(
        "--limit",
        type=int,
        help="runs at a time, of all flows that are served (default: any number)",
    )
    arguments = parser.parse_args(namespace=argparse.Namespace(pool=None))
    if unknown := set(arguments.flows) - FLOWS.keys():
        parser.error(f"no such flow: {', '.join(sorted(unknown))}")
    try:
        check_limit(arguments.flows, arguments.limit)
        limit = arguments.limit
        arguments.limit = None
        site, folder = place(arguments)
        os.environ.update(environment(folder))
        os.chdir(ROOT)
        ready = asyncio.run(served(site, arguments.flows))
        with server_named():
            serve(*ready, limit=limit)
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, ResourceError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
