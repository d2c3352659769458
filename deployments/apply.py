"""Declare work pool, queues, deployments and automations to the Prefect server.

    python -m deployments.apply [--site FILE] [--home DIR]
    prefect worker start --pool rlpipe --type process
    prefect deployment run train/spell_backward -p 'overrides=["num_rollout=20"]'

Flows run from this checkout, in processes of a worker on this machine. A second call changes only
what differs. The store and the Ray cluster of a running `make up` stay in every deployment: `make
up` passes them as `--server-overrides`, and a variable of the Prefect server keeps them.

The pool has no limit: an iteration's flow run must never wait for a slot that its own run holds.
Each set of GPUs is a queue with a limit (`train`: `--limit`); further runs wait. A limit of the
deployment would not work: its leases are in the server's memory, and Prefect ends a run without a
lease.
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
from prefect.variables import Variable

from deployments.automations import HEARTBEAT_S, apply_automations
from deployments.declarations import ROOT, Declaration, declared, entrypoints
from deployments.site import ANY_GPUS, GpuSet, Site, load_site
from flows.environment import CACHES, CLIENT_SETTINGS, keep_caches_in
from rlpipe.config.load import HOME_VARIABLE, home
from rlpipe.errors import ConfigError, ResourceError, RlpipeError

HUB = ("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY")
"""Variables of the Hugging Face Hub for flow processes. HF_TOKEN is a secret: set it where the
worker runs, or log in there with `hf auth login`."""
SERVER_OVERRIDES = "rlpipe_server_overrides"
"""Variable of the Prefect server: overrides for every deployment of every site on this server."""


async def with_server_overrides(site: Site, given: list[str] | None = None) -> Site:
    """Return a site with the overrides of the Prefect server before its own, which win.

    `given` replaces the server's overrides; None keeps them. Raises: ConfigError if a person has
    changed the variable to something else.
    """
    if given is not None:
        await Variable.aset(SERVER_OVERRIDES, given, overwrite=True)
    kept: Any = await Variable.aget(SERVER_OVERRIDES, default=[])
    if not isinstance(kept, list) or not all(isinstance(word, str) for word in kept):
        raise ConfigError(
            "the overrides of the Prefect server cannot be read",
            where=f"variable {SERVER_OVERRIDES} of the Prefect server",
            found=repr(kept),
            expected="a JSON list of dotted.key=value",
            do="repeat `make up`, or delete the variable",
        )
    return site.model_copy(update={"overrides": (*kept, *site.overrides)})


async def apply(site: Site, folder: Path) -> list[str]:
    """Declare everything of a site; return the deployments' full names.

    Raises: ConfigError.
    """
    flows = {
        name: await Flow.afrom_source(source=str(ROOT), entrypoint=path)
        for name, path in entrypoints().items()
    }
    declarations = declared(site, set(flows))
    async with get_client() as client:
        await apply_pool(client, site)
        for declaration in declarations:
            await deploy(flows[declaration.flow], declaration, site.pool, environment(folder))
        await apply_automations(client, site)
    return [declaration.full_name for declaration in declarations]


async def apply_pool(client: PrefectClient, site: Site) -> None:
    """Create or update the work pool, with a queue for each set of GPUs."""
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
    flow: Flow[..., Any], declaration: Declaration, pool: str, variables: dict[str, str]
) -> None:
    """Declare one deployment of a flow of this checkout on a work pool."""
    if declaration.gpus is not None:
        gpus = ",".join(str(gpu) for gpu in declaration.gpus)
        variables = {**variables, "CUDA_VISIBLE_DEVICES": gpus}
    deployment = await flow.ato_deployment(
        name=declaration.name,
        parameters=declaration.parameters,
        schedules=declaration.timetables,
        tags=list(declaration.tags),
        work_pool_name=pool,
        work_queue_name=declaration.queue,
        job_variables={"env": variables},
        # See the module: a limit of the deployment would end runs.
        concurrency_limit=None,
        description=declaration.described(flow.description),
    )
    add_recipe_choice(deployment, declaration.parameters.get("recipe"))
    await deployment.aapply()


def add_recipe_choice(deployment: RunnerDeployment, recipe: str | None) -> None:
    """Add a deployment's recipe file to the choices on Prefect's form.

    The form does not show a value that is not among its choices.
    """
    # Prefect has no public access to the schema.
    properties = deployment._parameter_openapi_schema.properties
    if recipe is not None:
        names = properties["recipe"]["anyOf"][0]["enum"]
        if recipe not in names:
            names.append(recipe)


async def undeclared(site: Site, names: list[str]) -> list[str]:
    """Return the deployments of this site's pool and name that are not in `names`."""
    async with get_client() as client:
        of_pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[site.pool]))
        deployments = await client.read_deployments(work_pool_filter=of_pool, limit=200)
        flow_names = {flow.id: flow.name for flow in await client.read_flows(limit=200)}
    full_names = {
        f"{flow_names.get(deployment.flow_id, '?')}/{deployment.name}"
        for deployment in deployments
        if deployment.name.endswith(site.deployment_name(""))
    }
    return sorted(full_names - set(names))


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables of flow processes: checkout, home and caches."""
    keep_caches_in(folder)
    caches = {
        name: os.environ[name]
        # A worker may start in a shell without these variables.
        for name in (*CACHES, *HUB)
        if name in os.environ
    }
    return {
        **CLIENT_SETTINGS,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        **caches,
        HOME_VARIABLE: str(folder),
        "PYTHONPATH": python_path(),
    }


def python_path() -> str:
    """Return PYTHONPATH with this checkout first. A Megatron-LM checkout may follow."""
    others = [
        str(Path(path).absolute())
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path
    ]
    return os.pathsep.join(dict.fromkeys([str(ROOT), *others]))


def site_and_home(arguments: argparse.Namespace) -> tuple[Site, Path]:
    """Return site and home of a command line. Raises: ConfigError."""
    site = load_site(Path(arguments.site) if arguments.site else None)
    changed: dict[str, Any] = {"pool": arguments.pool} if arguments.pool else {}
    # Only the limit changes; the set keeps its GPUs.
    if arguments.limit is not None:
        changed["gpu_sets"] = {
            **site.sets,
            ANY_GPUS: GpuSet(gpus=site.sets[ANY_GPUS].gpus, limit=arguments.limit),
        }
    folder = Path(arguments.home).expanduser().absolute() if arguments.home else home()
    return site.model_copy(update=changed), folder


@contextmanager
def report_unreachable_server() -> Iterator[None]:
    """Turn a transport error into one that names the server. Raises: ResourceError."""
    try:
        yield
    except httpx.TransportError as error:
        url = httpx.URL(get_current_settings().api.url or "")
        raise ResourceError(
            "the Prefect server does not answer",
            where="PREFECT_API_URL",
            found=f"{url.copy_with(username=None, password=None)}: {error}",
            do="start the server (`prefect server start`, or `make up` and `. runs/.up/env`), "
            "or set PREFECT_API_URL to a running one",
        ) from error


def main() -> int:
    """Run the command. Exit codes: 0 done, 1 no server, 2 wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m deployments.apply", description="Declare work pool and deployments."
    )
    parser.add_argument(
        "--site",
        help="YAML file with sets of GPUs, schedules, settings, alerts "
        "(deployments/site.example.yaml)",
    )
    parser.add_argument(
        "--pool", help="process work pool, created if missing (default: the site's, else rlpipe)"
    )
    parser.add_argument("--home", help=f"directory of runs (default: ${HOME_VARIABLE} or ./runs)")
    parser.add_argument(
        "--limit",
        type=int,
        help="concurrent training runs in the set `train` (default: the site's, else 1)",
    )
    parser.add_argument(
        "--server-overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides for every site on this Prefect server, kept by later calls without this "
        "option (`make up` passes its store and Ray cluster)",
    )
    arguments = parser.parse_args()
    try:
        site, folder = site_and_home(arguments)
        with report_unreachable_server():
            full = asyncio.run(with_server_overrides(site, arguments.server_overrides))
            names = asyncio.run(apply(full, folder))
            obsolete = asyncio.run(undeclared(site, names))
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, ResourceError) else 2
    print(f"declared {', '.join(names)}")
    if kept := full.overrides[: len(full.overrides) - len(site.overrides)]:
        print(f"every run has the overrides of this Prefect server: {', '.join(kept)}")
    # `make up` starts the worker itself.
    if arguments.server_overrides is None:
        print(f"runs need a worker: prefect worker start --pool {site.pool} --type process")
    if obsolete:
        print(
            f"no longer declared: {', '.join(obsolete)} "
            "(delete with: prefect deployment delete NAME)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
