"""Write progress, metrics, artifacts, the summary and the report page of a run.

with Observer(ctx, first, startup_seconds=...) as observer:
    await observer.iteration(k, nodes, seconds=...)
    summary = await observer.report()
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prefect import get_run_logger
from prefect.context import FlowRunContext
from prefect.logging import get_logger
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from rlpipe.batch.files import read_samples, read_scored
from rlpipe.config.run import RunConfig
from rlpipe.errors import ObjectMissing, RlpipeError
from rlpipe.lineage.history import MAX_DIFFERENCE, HistoryReader, iteration_metrics
from rlpipe.lineage.sample_sets import write_run_samples
from rlpipe.observe.log_functions import LogFunctions
from rlpipe.observe.overview import overview
from rlpipe.observe.pages import SAMPLES_PAGE
from rlpipe.observe.run_history import (
    ACCURACY,
    MEAN_REWARD,
    PAIR_ACCURACY,
    PAIR_MARGIN,
    RunHistory,
)
from rlpipe.observe.run_report import write_report
from rlpipe.observe.sinks import Sinks
from rlpipe.observe.summary import summarise, write_summary
from rlpipe.slime.args import slime_args
from rlpipe.store.tables import scalars
from rlpipe.sync.probe import NOISE_FACTOR
from rlpipe.types import NodeRef, Stage
from tasks.artifacts import (
    UpdatedArtifact,
    curve_artifact,
    iteration_artifact,
    machine_artifact,
    machines_line,
    machines_of,
    overview_artifact,
)
from tasks.context import RunContext
from tasks.sync import logprob_bound

HEAD = "commit_sha256"
"""Name of the newest commit's digest in TensorBoard and W&B (`tools.audit verify --head`)."""
LOGPROB_DIFFERENCE = "Δlogp"
LOGPROB_LEGEND = (
    "Δlogp is how far the engines' log-probs are from the trainer's after a sync: the mean over "
    "tokens, which is 0 at best, and the limit above which the run stops; max Δlogp is that of the "
    "worst token"
)
NO_SIGNAL_SHARE = 0.8
NO_SIGNAL_ITERATIONS = 5
"""A run warns once if this share of groups has equal rewards in consecutive iterations."""
ROLLOUT_PREFIXES = ("rollout/", "engine/", "perf/rollout")
"""Metrics that a user's log function may log instead of the sinks."""


