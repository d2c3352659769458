"""Read the history of a run from its branch, for the summary and the report.

`HistoryReader.read` returns the `RunHistory` that `rlpipe.observe.run_report` draws. Everything
comes from the records, also for a run that was stopped and resumed, except the wall times in
`timing.jsonl` in the folder of the report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpipe.batch.files import read_samples
from rlpipe.config.data import EvalDataset
from rlpipe.config.load import dump, validate_stored
from rlpipe.config.run import RunConfig
from rlpipe.lineage.continuation import changed_settings, differing
from rlpipe.lineage.shown_images import shown_images
from rlpipe.lineage.stage_inputs import eval_inputs
from rlpipe.observe.pages import FLOW_RUN_TITLE, SAMPLES_PAGE, SAMPLES_TITLE
from rlpipe.observe.run_history import (
    ACCURACY,
    MEAN_REWARD,
    Evaluation,
    IterationRecord,
    RunHistory,
    SampleChange,
    show_accuracy,
)
from rlpipe.store.branches import Branches, parse_commit_name
from rlpipe.store.labels import label_text
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import read_rows
from rlpipe.store.segments import Segments
from rlpipe.types import Commit, Node, Sample, Stage

READERS = 8
READ_AHEAD = 256
"""Iterations that are read at once."""
WeightsOf = Mapping[tuple[int, str], str]
"""(weight version, digest of the recorded node) → digest of the segment that replaces it."""
Evaluated = tuple[int, dict[str, Node]]
"""Weight version, and the node of each held-out set on which these weights were evaluated."""
TIMED_STAGES = (Stage.ROLLOUT, Stage.REWARD, Stage.ADVANTAGE, Stage.TRAIN, Stage.SYNC)

MAX_DIFFERENCE = "max_logprob_difference"
DIFFERENCE_METRICS = ("rollout/logprob_abs_diff/max", "sync/logprob_difference_max")


class HistoryReader:
    """Read what was committed since the last call, so a report of a long run costs what is new."""

    def __init__(self, files: Files, config: RunConfig, directory: Path) -> None:
        self._files = files
        self._config = config
        self._directory = directory
        self._nodes = Nodes(files)
        self._branches = Branches(files)
        # Not all commits: each has the ids of the groups that it trained.
        self._newest: Commit | None = None
        self._records: list[IterationRecord] = []
        self._evaluations: dict[tuple[int, str], tuple[Evaluation, Node]] = {}

    def read(self) -> RunHistory:
        """Return the history of the branch so far. Raises: ObjectMissing, ObjectCorrupt."""
        config = self._config
        weights_of = self._weights_of()
        self._add_evaluations(*self._evaluated(self._newest, weights_of))
        for commit, record, evaluated in self._new_iterations(weights_of):
            self._newest = commit
            self._records.append(record)
            self._add_evaluations(*evaluated)
        evaluations = [evaluation for evaluation, _ in self._evaluations.values()]
        # A fork counts its iterations from iteration 0 of its parent.
        done = self._newest.iteration + 1 if self._newest else self._first_iteration()
        timing = _timing(self._directory)
        return RunHistory(
            run=config.run,
            iterations=list(self._records),
            evaluations=evaluations,
            samples=self._changes(),
            config_yaml=dump(config),
            totals=_totals(self._records, evaluations, timing),
            other_seconds=_other_seconds(timing),
            wall_seconds=[entry["iteration_s"] for entry in timing if "iteration_s" in entry],
            packages=self._newest.packages if self._newest else {},
            has_reference=config.advantage.reference,
            links=_links(self._directory, timing),
            reward_changes=self._reward_changes(),
            description=self._origin(),
            status=self._status(done),
        )

    def _origin(self) -> str:
        """Return the run that this one began with, as a sentence; "" for a run of its own."""
        config = self._config
        if origin := self._branches.get(config.run).parent:
            parent, iteration = parse_commit_name(origin)
            stored = validate_stored(self._branches.config(parent)).model_dump(mode="json")
            changed = changed_settings(stored, config.model_dump(mode="json"))
            settings = "; ".join(f"{key}: {change}" for key, change in changed.items())
            return f"Fork of {parent}@{iteration}. {settings}".strip()
        if config.num_rollout == 0 and config.start_from is not None:
            weights = config.start_from
            at = "" if weights.iteration is None else f"@{weights.iteration}"
            return f"Evaluation of the weights of {weights.branch}{at}."
        return ""

    def _status(self, done: int) -> str:
        """Return the state of the run after `done` iterations, as text."""
        total = self._config.num_rollout
        if done >= total:
            return "finished"
        stop = self._config.stop_when
        metrics = {
            name: value
            for (version, _), (_, node) in self._evaluations.items()
            if version == done
            for name, value in node.outputs.get("metrics", {}).items()
        }
        if stop is not None and stop.is_met(metrics):
            return f"ended by stop_when after {done} of {total} iterations"
        return f"{done} of {total} iterations"

    @property
    def evaluation_nodes(self) -> dict[tuple[int, str], Node]:
        """(weight version, held-out set) → node of each evaluation that was read."""
        return {key: node for key, (_, node) in self._evaluations.items()}

    def _new_iterations(
        self, weights_of: WeightsOf
    ) -> Iterator[tuple[Commit, IterationRecord, Evaluated]]:
        """Yield what was committed since the last read, in order."""
        run = self._config.run
        after = self._newest.iteration if self._newest else None
        newest = self._branches.newest(run, after)
        if newest is None or newest.branch != run:
            return
        first = after + 1 if after is not None else self._first_iteration()

        def read(iteration: int) -> tuple[Commit, IterationRecord, Evaluated]:
            commit = self._branches.read(run, iteration)
            return commit, self._record(commit), self._evaluated(commit, weights_of)

        # A driver that starts reads the whole history, which has eight records an iteration.
        with ThreadPoolExecutor(READERS) as pool:
            for start in range(first, newest.iteration + 1, READ_AHEAD):
                end = min(start + READ_AHEAD, newest.iteration + 1)
                yield from pool.map(read, range(start, end))

    def _first_iteration(self) -> int:
        parent = self._branches.get(self._config.run).parent
        return int(parent.rpartition("/")[2]) + 1 if parent else 0

    def _record(self, commit: Commit) -> IterationRecord:
        nodes = {stage: self._nodes.get(stage, digest) for stage, digest in commit.nodes.items()}
        outputs = {stage: node.outputs for stage, node in nodes.items()}
        seconds = {
            str(stage): outputs[stage]["seconds"] for stage in TIMED_STAGES if stage in outputs
        }
        rewards = outputs.get(Stage.REWARD, {})
        return IterationRecord(
            commit.iteration,
            iteration_metrics(outputs),
            seconds,
            reward_errors=rewards.get("errors", 0),
            failed=rewards.get("failed", {}),
            reward=_reward(nodes.get(Stage.REWARD)),
        )

    def _reward_changes(self) -> dict[int, str]:
        """Return the iterations with another reward than before; a fork follows its parent."""
        first = self._first_iteration()
        parent = self._branches.before(self._config.run, first) if first else None
        digest = parent.nodes.get(Stage.REWARD) if parent else None
        before = _reward(self._nodes.find(Stage.REWARD, digest)) if digest else {}
        changes: dict[int, str] = {}
        for record in self._records:
            if before and record.reward and (words := _reward_change(before, record.reward)):
                changes[record.iteration] = words
            before = record.reward or before
        return changes

    def _weights_of(self) -> WeightsOf:
        """Return (weight version, train node) → segment of the states that segments replace."""
        pointers = Segments(self._files).of(self._config.run)
        # Sorted by epoch: the newest one counts.
        return {(pointer.version, pointer.weights): pointer.segment for pointer in pointers}

    def _evaluated(self, newest: Commit | None, weights_of: WeightsOf) -> Evaluated:
        """Return the evaluations of the weights after a commit.

        Before the first commit these are the weights with which the run began.
        """
        run = self._config.run
        first = self._first_iteration()
        newest = newest or self._branches.before(run, first)
        recorded = newest.nodes[Stage.TRAIN] if newest else self._branches.get(run).init
        version = newest.iteration + 1 if newest else first
        weights = weights_of.get((version, recorded), recorded)
        contracts = self._branches.contracts(run)
        nodes = {
            dataset.name: self._nodes.find(
                Stage.EVAL, eval_inputs(self._config, dataset, weights, contracts).digest
            )
            for dataset in self._config.evaluation.datasets
        }
        return version, {name: node for name, node in nodes.items() if node is not None}

    def _add_evaluations(self, version: int, nodes: dict[str, Node]) -> None:
        for dataset in self._config.evaluation.datasets:
            node = nodes.get(dataset.name)
            if node is not None and (version, dataset.name) not in self._evaluations:
                evaluation = self._evaluation(version, dataset, node)
                self._evaluations[version, dataset.name] = (evaluation, node)

    def _evaluation(self, version: int, dataset: EvalDataset, node: Node) -> Evaluation:
        """Return an evaluation, with what its rewards say about their mean."""
        column = read_rows(self._files, node.files, ["reward"])["reward"].to_pylist()
        rewards = [reward for reward in column if reward is not None]
        threshold = dataset.pass_threshold
        passed = None
        if rewards and threshold != type(dataset).model_fields["pass_threshold"].default:
            passed = sum(reward >= threshold for reward in rewards) / len(rewards)
        return Evaluation(
            version,
            dataset.name,
            node.outputs["accuracy"],
            node.outputs["scored"],
            binary=all(reward in (0, 1) for reward in rewards),
            passed=passed,
        )

    def _changes(self) -> list[SampleChange]:
        """Return answers to the first prompts of the first held-out set, before and after."""
        evaluations = list(self._evaluations.values())
        nodes = [
            node
            for evaluation, node in evaluations
            if evaluation.dataset == evaluations[0][0].dataset
        ]
        if len(nodes) < 2:
            return []
        before = _first_samples(read_samples(self._files, nodes[0], tokens=False))
        after = _first_samples(read_samples(self._files, nodes[-1], tokens=False))
        groups = [group_id for group_id in before if group_id in after]
        shown = groups[: self._config.observe.samples_in_report]
        changes = [_change(before[group_id], after[group_id]) for group_id in shown]
        images = [[image[0] for image in before[group_id].images] for group_id in shown]
        pictures = shown_images(self._files, (digest for row in images for digest in row))
        return [
            replace(
                change, pictures=tuple(pictures[digest] for digest in row if digest in pictures)
            )
            for change, row in zip(changes, images, strict=True)
        ]


def _reward(node: Node | None) -> dict[str, dict[str, Any]]:
    """Return `IterationRecord.reward` of a reward node; {} for None."""
    return {} if node is None else {"settings": node.config, "sources": node.hooks}


def _reward_change(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> str:
    """Return the differences of two rewards in words; "" without any."""
    settings = differing(before["settings"], after["settings"], "reward")
    changes = [f"{key}: {old} → {new}" for key, (old, new) in settings.items()]
    changes += [
        f"{path} has another source"
        for path, digest in after["sources"].items()
        if before["sources"].get(path, digest) != digest
    ]
    return "; ".join(changes)


def iteration_metrics(outputs: Mapping[Stage, dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of one iteration from the outputs of its nodes."""
    metrics: dict[str, float] = {}
    for output in outputs.values():
        metrics |= output.get("metrics", {})
    rollout = outputs.get(Stage.ROLLOUT, {})
    if "truncated_ratio" in rollout:
        metrics["rollout/truncated_ratio"] = rollout["truncated_ratio"]
    for stage in (Stage.ROLLOUT, Stage.TRAIN):
        if tokens := outputs.get(stage, {}).get("tokens"):
            metrics[f"perf/{stage}_tokens"] = float(tokens)
            metrics[f"perf/{stage}_tokens_per_s"] = tokens / outputs[stage]["seconds"]
    if switches := [switch for output in outputs.values() for switch in output.get("switches", ())]:
        metrics["perf/switch_time"] = sum(switch["seconds"] for switch in switches)
        metrics["perf/trainer_peak_bytes"] = max(
            switch["trainer_peak_bytes"] for switch in switches
        )
        metrics["perf/gpu_used_bytes"] = max(switch["used_bytes"] for switch in switches)
    differences = [metrics[name] for name in DIFFERENCE_METRICS if name in metrics]
    if differences:
        metrics[MAX_DIFFERENCE] = max(differences)
    return metrics


