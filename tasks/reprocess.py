"""Reprocessing stored rollouts: an iteration is one task, then old and new are put side by side.

Needs no actor. What is opened once in a process (functions, workers, the store) is found by the new
branch's name, so that task parameters stay form-sized.

Not here: what is done to an iteration (`rlpipe.reprocess.branch`), or which ones
(`flows.reprocess`).
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

from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.lineage.rollouts import find
from rlpipe.observe.comparison import summary, write_page, write_picture
from rlpipe.observe.progress import Progress
from rlpipe.observe.summary import write_whole
from rlpipe.reprocess.branch import Reprocessor
from rlpipe.reprocess.report import compare
from rlpipe.store.branches import Branches
from rlpipe.store.epochs import Epochs
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import RunFile, write_run
from tasks.observe import artifact_key
from tasks.record import RETRIES_AFTER_S, may_pass


@dataclass
class Opened:
    """What the tasks of one reprocessed branch share in this process."""

    of: str
    config: RunConfig
    files: Files
    directory: Path
    reprocessor: Reprocessor
    progress: Progress


_OPEN: dict[str, Opened] = {}


@asynccontextmanager
async def opened(
    of: str, config: RunConfig, files: Files, directory: Path, progress: Progress
) -> AsyncIterator[None]:
    """The branch `config.run` is reprocessed from the run `of` in this process, and in no other.

    Raises: Fenced if it is elsewhere; ConfigError.
    """
    epoch = await asyncio.to_thread(Epochs(files).acquire, config.run)
    epoch.keep()
    try:
        write_run(
            directory.parent,
            config.run,
            RunFile(store=files.root, config=config.model_dump(mode="json")),
        )
        async with Reprocessor(files, config, epoch.check) as reprocessor:
            _OPEN[config.run] = Opened(of, config, files, directory, reprocessor, progress)
            try:
                yield
            finally:
                del _OPEN[config.run]
    finally:
        epoch.release()


async def _attempt(run: str, k: int) -> State:
    """Its state is `Reused` if everything was in the store."""
    it = _OPEN[run]
    stored = await asyncio.to_thread(find, it.files, it.of, k)
    if stored is None:
        raise ConfigError("that run has no such rollout", where=f"{it.of}, iteration {k}")
    made = await it.reprocessor.iteration(
        stored, lambda done, total: it.progress.stage("reward", done=done, total=total)
    )
    said = made.reward.outputs
    line: dict[str, float | str] = {"iteration": f"{k}", "reward": said.get("mean", "none")}
    if made.reused:
        line["reused"] = "all"
    it.progress.iteration(line | ({"errors": f"{said['errors']}"} if said["errors"] else {}))
    nodes = {"rollout": made.rollout.digest, "reward": made.reward.digest}
    if made.advantage is not None:
        nodes["advantage"] = made.advantage.digest
    data = {"iteration": k, "nodes": nodes, "reused": made.reused, "without": made.without}
    return Completed(
        name="Reused" if made.reused else "Completed",
        message=f"reward {made.reward.digest[:12]}",
        data=data,
    )


_TASK: Any = task(
    name="reprocess",
    task_run_name="reprocess-{k}",
    cache_policy=NO_CACHE,
    retries=len(RETRIES_AFTER_S),
    retry_delay_seconds=RETRIES_AFTER_S,
    retry_condition_fn=may_pass,
)(_attempt)


async def reprocess(run: str, k: int) -> dict[str, Any]:
    """Iteration k of the branch: `{"iteration", "nodes", "reused", "without"}`. What may pass is
    tried twice more."""
    state = await _TASK(run, k, return_state=True)
    return await state.aresult()


@task(name="compare", cache_policy=NO_CACHE)
async def put_side_by_side(
    run: str, iterations: Sequence[int], notes: Mapping[int, str]
) -> dict[str, Any]:
    """Old and new as `reprocessed.html`, `.png` and `.json` in the branch's folder, and as
    artifacts; what the JSON says."""
    it = _OPEN[run]
    it.progress.stage("compare", note="the columns of before and after")
    said = await asyncio.to_thread(_compared, it, iterations, notes)
    rows = [
        {"": row["what"], "before": _shown(row["before"]), "after": _shown(row["after"])}
        for row in said["figures"]
    ]
    rows += [
        {"": name.replace("_", " "), "before": "", "after": _shown(value)}
        for name, value in said["agreement"].items()
    ]
    what = "; ".join(f"{key}: {change}" for key, change in said["changed"].items()) or "nothing"
    about = f"{it.of} → {run}, {len(iterations)} iterations. Changed: {what}"
    await acreate_table_artifact(rows, key=artifact_key(run, "reprocessed"), description=about)
    data = base64.b64encode(
        await asyncio.to_thread((it.directory / "reprocessed.png").read_bytes)
    ).decode()
    key = artifact_key(run, "distributions")
    await acreate_image_artifact(
        image_url=f"data:image/png;base64,{data}", key=key, description=about
    )
    return said


def _compared(it: Opened, iterations: Sequence[int], notes: Mapping[int, str]) -> dict[str, Any]:
    stored = Branches(it.files).config(it.of)
    found = compare(it.files, it.config, it.of, iterations, notes=notes, stored=stored)
    said = summary(found)
    write_page(found, it.directory / "reprocessed.html")
    write_picture(found, it.directory / "reprocessed.png")
    write_whole(
        it.directory / "reprocessed.json", json.dumps(said, indent=2, ensure_ascii=False) + "\n"
    )
    return said


def _shown(value: float | int | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
