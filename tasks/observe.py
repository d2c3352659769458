"""What a person watches: the line in the terminal, TensorBoard, Prefect artifacts, the summary and the report page.

Not here: what happened (the store), or how a page is drawn (`rlpipe.observe`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from prefect.artifacts import acreate_image_artifact, acreate_table_artifact

from rlpipe.observe.figure import write_figure
from rlpipe.observe.report import write_report
from rlpipe.observe.summary import summarise, write_summary
from rlpipe.observe.tensorboard import TensorBoardSink
from rlpipe.run_history import HistoryReader, iteration_metrics
from rlpipe.types import NodeRef, Stage
from tasks.context import RunContext

SHOWN = (
    ("reward", "rollout/raw_reward"),
    ("loss", "train/loss"),
    ("grad", "train/grad_norm"),
    ("Δlogp", "max_logprob_difference"),
    ("tok/s", "perf/rollout_tokens_per_s"),
)
FIGURES = {
    "rollout": {"tokens": "perf/rollout_tokens", "tokens/s": "perf/rollout_tokens_per_s", "cut off": "rollout/truncated_ratio"},
    "reward": {"mean": "rollout/raw_reward", "errors": "rollout/reward_error_ratio"},
    "advantage": {"engine - trainer": "rollout/logprob_abs_diff/max", "length": "rollout/response_len/mean"},
    "train": {"loss": "train/loss", "grad norm": "train/grad_norm", "entropy": "train/entropy"},
    "sync": {"engine - trainer": "sync/logprob_difference", "bytes": "sync/bytes"},
}
"""Stage → label → metric, in the table of an iteration."""


class Observer:
    """Hears of each iteration and evaluation in the process that drives the run."""

    def __init__(self, it: RunContext, first: int, *, startup_seconds: float) -> None:
        self._it = it
        self._reader = HistoryReader(it.files, it.config, it.directory)
        self._accuracy: dict[str, float] = {}
        self._board = TensorBoardSink(it.directory / "tensorboard", first) if it.config.observe.tensorboard else None
        self._spent(startup_seconds, {"start": startup_seconds})

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._board is not None:
            self._board.close()

    async def iteration(self, k: int, nodes: dict[str, NodeRef], *, seconds: float) -> None:
        """An iteration is committed."""
        outputs = {Stage(name): self._it.nodes.get(Stage(name), node.digest).outputs for name, node in nodes.items()}
        metrics = iteration_metrics(outputs)
        work = dict(self._it.stage_seconds)
        self._it.stage_seconds.clear()
        if self._board is not None:
            self._board.write(k, {**metrics, **{f"perf/{stage}_time": spent for stage, spent in work.items()}})
        other = {stage: spent for stage, spent in work.items() if stage == "checkpoint"}
        self._spent(seconds, other, iteration_s=seconds, work_s=sum(work.values()))
        shown = {label: metrics[name] for label, name in SHOWN if name in metrics}
        self._it.progress.iteration({**shown, **self._accuracy})
        await iteration_artifact(self._it.config.run, k, nodes, metrics)

    async def evaluation(self, version: int, metrics: dict[str, float], *, seconds: float) -> None:
        """An evaluation is recorded."""
        self._it.stage_seconds.pop("eval", None)
        self._accuracy = {name.split("/")[1]: value for name, value in metrics.items() if name.endswith("/accuracy")}
        self._spent(seconds, {"eval": seconds})
        if self._board is not None:
            self._board.write(version, metrics)
        line = ", ".join(f"{name} accuracy {value:.3f}" for name, value in self._accuracy.items())
        self._it.progress.say(f"{self._it.config.run}: after {version} iterations {line}")
        await self.report()

    async def report(self) -> dict[str, Any]:
        """Write summary.json, report.html and report.png as far as the run has come; answers the summary."""
        summary = await asyncio.to_thread(self._write)
        await curve_artifact(self._it.config.run, self._it.directory / "report.png")
        return summary

    def _write(self) -> dict[str, Any]:
        history, directory = self._reader.read(), self._it.directory
        write_summary(history, directory / "summary.json")
        write_report(history, directory / "report.html")
        write_figure(history, directory / "report.png")
        return summarise(history)

    def _spent(self, seconds: float, other: dict[str, float], **entry: float) -> None:
        with (self._it.directory / "timing.jsonl").open("a") as log:
            log.write(json.dumps({"time": time.time(), "seconds": seconds, "other": other, **entry}) + "\n")


async def iteration_artifact(run: str, k: int, nodes: dict[str, NodeRef], metrics: dict[str, float]) -> None:
    """A table in Prefect's UI: each stage's node and seconds."""
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
    await acreate_table_artifact(rows, key=artifact_key(run, "iteration"), description=about)


def figures(stage: str, metrics: dict[str, float]) -> str:
    """The figures of one stage in words."""
    said = FIGURES.get(stage, {}).items()
    return ", ".join(f"{label} {metrics[metric]:.4g}" for label, metric in said if metric in metrics)


def artifact_key(run: str, what: str) -> str:
    """A name Prefect takes: lower case, digits and dashes."""
    return f"{run}-{what}".lower().replace("_", "-").replace(".", "-")


async def curve_artifact(run: str, picture: Path) -> None:
    """The curves in Prefect's UI; the picture travels inside the artifact."""
    data = base64.b64encode(await asyncio.to_thread(picture.read_bytes)).decode()
    key = artifact_key(run, "curve")
    await acreate_image_artifact(image_url=f"data:image/png;base64,{data}", key=key, description=f"reward and accuracy of {run}")