def _first_samples(samples: list[Sample]) -> dict[str, Sample]:
    """Return the first sample of each group."""
    return {sample.group_id: sample for sample in samples if sample.index == 0}


def _change(before: Sample, after: Sample) -> SampleChange:
    prompt = before.prompt
    if not isinstance(prompt, str):
        prompt = "\n".join(str(message.get("content", "")) for message in prompt)
    label = label_text(before.label)
    return SampleChange(prompt, before.response, after.response, label, before.reward, after.reward)


def _totals(
    records: list[IterationRecord], evaluations: list[Evaluation], timing: list[dict[str, Any]]
) -> dict[str, Any]:
    by_stage: dict[str, float] = _other_seconds(timing)
    for record in records:
        for name, seconds in record.seconds.items():
            by_stage[name] = by_stage.get(name, 0.0) + seconds
    overhead = _overheads(timing)
    main = [
        evaluation for evaluation in evaluations if evaluation.dataset == evaluations[0].dataset
    ]
    return {
        "accuracy_before": main[0].mean_reward if len(main) > 1 else None,
        "accuracy_after": main[-1].mean_reward if main else None,
        "held_out_measure": ((ACCURACY if show_accuracy(main) else MEAN_REWARD) if main else None),
        "seconds": sum(entry["seconds"] for entry in timing),
        "seconds_by_stage": by_stage,
        "orchestration_s_per_iteration": sum(overhead) / len(overhead) if overhead else None,
        "max_logprob_difference": max(
            (
                record.metrics[MAX_DIFFERENCE]
                for record in records
                if MAX_DIFFERENCE in record.metrics
            ),
            default=None,
        ),
        "rollout_tokens_per_s": _rate(records, "rollout"),
        "train_tokens_per_s": _rate(records, "train"),
    }


