"""Change the number of engines of a run from Prefect's pages.

Needs no GPU. `rlpipe.actors.engines.elastic` says how engines join and leave.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from rlpipe.config.load import home as default_home
from rlpipe.lineage.engine_requests import request_engines
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of


def run_name() -> str:
    """Return the name of the flow run in Prefect."""
    parameters = flow_run.parameters
    return f"engines-{parameters['run']}-{parameters['number']}"


@flow(name="engines", flow_run_name=run_name)
async def engines(run: str, number: int, store: str | None = None) -> dict[str, Any]:
    """Change the number of engines of a run, while it runs or before its next start.

    Engines that join wait for room in the Ray cluster, get the published weights, and then sample.
    Engines that leave hand their samples back. Returns the numbers `before` and `after`.
    Raises: ConfigError if the run does not exist or cannot have this number.

    Args:
        run: Required. Name of the run. Example: `spell_backward`
        number: Required. Number of engines, at least 1. Example: `4`
        store: Optional, by default the store that the run was started with. URL of the store.
            Example: `s3://bucket/runs`
    """
    home = default_home()
    files = Files(store or store_of(home, run))
    before = await asyncio.to_thread(request_engines, files, home, run, number)
    return {"run": run, "before": before.number, "after": number}
