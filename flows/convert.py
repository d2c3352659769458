"""Convert between Hugging Face directories and Megatron checkpoints: a flow, with its progress in
Prefect's pages.

The work is done by a process of its own, which ends with this one. Doing it again after an
interruption goes on with what is there; doing it again after it is done changes nothing. Not here:
converting (`rlpipe.engines.megatron.checkpoint.conversion`).
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect import flow, get_run_logger, task
from prefect.artifacts import (
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from flows.conversion import checkpoint_of, converted, job_of
from flows.output import outlive_the_worker
from rlpipe.config.load import home
from rlpipe.errors import ConfigError

PROGRESS_INTERVAL_S = 2.0


def run_name() -> str:
    """The flow run's name in Prefect."""
    return f"convert-{flow_run.parameters.get('of') or Path(str(flow_run.parameters.get('source'))).name}"


@flow(name="convert", flow_run_name=run_name, on_running=[outlive_the_worker])
async def convert(
    destination: str,
    source: str | None = None,
    of: str | None = None,
    origin_hf_dir: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_gb: float = 5.0,
    force: bool = False,
) -> dict[str, Any]:
    """Make `destination` from `source`, or from a run's checkpoint (`of`: "RUN@K"); what was made,
    and how large it is.

    A `source` with config.json becomes a torch_dist checkpoint; any other is a checkpoint and
    becomes a Hugging Face directory, with the configuration and tokenizer that it carries, or those
    of `origin_hf_dir`. `dtype`: of the weights; None: as they are. `max_shard_gb`: GiB of a file,
    and about what is in memory. `force`: replace what is there. Raises: ConfigError, DataError for
    bad input; StoreFull, ResourceError.
    """
    if (source is None) == (of is None):
        raise ConfigError("what shall be converted?", where="convert", expected="source, or of")
    settings: dict[str, Any] = {"dtype": dtype, "force": force}
    settings["shard_bytes"] = int(max_shard_gb * 1024**3)
    with ExitStack() as stack:
        given = Path(source or "")
        origin = Path(origin_hf_dir) if origin_hf_dir else None
        if of is not None:
            stored = await asyncio.to_thread(stack.enter_context, checkpoint_of(home(), of))
            given, origin, settings["known_as"] = (
                stored.folder,
                origin or stored.model_dir,
                stored.node,
            )
        report = await conversion(job_of(given, Path(destination), origin, settings))
    await acreate_table_artifact(
        [report | {"notes": "; ".join(report["notes"])}], key="conversion", description=destination
    )
    return report


@task(name="convert", cache_policy=NO_CACHE)
async def conversion(job: dict[str, Any]) -> dict[str, Any]:
    """Do it; the report. Raises: as `converted`."""
    log = get_run_logger()
    seen = 0.0
    progress = UUID(str(await acreate_progress_artifact(0.0, description=json.dumps(job))))

    async def tell(said: dict[str, Any]) -> None:
        nonlocal seen
        log.info(
            "%s: %.0f of %.0f MiB", said["what"], said["done"] / 1024**2, said["total"] / 1024**2
        )
        if time.monotonic() > seen + PROGRESS_INTERVAL_S:
            seen = time.monotonic()
            await aupdate_progress_artifact(progress, 100.0 * said["done"] / max(1, said["total"]))

    report = await converted(job, tell)
    await aupdate_progress_artifact(progress, 100.0)
    return report
