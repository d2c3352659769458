"""Convert between Hugging Face directories and Megatron checkpoints, with progress in Prefect.

A child process does the work and ends with this one. A second call after an interruption continues
with the files that exist. A call after a finished conversion changes nothing.
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

from flows.conversion_job import conversion_job, run_conversion, stored_checkpoint
from flows.output import outlive_the_worker
from rlpipe.config.load import home
from rlpipe.errors import ConfigError

PROGRESS_INTERVAL_S = 2.0


def run_name() -> str:
    """Return the name of the flow run in Prefect."""
    source = Path(str(flow_run.parameters.get("source"))).name
    return f"convert-{flow_run.parameters.get('of') or source}"


@flow(name="convert", flow_run_name=run_name, on_running=[outlive_the_worker])
async def convert(
    destination: str,
    source: str | None = None,
    of: str | None = None,
    origin_hf_dir: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_gb: float = 5.0,
    adapter: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Convert `source`, or the checkpoint `of` a run, into `destination`; return a report.

    A source with config.json becomes a torch_dist checkpoint. Any other source is a checkpoint and
    becomes a Hugging Face directory, with the configuration and tokenizer of the checkpoint or of
    `origin_hf_dir`. Raises: ConfigError, DataError for wrong input; StoreFull, ResourceError.

    Args:
        destination: Required. Folder that the conversion writes. Example: `/models/mine`
        source: Required unless `of` is given. Hugging Face directory or checkpoint.
            Example: `/models/Qwen3-0.6B`
        of: Required unless `source` is given. Checkpoint of a run. Without an iteration: its
            newest. Example: `spell_backward@99`
        origin_hf_dir: Optional, by default the model of the run. Hugging Face directory that gives
            configuration and tokenizer. Example: `/models/Qwen3-0.6B`
        dtype: Optional, by default unchanged. Data type of the written weights.
            Example: `bfloat16`
        max_shard_gb: Optional. Size of a file in GiB; the conversion needs about that much memory.
            Example: `5`
        adapter: Optional, by default off. Write the adapters of `train.lora` alone, for PEFT; with
            `of`, after any iteration. Example: on, for `smollm2_lora@5`
        force: Optional, by default off. Replace the destination. Example: on, to convert again.
    """
    if (source is None) == (of is None):
        raise ConfigError("one source is needed", where="convert", expected="either source or of")
    settings: dict[str, Any] = {"dtype": dtype, "force": force}
    if not adapter:
        settings["shard_bytes"] = int(max_shard_gb * 1024**3)
    with ExitStack() as stack:
        folder = Path(source or "")
        origin = Path(origin_hf_dir) if origin_hf_dir else None
        if of is not None:
            opened = stored_checkpoint(home(), of, adapters=adapter)
            stored = await asyncio.to_thread(stack.enter_context, opened)
            folder = stored.folder
            origin = origin or stored.model_dir
            settings["known_as"] = stored.node
            if stored.base is not None:
                settings["base"] = str(stored.base)
        job = conversion_job(folder, Path(destination), origin, settings, adapter=adapter)
        report = await conversion(job)
    await acreate_table_artifact(
        [report | {"notes": "; ".join(report["notes"])}], key="conversion", description=destination
    )
    return report


@task(name="convert", cache_policy=NO_CACHE)
async def conversion(job: dict[str, Any]) -> dict[str, Any]:
    """Run the conversion and show its progress; return the report. Raises: as `run_conversion`."""
    log = get_run_logger()
    updated_s = 0.0
    progress = UUID(str(await acreate_progress_artifact(0.0, description=json.dumps(job))))

    async def report_progress(message: dict[str, Any]) -> None:
        nonlocal updated_s
        done = message["done"]
        total = message["total"]
        log.info("%s: %.0f of %.0f MiB", message["what"], done / 1024**2, total / 1024**2)
        # One request to the Prefect server a message would slow the conversion down.
        if time.monotonic() > updated_s + PROGRESS_INTERVAL_S:
            updated_s = time.monotonic()
            await aupdate_progress_artifact(progress, 100.0 * done / max(1, total))

    report = await run_conversion(job, report_progress)
    await aupdate_progress_artifact(progress, 100.0)
    return report
