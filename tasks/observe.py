"""What a person watches: the line in the terminal, TensorBoard, Prefect artifacts, the summary and
the report page.

Not here: what happened (the store), or how a page is drawn (`rlpipe.observe`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import UUID

from httpx import HTTPStatusError
from prefect.artifacts import (
    acreate_image_artifact,
    acreate_markdown_artifact,
    acreate_table_artifact,
)
from prefect.client.orchestration import get_client

from rlpipe.batch.files import read_samples, read_scored
from rlpipe.errors import ObjectMissing, RlpipeError
from rlpipe.lineage.history import HistoryReader, iteration_metrics
from rlpipe.observe.figure import write_figure
from rlpipe.observe.functions import LogFunctions
from rlpipe.observe.overview import overview
from rlpipe.observe.report import write_report
from rlpipe.observe.sinks import Sinks
from rlpipe.observe.summary import summarise, write_summary
from rlpipe.slime.args import slime_args
from rlpipe.store.tables import scalars
from rlpipe.types import NodeRef, Stage
from tasks.context import RunContext
from tasks.machine import show_machines

SHOWN = (
    ("reward", "rollout/raw_reward"),
    ("loss", "train/loss"),
    ("grad", "train/grad_norm"),
    ("Δlogp", "max_logprob_difference"),
    ("tok/s", "perf/rollout_tokens_per_s"),
)
FIGURES = {
    "rollout": {
        "tokens": "perf/rollout_tokens",
        "tokens/s": "perf/rollout_tokens_per_s",
        "cut off": "rollout/truncated_ratio",
    },
    "reward": {"mean": "rollout/raw_reward", "errors": "rollout/reward_error_ratio"},
    "advantage": {
        "engine - trainer": "rollout/logprob_abs_diff/max",
        "length": "rollout/response_len/mean",
    },
    "train": {"loss": "train/loss", "grad norm": "train/grad_norm", "entropy": "train/entropy"},
    "sync": {"engine - trainer": "sync/logprob_difference", "bytes": "sync/bytes"},
}
"""Stage → label → metric, in the table of an iteration."""
HEAD = "commit_sha256"
"""Name of the newest commit's digest in TensorBoard and W&B (`tools.audit verify --head`)."""
OF_ROLLOUT = ("rollout/", "perf/rollout")
"""Metrics of an iteration that a function of the user may log in our place."""