class Observer:
    """Records each iteration and evaluation in the process that drives the run."""

    def __init__(self, ctx: RunContext, first: int, *, startup_seconds: float) -> None:
        self._ctx = ctx
        self._reader = HistoryReader(ctx.files, ctx.config, ctx.directory)
        self._accuracy: dict[str, float] = {}
        self._machines_shown = False
        # A run that continues explained its values at its first start.
        self._explained = first > 0
        self._without_signal = 0
        self._curve = UpdatedArtifact()
        self._overview = UpdatedArtifact()
        self._functions = LogFunctions(ctx.config.observe, slime_args(ctx.cluster.config))
        self._sinks = Sinks(
            ctx.config.observe,
            ctx.config.run,
            ctx.directory,
            first,
            ctx.config.model_dump(mode="json"),
        )
        address = flow_run.id and url_for("flow-run", flow_run.id)
        self._log = get_run_logger() if FlowRunContext.get() else get_logger("rlpipe")
        link = {"flow_run_url": address} if address else {}
        self._log_timing(startup_seconds, {"start": startup_seconds}, **link)

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self._sinks.close()

    async def iteration(self, k: int, nodes: dict[str, NodeRef], *, seconds: float) -> None:
        """Record a committed iteration. `nodes`: handle of each stage; `seconds`: wall time."""
        outputs = await asyncio.to_thread(self._outputs, nodes)
        metrics = iteration_metrics(outputs)
        elsewhere_s = _seconds_elsewhere(self._ctx, nodes)
        work_s = elsewhere_s or dict(self._ctx.stage_seconds)
        # Seconds of stages that run ahead count for the iteration that finishes next.
        self._ctx.stage_seconds.clear()
        logged = {**metrics, **{f"perf/{stage}_time": spent for stage, spent in work_s.items()}}
        # The user's function has logged the rollout's metrics: do not log them twice.
        if await self.rollout(k, nodes, metrics):
            metrics = _without_rollout(metrics)
            logged = _without_rollout(logged)
        self._sinks.write(k, logged)
        head = await asyncio.to_thread(self._head, k)
        if head is not None:
            self._sinks.write_text(k, HEAD, head)
        other = {stage: spent for stage, spent in work_s.items() if stage == "checkpoint"}
        self._log_timing(seconds, other, iteration_s=seconds, work_s=sum(work_s.values()))
        values = terminal_values(
            self._ctx.config,
            metrics,
            self._accuracy,
            rollout_s=self._ctx.progress.busy_seconds("rollout"),
        )
        self._explain(values)
        line = self._ctx.progress.iteration(values, k, elsewhere_s)
        self._log.info("%s", line)
        self._warn_without_signal(metrics)
        await iteration_artifact(self._ctx.config.run, k, nodes, metrics, head)
        await self._show_machines(outputs)
        if (k + 1) % self._ctx.config.observe.report_interval == 0:
            await self.report()

    def _explain(self, values: Mapping[str, Any]) -> None:
        """Print an explanation of Δlogp, at the first start of a run."""
        if not self._explained and LOGPROB_DIFFERENCE in values:
            self._ctx.progress.explain(f"{self._ctx.config.run}: {LOGPROB_LEGEND}")
            self._explained = True

    def _warn_without_signal(self, metrics: Mapping[str, float]) -> None:
        """Warn once per process if most groups of consecutive iterations have equal rewards."""
        config = self._ctx.config
        share = metrics.get("rollout/zero_std_fraction", 0.0)
        if (
            self._without_signal == NO_SIGNAL_ITERATIONS
            or not config.advantage.compares_within_group
        ):
            return
        self._without_signal = self._without_signal + 1 if share >= NO_SIGNAL_SHARE else 0
        if self._without_signal == NO_SIGNAL_ITERATIONS:
            reward = metrics.get("rollout/raw_reward")
            mean = "" if reward is None else f" (mean reward {reward:.3g})"
            self._ctx.progress.say(
                f"{config.run}: {share:.0%} of the groups have equal rewards{mean}, for "
                f"{NO_SIGNAL_ITERATIONS} iterations at least {NO_SIGNAL_SHARE:.0%}: they train "
                "nothing. If the task is not learned: use prompts of another difficulty, a reward "
                "with more values, more n_samples_per_prompt or a higher temperature; "
                "rlpipe rollouts shows the samples"
            )

    async def _show_machines(self, outputs: dict[Stage, dict[str, Any]]) -> None:
        """Print devices and versions once per process. Nodes of older runs do not have them."""
        machines = {} if self._machines_shown else machines_of(outputs)
        if machines:
            self._ctx.progress.say(f"{self._ctx.config.run}: {machines_line(machines)}")
            await machine_artifact(self._ctx.config.run, machines)
            self._machines_shown = True

    def _head(self, k: int) -> str | None:
        """Return the sha256 of an iteration's commit, or None if the run only samples."""
        try:
            return self._ctx.branches.read_stored(self._ctx.config.run, k)[1]
        except ObjectMissing:
            return None

    def _outputs(self, nodes: dict[str, NodeRef]) -> dict[Stage, dict[str, Any]]:
        return {
            Stage(name): self._ctx.nodes.get(Stage(name), node.digest).outputs
            for name, node in nodes.items()
        }

    async def rollout(
        self, k: int, nodes: dict[str, NodeRef], metrics: dict[str, float] | None = None
    ) -> bool:
        """Call the user's log function for a scored rollout. True if it logged the rollout."""
        return self._functions.logs_rollouts and await self._call_user(
            partial(self._log_rollout, k, nodes, metrics or {})
        )

    def _log_rollout(self, k: int, nodes: dict[str, NodeRef], metrics: dict[str, float]) -> bool:
        rollout = self._ctx.nodes.get(Stage.ROLLOUT, nodes[Stage.ROLLOUT].digest)
        reward = self._ctx.nodes.get(Stage.REWARD, nodes[Stage.REWARD].digest)
        known = metrics or iteration_metrics(
            {Stage.ROLLOUT: rollout.outputs, Stage.REWARD: reward.outputs}
        )
        extra = {name: value for name, value in known.items() if name.startswith(ROLLOUT_PREFIXES)}
        samples = read_scored(self._ctx.files, rollout, reward)
        return self._functions.rollout(k, samples, extra, rollout.outputs["seconds"])

    def _log_evaluation(
        self, version: int, nodes: dict[str, NodeRef], metrics: dict[str, float]
    ) -> bool:
        samples = {
            name: read_samples(self._ctx.files, self._ctx.nodes.get(Stage.EVAL, node.digest))
            for name, node in nodes.items()
        }
        return self._functions.evaluation(version, samples, metrics)

    async def _call_user(self, call: Callable[[], bool]) -> bool:
        """Call a user's log function. Print an error instead of stopping the run."""
        try:
            return await asyncio.to_thread(call)
        except RlpipeError as error:
            self._ctx.progress.say(f"{self._ctx.config.run}: {type(error).__name__}: {error}")
            return False

    async def evaluation(
        self,
        version: int,
        nodes: dict[str, NodeRef],
        metrics: dict[str, float],
        *,
        seconds: float,
        concurrent: bool,
    ) -> None:
        """Record an evaluation. `nodes`: held-out set → its node.

        `concurrent`: the run did not wait for the evaluation, so its seconds are not added.
        """
        # Seconds of evaluations have their own entry in timing.jsonl.
        self._ctx.stage_seconds.pop("eval", None)
        self._accuracy = {
            name.split("/")[1]: value
            for name, value in metrics.items()
            if name.endswith("/accuracy")
        }
        self._log_timing(0.0 if concurrent else seconds, {"eval": seconds})
        log = partial(self._log_evaluation, version, nodes, metrics)
        if not (self._functions.logs_evaluations and await self._call_user(log)):
            self._sinks.write(version, metrics)
            history = await asyncio.to_thread(self._reader.read)
            line = ", ".join(
                f"{name} {measured_mean(history, name)} {value:.3f}"
                for name, value in self._accuracy.items()
            )
            # The weights that `rlpipe evaluate` evaluates were trained by another run.
            after = f"after {version} iterations " if self._ctx.config.num_rollout else ""
            self._ctx.progress.say(f"{self._ctx.config.run}: {after}{line}")
        await self.report()

    async def samples_page(self) -> None:
        """Write samples.html, to which the next report links."""
        await asyncio.to_thread(self._write_samples)

    def _write_samples(self) -> None:
        try:
            links = self._reader.read().links
            write_run_samples(
                self._ctx.files,
                self._ctx.config.run,
                self._ctx.directory,
                self._reader.evaluation_nodes,
                links,
            )
        except RlpipeError as error:
            # The page can be written again (`tools.report`); the run is finished without it.
            self._ctx.progress.say(
                f"{self._ctx.config.run}: writing {SAMPLES_PAGE} failed: "
                f"{type(error).__name__}: {error}"
            )

    async def say_reward_errors(self) -> None:
        """Print how many samples had errors of the reward function, if any had."""
        history = await asyncio.to_thread(self._reader.read)
        if errors := history.reward_errors():
            run = self._ctx.config.run
            self._ctx.progress.say(f"{run}: {errors}; all of them: rlpipe rollouts {run}")

    async def report(self) -> dict[str, Any]:
        """Write summary.json, report.html, report.png and the tables; return the summary."""
        summary, page = await asyncio.to_thread(self._write)
        await curve_artifact(self._curve, self._ctx.config.run, self._ctx.directory / "report.png")
        await overview_artifact(self._overview, self._ctx.config.run, page)
        return summary

    def _write(self) -> tuple[dict[str, Any], str]:
        # matplotlib is only imported by processes that draw: one second of CPU time.
        from rlpipe.observe.pictures import write_figure

        history = self._reader.read()
        directory = self._ctx.directory
        write_summary(history, directory / "summary.json")
        write_report(history, directory / "report.html")
        write_figure(history, directory / "report.png")
        try:
            scalars.update(self._ctx.files, self._ctx.config.run)
        except RlpipeError as error:
            # The tables can be rebuilt. `tools.audit` reports damaged records.
            self._ctx.progress.say(
                f"{self._ctx.config.run}: updating the metric tables failed: "
                f"{type(error).__name__}: {error}"
            )
        return summarise(history), overview(history, directory)

    def _log_timing(self, seconds: float, other: dict[str, float], **entry: float | str) -> None:
        line = {"time": time.time(), "seconds": seconds, "other": other, **entry}
        with (self._ctx.directory / "timing.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")


