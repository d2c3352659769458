"""Declare work pool and deployments to the Prefect server:  python -m deployments.apply [--site FILE] [--home DIR]

    prefect worker start --pool rlpipe --type process
    prefect deployment run train/spell_backward -p 'overrides=["num_rollout=20"]'

The flows run from this checkout, in processes of a worker on this machine. The pool has no limit of
its own: an iteration's flow run must never wait for the place of the run that waits for it. Each
set of GPUs is a queue with a limit (`train`: `--limit`): further runs wait in line. (A deployment's
own limit would not do: its leases are in the server's memory, and a run whose lease is gone is
ended.) Doing it again changes what differs.

Not here: which deployments there are (`declared`), what the flows do, or a server (`prefect server
start`, `make up`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import get_current_settings

from deployments.automations import HEARTBEAT_S, keep_automations
from deployments.declared import ROOT, Declaration, declared, entrypoints
from deployments.site import ANY_GPUS, GpuSet, Site, load_site
from flows.environment import CACHES, CLIENT_SETTINGS, keep_caches_in
from rlpipe.config.load import HOME_VARIABLE, home
from rlpipe.errors import ResourceError, RlpipeError


async def apply(site: Site, folder: Path) -> list[str]:
    """Pool, queues, deployments and automations of a site; the deployments' full names. Raises:
    ConfigError."""
    kinds = {
        name: await Flow.afrom_source(source=str(ROOT), entrypoint=path)
        for name, path in entrypoints().items()
    }
    wanted = declared(site, set(kinds))
    async with get_client() as client:
        await keep_pool(client, site)
        for one in wanted:
            await deploy(kinds[one.flow], one, site.pool, environment(folder))
        await keep_automations(client, site)
    return [one.full_name for one in wanted]


async def keep_pool(client: PrefectClient, site: Site) -> None:
    """The work pool, with a queue for each set of GPUs."""
    with suppress(ObjectAlreadyExists):
        await client.create_work_pool(
            WorkPoolCreate(name=site.pool, type="process", description="rlpipe on this machine")
        )
    for name, gpus in site.sets.items():
        with suppress(ObjectAlreadyExists):
            await client.create_work_queue(name=name, work_pool_name=site.pool)
        queue = await client.read_work_queue_by_name(name, work_pool_name=site.pool)
        await client.update_work_queue(queue.id, concurrency_limit=gpus.limit)


async def deploy(
    flow: Flow[..., Any], one: Declaration, pool: str, variables: dict[str, str]
) -> None:
    """One deployment of a flow from this checkout, on a work pool."""
    gpus = (
        {} if one.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in one.gpus)}
    )
    made = await flow.ato_deployment(
        name=one.name,
        parameters=one.parameters,
        schedules=one.timetables,
        tags=list(one.tags),
        work_pool_name=pool,
        work_queue_name=one.queue,
        job_variables={"env": {**variables, **gpus}},
        concurrency_limit=None,
        description=flow.description,
    )
    offer(made, one.parameters.get("recipe"))
    await made.aapply()


def offer(made: RunnerDeployment, recipe: str | None) -> None:
    """Put a deployment's own recipe, a file, among those that the form's list has: a value that is
    in no list is not shown."""
    properties = made._parameter_openapi_schema.properties
    if recipe is not None:
        names = properties["recipe"]["anyOf"][0]["enum"]
        if recipe not in names:
            names.append(recipe)


async def undeclared(site: Site, names: list[str]) -> list[str]:
    """Deployments of this site's pool, and of its name if it has one, that are not among these."""
    async with get_client() as client:
        of_pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[site.pool]))
        there = await client.read_deployments(work_pool_filter=of_pool, limit=200)
        titles = {found.id: found.name for found in await client.read_flows(limit=200)}
    ours = {
        f"{titles.get(one.flow_id, '?')}/{one.name}"
        for one in there
        if one.name.endswith(site.called(""))
    }
    return sorted(ours - set(names))


def environment(folder: Path) -> dict[str, str]:
    """What a flow's process needs to know: where this checkout, the runs and their caches are."""
    keep_caches_in(folder)
    caches = {
        name: os.environ[name]
        for name in (*CACHES, "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")
        if name in os.environ
    }
    beats = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}
    return {
        **CLIENT_SETTINGS,
        **beats,
        **caches,
        HOME_VARIABLE: str(folder),
        "PYTHONPATH": python_path(),
    }


def python_path() -> str:
    """This checkout before what PYTHONPATH has here: a Megatron-LM checkout may be there."""
    others = [
        str(Path(path).absolute())
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path
    ]
    return os.pathsep.join(dict.fromkeys([str(ROOT), *others]))


def place(arguments: argparse.Namespace) -> tuple[Site, Path]:
    """The site and the home that a command line names. Raises: ConfigError."""
    site = load_site(Path(arguments.site) if arguments.site else None)
    changed: dict[str, Any] = {"pool": arguments.pool} if arguments.pool else {}
    if arguments.limit is not None:
        changed["gpu_sets"] = {
            **site.sets,
            ANY_GPUS: GpuSet(gpus=site.sets[ANY_GPUS].gpus, limit=arguments.limit),
        }
    folder = Path(arguments.home).expanduser().absolute() if arguments.home else home()
    return site.model_copy(update=changed), folder


@contextmanager
def server_named() -> Iterator[None]:
    """Name the Prefect server that does not answer. Raises: ResourceError."""
    try:
        yield
    except httpx.TransportError as error:
        raise ResourceError(
            "the Prefect server does not answer",
            where="PREFECT_API_URL",
            found=f"{httpx.URL(get_current_settings().api.url or '').copy_with(username=None, password=None)}: {error}",
            do="start it (`prefect server start`, or `make up` and `. runs/.up/env`), or name the one that runs",
        ) from error


def main() -> int:
    """Parse, apply, say what to do next. Exit codes: 0 done, 1 no server, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m deployments.apply", description="Declare work pool and deployments."
    )
    parser.add_argument(
        "--site",
        help="YAML file with sets of GPUs, schedules, settings, alerts: deployments/site.example.yaml",
    )
    parser.add_argument(
        "--pool", help="process work pool, made if there is none (default: the site's, else rlpipe)"
    )
    parser.add_argument("--home", help=f"where runs are kept (default: ${HOME_VARIABLE} or ./runs)")
    parser.add_argument(
        "--limit",
        type=int,
        help="training runs at a time in the set `train` (default: the site's, else 1)",
    )
    try:
        site, folder = place(parser.parse_args())
        with server_named():
            names = asyncio.run(apply(site, folder))
            gone = asyncio.run(undeclared(site, names))
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, ResourceError) else 2
    print(
        f"declared {', '.join(names)}; now: prefect worker start --pool {site.pool} --type process"
    )
    if gone:
        print(
            f"there, but not declared any more: {', '.join(gone)} (prefect deployment delete NAME)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