class Observer:
    """Hears of each iteration and evaluation in the process that drives the run."""

    def __init__(self, it: RunContext, first: int, *, startup_seconds: float) -> None:
        self._it = it
        self._reader = HistoryReader(it.files, it.config, it.directory)
        self._accuracy: dict[str, float] = {}
        self._machines_shown = False
        self._curve, self._overview = Shown(), Shown()
        self._functions = LogFunctions(it.config.observe, slime_args(it.config))
        self._sinks = Sinks(
            it.config.observe, it.config.run, it.directory, first, it.config.model_dump(mode="json")
        )
        self._spent(startup_seconds, {"start": startup_seconds})

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sinks.close()

    async def iteration(self, k: int, nodes: dict[str, NodeRef], *, seconds: float) -> None:
        """An iteration is committed."""
        outputs = await asyncio.to_thread(self._outputs, nodes)
        metrics = iteration_metrics(outputs)
        work = dict(self._it.stage_seconds)
        self._it.stage_seconds.clear()
        figures = {**metrics, **{f"perf/{stage}_time": spent for stage, spent in work.items()}}
        if await self.sampled(k, nodes, metrics):
            metrics, figures = (
                {name: one[name] for name in one if not name.startswith(OF_ROLLOUT)}
                for one in (metrics, figures)
            )
        self._sinks.write(k, figures)
        head = await asyncio.to_thread(self._head, k)
        if head is not None:
            self._sinks.tell(k, HEAD, head)
        other = {stage: spent for stage, spent in work.items() if stage == "checkpoint"}
        self._spent(seconds, other, iteration_s=seconds, work_s=sum(work.values()))
        shown = {label: metrics[name] for label, name in SHOWN if name in metrics}
        self._it.progress.iteration({**shown, **self._accuracy})
        await iteration_artifact(self._it.config.run, k, nodes, metrics, head)
        if not self._machines_shown:
            self._machines_shown = await show_machines(
                self._it, artifact_key(self._it.config.run, "machine"), outputs
            )
        if (k + 1) % self._it.config.observe.report_interval == 0:
            await self.report()

    def _head(self, k: int) -> str | None:
        """sha256 of the commit of an iteration, for whoever keeps it; None of one that is only
        sampled."""
        try:
            return self._it.branches.read_stored(self._it.config.run, k)[1]
        except ObjectMissing:
            return None

    def _outputs(self, nodes: dict[str, NodeRef]) -> dict[Stage, dict[str, Any]]:
        return {
            Stage(name): self._it.nodes.get(Stage(name), node.digest).outputs
            for name, node in nodes.items()
        }

    async def sampled(
        self, k: int, nodes: dict[str, NodeRef], metrics: dict[str, float] | None = None
    ) -> bool:
        """The rollout of an iteration is scored: whether a function of the user has logged it."""
        return self._functions.logs_rollouts and await self._logged(
            partial(self._log_rollout, k, nodes, metrics or {})
        )

    def _log_rollout(self, k: int, nodes: dict[str, NodeRef], metrics: dict[str, float]) -> bool:
        rollout, reward = (
            self._it.nodes.get(stage, nodes[stage].digest)
            for stage in (Stage.ROLLOUT, Stage.REWARD)
        )
        known = metrics or iteration_metrics(
            {Stage.ROLLOUT: rollout.outputs, Stage.REWARD: reward.outputs}
        )
        extra = {name: value for name, value in known.items() if name.startswith(OF_ROLLOUT)}
        return self._functions.rollout(
            k, read_scored(self._it.files, rollout, reward), extra, rollout.outputs["seconds"]
        )

    def _log_evaluation(
        self, version: int, nodes: dict[str, NodeRef], metrics: dict[str, float]
    ) -> bool:
        found = {name: self._it.nodes.get(Stage.EVAL, node.digest) for name, node in nodes.items()}
        samples = {name: read_samples(self._it.files, node) for name, node in found.items()}
        return self._functions.evaluation(version, samples, metrics)

    async def _logged(self, call: Callable[[], bool]) -> bool:
        """Its answer; what it raises, or keeps its rows from being read, is said and stops
        nothing."""
        try:
            return await asyncio.to_thread(call)
        except RlpipeError as error:
            self._it.progress.say(f"{self._it.config.run}: {type(error).__name__}: {error}")
            return False

    async def evaluation(
        self,
        version: int,
        nodes: dict[str, NodeRef],
        metrics: dict[str, float],
        *,
        seconds: float,
        beside: bool,
    ) -> None:
        """An evaluation is recorded: the node of each held-out set by its name. `beside`: the run
        did not wait for it."""
        self._it.stage_seconds.pop("eval", None)
        self._accuracy = {
            name.split("/")[1]: value
            for name, value in metrics.items()
            if name.endswith("/accuracy")
        }
        self._spent(0.0 if beside else seconds, {"eval": seconds})
        logs = self._functions.logs_evaluations
        if not (
            logs and await self._logged(partial(self._log_evaluation, version, nodes, metrics))
        ):
            self._sinks.write(version, metrics)
            line = ", ".join(
                f"{name} accuracy {value:.3f}" for name, value in self._accuracy.items()
            )
            self._it.progress.say(f"{self._it.config.run}: after {version} iterations {line}")
        await self.report()

    async def report(self) -> dict[str, Any]:
        """Write summary.json, report.html and report.png as far as the run has come, and bring the
        branch's tables up to date; answers the summary."""
        summary, page = await asyncio.to_thread(self._write)
        await curve_artifact(self._curve, self._it.config.run, self._it.directory / "report.png")
        await overview_artifact(self._overview, self._it.config.run, page)
        return summary

    def _write(self) -> tuple[dict[str, Any], str]:
        history = self._reader.read()
        directory = self._it.directory
        write_summary(history, directory / "summary.json")
        write_report(history, directory / "report.html")
        write_figure(history, directory / "report.png")
        try:
            scalars.update(self._it.files, self._it.config.run)
        except (
            RlpipeError
        ) as error:  # they can be made again; what is wrong with the records is the audit's to say
            self._it.progress.say(
                f"{self._it.config.run}: the tables are not up to date: {type(error).__name__}: {error}"
            )
        return summarise(history), overview(history)

    def _spent(self, seconds: float, other: dict[str, float], **entry: float) -> None:
        with (self._it.directory / "timing.jsonl").open("a") as log:
            log.write(
                json.dumps({"time": time.time(), "seconds": seconds, "other": other, **entry})
                + "\n"
            )