def terminal_values(
    config: RunConfig,
    metrics: Mapping[str, float],
    accuracy: Mapping[str, float],
    *,
    rollout_s: float = 0.0,
) -> dict[str, float | int | str]:
    """Return label → value of an iteration for the terminal. Metrics without a value are left out.

    `accuracy`: held-out set → its newest score. `rollout_s`: seconds in which at least one rollout
    ran since the iteration before; 0 if another process ran it, or an earlier one.
    """
    speed = metrics.get("perf/rollout_tokens_per_s")
    if config.debug.load_debug_rollout_data:
        speed = None  # of the run that sampled
    if speed is not None and config.async_buffer_size and rollout_s:
        # Rollouts in flight share the engines: the time of each alone would give a lower speed.
        speed = metrics["perf/rollout_tokens"] / rollout_s
    values = {
        "reward": metrics.get("rollout/raw_reward"),
        **accuracy,
        **_logprob_differences(config, metrics),
        "tok/s": None if speed is None else round(speed),
        **_loss(config, metrics),
        "grad": metrics.get("train/grad_norm"),
    }
    return {label: value for label, value in values.items() if value is not None}


def _loss(config: RunConfig, metrics: Mapping[str, float]) -> dict[str, float | str | None]:
    """Return the loss, or the entropy if the loss is 0 by construction; of pairs also the accuracy.

    Advantages that are relative to the group add up to 0. With the ratio near 1, so does the policy
    loss, whatever the policy learns.
    """
    if config.train.loss.type == "policy" and config.advantage.compares_within_group:
        return {"entropy": metrics.get("train/entropy")}
    loss: dict[str, float | str | None] = {"loss": metrics.get("train/loss")}
    if config.train.loss.compares_pairs:
        accuracy: float | str | None = metrics.get(PAIR_ACCURACY)
        # As in TRL a tie counts as wrong. Before the first step, policy and reference are equal.
        if accuracy == 0 and metrics.get(PAIR_MARGIN) == 0:
            accuracy = "0 (ties)"
        return {"accuracy": accuracy, **loss}
    return loss


