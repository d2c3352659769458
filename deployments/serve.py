"""Serve the deployments from this process, without a work pool.

    python -m deployments.serve train --limit 1 &
    python -m deployments.serve iteration evaluate reprocess convert audit engines

Each run has its own process, as under a worker. For one machine without queues by set of GPUs.
Schedules are paused while no process serves. Without FLOW, all flows are served.
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

from deployments.apply import (
    environment,
    report_unreachable_server,
    site_and_home,
    with_server_overrides,
)
from deployments.declarations import FLOWS, ROOT, declared, entrypoints
from deployments.site import Site
from rlpipe.errors import ConfigError, ResourceError, RlpipeError

OPEN_ITERATIONS = frozenset({"train", "fork", "reprocess"})
"""Flows whose runs may wait for an iteration's flow run."""


async def served(site: Site, chosen: Sequence[str]) -> list[RunnerDeployment]:
    """Return the deployments of the chosen flows. Raises: ConfigError."""
    flows: dict[str, Flow[..., Any]] = {
        name: load_flow_from_entrypoint(str(ROOT / path))
        for name, path in entrypoints().items()
        if name in (chosen or FLOWS)
    }
    return [
        await flows[declaration.flow].ato_deployment(
            name=declaration.name,
            parameters=declaration.parameters,
            schedules=declaration.timetables,
            tags=list(declaration.tags),
            description=declaration.described(flows[declaration.flow].description),
        )
        for declaration in declared(site, set(flows))
    ]


def check_limit(chosen: Sequence[str], limit: int | None) -> None:
    """Refuse a limit shared by runs and iterations: a run would wait for its own iteration.

    Raises: ConfigError.
    """
    flows = set(chosen or FLOWS)
    if limit is not None and "iteration" in flows and flows & OPEN_ITERATIONS:
        raise ConfigError(
            "runs and their iterations cannot share a limit",
            where="--limit",
            found=f"{limit} for {', '.join(sorted(flows & (OPEN_ITERATIONS | {'iteration'})))}",
            expected="no limit for iterations: a run would wait for an iteration that cannot start",
            do=f"serve {', '.join(sorted(OPEN_ITERATIONS))} with a limit, "
            "and `iteration` from another process without a limit",
        )


def main() -> int:
    """Run the command until it is stopped. Exit codes: 0 done, 1 no server, 2 wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m deployments.serve", description="Serve the deployments without a work pool."
    )
    parser.add_argument(
        "flows",
        nargs="*",
        metavar="FLOW",
        help=f"flows to serve: {', '.join(FLOWS)} (default: all)",
    )
    parser.add_argument(
        "--site", help="YAML file with schedules and settings: deployments/site.example.yaml"
    )
    parser.add_argument("--home", help="directory of runs (default: $RLPIPE_HOME or ./runs)")
    parser.add_argument(
        "--limit",
        type=int,
        help="concurrent runs of all served flows (default: no limit)",
    )
    arguments = parser.parse_args(namespace=argparse.Namespace(pool=None))
    if unknown := set(arguments.flows) - FLOWS.keys():
        parser.error(f"unknown flow: {', '.join(sorted(unknown))}")
    try:
        check_limit(arguments.flows, arguments.limit)
        limit = arguments.limit
        arguments.limit = None  # Here a limit of this process, not of a set of GPUs.
        site, folder = site_and_home(arguments)
        os.environ.update(environment(folder))
        # Entrypoints and recipes are relative to the checkout.
        os.chdir(ROOT)
        with report_unreachable_server():
            site = asyncio.run(with_server_overrides(site))
            deployments = asyncio.run(served(site, arguments.flows))
            serve(*deployments, limit=limit)
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, ResourceError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