async def iteration_artifact(
    run: str, k: int, nodes: dict[str, NodeRef], metrics: dict[str, float], head: str | None = None
) -> None:
    """A table in Prefect's UI: each stage's node and seconds. `head`: sha256 of the commit, which
    fixes all that is below it."""
    rows = [
        {
            "stage": name,
            "seconds": round(node.outputs.get("seconds", 0.0), 3),
            "reused": node.reused,
            "figures": figures(name, metrics),
            "node": node.digest[:16],
        }
        for name, node in nodes.items()
    ]
    reward = metrics.get("rollout/raw_reward")
    about = f"iteration {k}" + (f", mean reward {reward:.3f}" if reward is not None else "")
    about += f"; commit sha256 {head}" if head is not None else ""
    await acreate_table_artifact(rows, key=artifact_key(run, "iteration"), description=about)


def figures(stage: str, metrics: dict[str, float]) -> str:
    """The figures of one stage in words."""
    said = FIGURES.get(stage, {}).items()
    return ", ".join(
        f"{label} {metrics[metric]:.4g}" for label, metric in said if metric in metrics
    )


def artifact_key(run: str, what: str) -> str:
    """A name Prefect takes: lower case, digits and dashes."""
    return f"{run}-{what}".lower().replace("_", "-").replace(".", "-")


class Shown:
    """An artifact that is made once in this process and then written anew: Prefect keeps every one
    that is made for good."""

    def __init__(self) -> None:
        self._id: UUID | None = None

    async def show(self, data: str, make: Callable[[str], Awaitable[UUID]]) -> None:
        """Have it show this. `make` creates it; so it does if somebody deleted it."""
        if self._id is None or not await _written(self._id, data):
            self._id = await make(data)


async def _written(artifact: UUID, data: str) -> bool:
    """Write an artifact anew; False if there is none. Not by `update_artifact`, which stores all of
    it in an event as well."""
    async with get_client() as client:
        try:
            await client.request(
                "PATCH", "/artifacts/{id}", path_params={"id": artifact}, json={"data": data}
            )
        except HTTPStatusError as error:
            if error.response.status_code != 404:
                raise
            return False
    return True


async def curve_artifact(shown: Shown, run: str, picture: Path) -> None:
    """The curves in Prefect's UI; the picture travels inside the artifact."""
    data = base64.b64encode(await asyncio.to_thread(picture.read_bytes)).decode()
    about = {"key": artifact_key(run, "curve"), "description": f"reward and accuracy of {run}"}
    await shown.show(
        f"data:image/png;base64,{data}", lambda url: acreate_image_artifact(url, **about)
    )


async def overview_artifact(shown: Shown, run: str, page: str) -> None:
    """Whether it learns, whether it is healthy and where the time went, in Prefect's UI."""
    about = {"key": artifact_key(run, "overview"), "description": f"{run} at a glance"}
    await shown.show(page, lambda markdown: acreate_markdown_artifact(markdown, **about))
