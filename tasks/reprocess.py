"""Reprocess stored rollouts: one task an iteration, then a comparison of old and new.

Needs no actor. Functions, workers and store are opened once in a process and found by the name of
the new branch, so task parameters stay small. `rlpipe.reprocess.branch` does the work.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import acreate_image_artifact, acreate_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from rlpipe.config.load import validate_stored
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.lineage.rollouts import find
from rlpipe.observe.comparison import summary, write_page, write_picture
from rlpipe.observe.pages import write_whole
from rlpipe.observe.progress import Progress
from rlpipe.reprocess.branch import Reprocessor
from rlpipe.reprocess.report import compare
from rlpipe.rewards.reward_rows import waits_for
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import RunFile, write_run
from tasks.artifacts import artifact_key
from tasks.record import RETRIES_AFTER_S, is_transient


@dataclass
class OpenBranch:
    """Objects that the tasks of a reprocessed branch share in this process."""

    of: str
    config: RunConfig
    files: Files
    directory: Path
    reprocessor: Reprocessor
    progress: Progress


_OPEN: dict[str, OpenBranch] = {}


@asynccontextmanager
async def opened(
    of: str, config: RunConfig, files: Files, directory: Path, progress: Progress
) -> AsyncIterator[None]:
    """Open the branch `config.run`, to reprocess rollouts of the run `of` in this process.

    Raises: Fenced if another process reprocesses the branch; ConfigError.
    """
    # Two processes would write the same branch and its notes.
    epoch = await asyncio.to_thread(Epochs(files).acquire, config.run)
    epoch.keep()
    try:
        # Other tools find the store of the branch by its name.
        write_run(
            directory.parent,
            config.run,
            RunFile(store=files.root, config=config.model_dump(mode="json")),
        )
        async with Reprocessor(files, config, epoch.check) as reprocessor:
            _OPEN[config.run] = OpenBranch(of, config, files, directory, reprocessor, progress)
            try:
                yield
            finally:
                del _OPEN[config.run]
    finally:
        epoch.release()


async def _attempt(run: str, k: int) -> State:
    """Reprocess iteration k. The state is `Reused` if the store has every node."""
    ctx = _OPEN[run]
    stored = await asyncio.to_thread(find, ctx.files, ctx.of, k)
    if stored is None:
        raise ConfigError(
            "the run has no stored rollout of this iteration", where=f"{ctx.of}, iteration {k}"
        )
    result = await ctx.reprocessor.iteration(
        stored,
        lambda done, total: ctx.progress.stage(
            "reward", k, done=done, total=total, waits_for=waits_for(ctx.config.reward)
        ),
    )
    outputs = result.reward.outputs
    line: dict[str, float | str] = {
        "iteration": f"{k}",
        "reward": outputs.get("mean", "none"),
    }
    if result.reused:
        line["reused"] = "all"
    if outputs["errors"]:
        line["errors"] = f"{outputs['errors']}"
    ctx.progress.iteration(line, k)
    nodes = {"rollout": result.rollout.digest, "reward": result.reward.digest}
    if result.advantage is not None:
        nodes["advantage"] = result.advantage.digest
    data = {"iteration": k, "nodes": nodes, "reused": result.reused, "without": result.without}
    return Completed(
        name="Reused" if result.reused else "Completed",
        message=f"reward {result.reward.digest[:12]}",
        data=data,
    )


_TASK: Any = task(
    name="reprocess",
    task_run_name="reprocess-{k}",
    cache_policy=NO_CACHE,
    retries=len(RETRIES_AFTER_S),
    retry_delay_seconds=RETRIES_AFTER_S,
    retry_condition_fn=is_transient,
)(_attempt)


async def reprocess(run: str, k: int) -> dict[str, Any]:
    """Reprocess iteration k of the branch: `{"iteration", "nodes", "reused", "without"}`.

    Transient errors are retried twice.
    """
    state = await _TASK(run, k, return_state=True)
    return await state.aresult()


@task(name="compare", cache_policy=NO_CACHE)
async def compare_runs(
    run: str, iterations: Sequence[int], notes: Mapping[int, str]
) -> dict[str, Any]:
    """Write `reprocessed.html`, `.png` and `.json` into the branch's folder, and create artifacts.

    Returns the content of the JSON file.
    """
    ctx = _OPEN[run]
    ctx.progress.stage("compare", note="reading columns of both branches")
    summary = await asyncio.to_thread(_compare, ctx, iterations, notes)
    rows = [
        {"": row["what"], "before": _format(row["before"]), "after": _format(row["after"])}
        for row in summary["figures"]
    ]
    rows += [
        {"": name.replace("_", " "), "before": "", "after": _format(value)}
        for name, value in summary["agreement"].items()
    ]
    changes = "; ".join(f"{key}: {change}" for key, change in summary["changed"].items())
    description = f"{ctx.of} → {run}, {len(iterations)} iterations. Changed: {changes or 'nothing'}"
    await acreate_table_artifact(
        rows, key=artifact_key(run, "reprocessed"), description=description
    )
    data = base64.b64encode(
        await asyncio.to_thread((ctx.directory / "reprocessed.png").read_bytes)
    ).decode()
    key = artifact_key(run, "distributions")
    await acreate_image_artifact(
        image_url=f"data:image/png;base64,{data}", key=key, description=description
    )
    return summary


def _compare(
    ctx: OpenBranch, iterations: Sequence[int], notes: Mapping[int, str]
) -> dict[str, Any]:
    # Of today's keys: a key that is younger than the run has not changed.
    stored = validate_stored(Branches(ctx.files).config(ctx.of)).model_dump(mode="json")
    comparison = compare(ctx.files, ctx.config, ctx.of, iterations, notes=notes, stored=stored)
    result = summary(comparison)
    write_page(comparison, ctx.directory / "reprocessed.html")
    write_picture(comparison, ctx.directory / "reprocessed.png")
    write_whole(
        ctx.directory / "reprocessed.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    )
    return result


def _format(value: float | int | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