def _seconds_elsewhere(ctx: RunContext, nodes: Mapping[str, NodeRef]) -> dict[str, float] | None:
    """Return the seconds by stage of an iteration that is a flow run of its own, else None."""
    if ctx.config.orchestration.iterations != "deployment":
        return None
    return {
        name: node.outputs["seconds"] for name, node in nodes.items() if "seconds" in node.outputs
    }


def _logprob_differences(config: RunConfig, metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the log-prob differences of engines and trainer, each with its bound.

    A push checks the mean. Only a gate bounds the largest difference of one token.
    """
    values = {}
    mean = metrics.get("sync/logprob_difference")
    if mean is not None:
        bound = max(logprob_bound(config), NOISE_FACTOR * metrics.get("sync/logprob_noise", 0.0))
        values[LOGPROB_DIFFERENCE] = f"{mean:.2g} (limit {bound:.2g})"
    largest = metrics.get(MAX_DIFFERENCE)
    if largest is not None:
        gates = [gate for gate in config.gates.bounds if gate.metric == MAX_DIFFERENCE]
        bounds = [f" (limit {gate.at_most:.2g})" for gate in gates if gate.at_most is not None]
        values[f"max {LOGPROB_DIFFERENCE}"] = f"{largest:.2g}{''.join(bounds[:1])}"
    return values


def measured_mean(history: RunHistory, dataset: str) -> str:
    """Return the name of a held-out set's mean reward: accuracy or mean reward."""
    return ACCURACY if history.measure(dataset) == ACCURACY else MEAN_REWARD


def _without_rollout(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(ROLLOUT_PREFIXES)}