def _links(directory: Path, timing: list[dict[str, Any]]) -> dict[str, str]:
    """Return the other pages of the run: its samples, and the newest flow run of its driver."""
    links = {SAMPLES_TITLE: SAMPLES_PAGE} if (directory / SAMPLES_PAGE).is_file() else {}
    flow_runs = [entry["flow_run_url"] for entry in timing if "flow_run_url" in entry]
    return links | ({FLOW_RUN_TITLE: flow_runs[-1]} if flow_runs else {})


def _other_seconds(timing: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds outside the recorded stages, which `RunHistory.other_seconds` names."""
    total: dict[str, float] = {}
    for entry in timing:
        for name, seconds in entry["other"].items():
            total[name] = total.get(name, 0.0) + seconds
    # Negative where stages of several iterations ran at the same time.
    between = sum(_overheads(timing))
    return {**total, "between stages": between} if between > 0 else total


def _overheads(timing: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of each iteration in which no stage ran."""
    return [entry["iteration_s"] - entry["work_s"] for entry in timing if "iteration_s" in entry]


def _rate(records: list[IterationRecord], stage: str) -> float | None:
    """Return the tokens per second of a stage over the whole run."""
    seconds = sum(record.seconds.get(stage, 0.0) for record in records)
    tokens = sum(record.metrics.get(f"perf/{stage}_tokens", 0.0) for record in records)
    return tokens / seconds if seconds else None


def _timing(directory: Path) -> list[dict[str, Any]]:
    path = directory / "timing.jsonl"
    if not path.is_file():
        return []
    return [entry for line in path.read_text().splitlines() if (entry := _entry(line))]


def _entry(line: str) -> dict[str, Any] | None:
    """Parse a line of the timing log; None if a full disk or a kill cut it off."""
    try:
        return json.loads(line)
    except ValueError:
        return None
