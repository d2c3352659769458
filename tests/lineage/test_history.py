"""The history of a run as its branch tells it (rlpipe.lineage.history)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe.batch.files import write_evaluation
from rlpipe.config.load import validate
from rlpipe.config.run import RunConfig
from rlpipe.lineage.history import HistoryReader, iteration_metrics
from rlpipe.lineage.stage_inputs import Inputs, config_digest, eval_inputs
from rlpipe.observe.pages import FLOW_RUN_TITLE
from rlpipe.observe.run_history import Evaluation, SampleChange
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.branches import Branches, commit_name, parse_commit_name
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.segments import Segments
from rlpipe.types import Commit, DataState, Sample, Stage, Status

PROMPTS = {"type": "reasoning_gym", "task": "chain_sum", "size": 4}
DATASETS = [{"name": "held", "prompts": PROMPTS}, {"name": "other", "prompts": PROMPTS}]


def config(run: str = "run", num_rollout: int = 3, **sections: Any) -> RunConfig:
    values = {
        "run": run,
        "num_rollout": num_rollout,
        "model": {"source": {"type": "huggingface", "hf_checkpoint": "/models/m"}},
        "data": {"prompts": {"type": "file", "paths": ["a.jsonl"]}},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
        "reward": {"function": {"type": "math"}},
        "evaluation": {"datasets": DATASETS},
    }
    return validate({**values, **sections})


class Written:
    """A run whose records are written by hand, as the stages would."""

    def __init__(
        self, folder: Path, run: str = "run", parent: str | None = None, **sections: Any
    ) -> None:
        self.files, self.config, self.directory = (
            Files(folder / "store"),
            config(run, **sections),
            folder / run,
        )
        self.directory.mkdir()
        self.nodes, self.branches = Nodes(self.files), Branches(self.files)
        root = self.branches.get(parse_commit_name(parent)[0]).init if parent else None
        self.weights = [root or self.node(Stage.INIT, run=run)]
        self.branches.create(run, self.config.model_dump(mode="json"), self.weights[0], parent)
        self.parent = parent

    def node(self, stage: Stage, outputs: dict[str, Any] | None = None, **inputs: Any) -> str:
        return self.nodes.commit(Inputs(stage, {}, inputs).node(outputs=outputs or {})).digest

    def iterate(
        self, k: int, function: dict[str, dict[str, Any]] | None = None, **outputs: dict[str, Any]
    ) -> None:
        """Commit iteration k. `outputs`: of stages, by name. `function`: config and hooks."""
        stages = (Stage.ROLLOUT, Stage.REWARD, Stage.ADVANTAGE, Stage.TRAIN, Stage.SYNC)
        outputs_of = {stage: {"seconds": 0.5, **outputs.get(stage, {})} for stage in stages}
        made = {
            stage: self.node(stage, outputs_of[stage], run=self.config.run, k=k) for stage in stages
        }
        used = function or {"config": self.config.reward.identity()}
        parents = {"rollout": made[Stage.ROLLOUT]}
        node = Inputs(Stage.REWARD, parents, used["config"], used.get("hooks", {})).node(
            outputs=outputs_of[Stage.REWARD]
        )
        made[Stage.REWARD] = self.nodes.commit(node).digest
        self.weights.append(made[Stage.TRAIN])
        parent = commit_name(self.config.run, k - 1) if len(self.weights) > 2 else self.parent
        packages = {"torch": f"2.{k}"}
        record = {
            "plans": ("p",),
            "data": DataState(),
            "config_digest": config_digest(self.config),
            "packages": packages,
        }
        self.branches.commit(
            Commit(branch=self.config.run, iteration=k, parent=parent, nodes=made, **record)
        )

    def evaluate(
        self,
        accuracy: float,
        dataset: int = 0,
        answers: dict[str, str] | None = None,
        index: int = -1,
        right: float = 1.0,
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Record an evaluation of the newest weights (or those of `index`). `answers`: group id →
        response; the reward of "right" is `right`, of others 0."""
        chosen = self.config.evaluation.datasets[dataset]
        inputs = eval_inputs(self.config, chosen, self.weights[index])
        samples = [answered(group_id, text) for group_id, text in (answers or {"q": "a"}).items()]
        rows = [
            RewardRow(of.group_id, of.index, right * (of.response == "right")) for of in samples
        ]
        record = write_evaluation(self.files, inputs.digest, 0, samples, rows)
        outputs = {"accuracy": accuracy, "scored": len(samples), "metrics": metrics or {}}
        self.nodes.commit(inputs.node(files=(record,), outputs=outputs))

    def spent(self, seconds: float, other: dict[str, float], **entry: float) -> None:
        with (self.directory / "timing.jsonl").open("a") as log:
            log.write(json.dumps({"seconds": seconds, "other": other, **entry}) + "\n")

    def reader(self) -> HistoryReader:
        return HistoryReader(self.files, self.config, self.directory)


def answered(group_id: str, response: str) -> Sample:
    return Sample(
        group_id=group_id,
        index=0,
        prompt=f"question {group_id}",
        prompt_ids=[1],
        label="right",
        response=response,
        response_ids=[2],
        status=Status.COMPLETED,
    )


@pytest.fixture
def run(tmp_path: Path) -> Written:
    return Written(tmp_path)


def test_a_run_that_has_just_begun_has_an_empty_history(run: Written):
    history = run.reader().read()
    assert (history.run, history.iterations, history.evaluations, history.samples) == (
        "run",
        [],
        [],
        [],
    )
    assert history.status == "0 of 3 iterations"
    assert history.packages == {}
    assert history.totals["accuracy_before"] is None
    assert history.totals["max_logprob_difference"] is None
    assert "hf_checkpoint: /models/m" in history.config_yaml


def test_the_history_has_each_committed_iteration_with_metrics_and_seconds(run: Written):
    for k in range(3):
        run.iterate(k, advantage={"metrics": {"rollout/raw_reward": k / 2}, "seconds": 1.0 + k})
    history = run.reader().read()
    assert [record.iteration for record in history.iterations] == [0, 1, 2]
    assert history.series("rollout/raw_reward") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert history.iterations[2].seconds == {
        "rollout": 0.5,
        "reward": 0.5,
        "advantage": 3.0,
        "train": 0.5,
        "sync": 0.5,
    }
    assert history.totals["seconds_by_stage"]["advantage"] == 6.0
    assert history.packages == {"torch": "2.2"}
    assert history.status == "finished"


def test_evaluations_are_found_by_their_weights(run: Written):
    run.evaluate(0.25)
    run.iterate(0)
    run.iterate(1)
    run.evaluate(0.5)
    run.evaluate(0.125, dataset=1)
    history = run.reader().read()
    assert history.evaluations == [
        Evaluation(0, "held", 0.25, 1),
        Evaluation(2, "held", 0.5, 1),
        Evaluation(2, "other", 0.125, 1),
    ]
    assert (history.totals["accuracy_before"], history.totals["accuracy_after"]) == (0.25, 0.5)


def test_a_second_read_gives_the_same_history_as_a_new_reader(run: Written):
    reader = run.reader()
    assert reader.read().evaluations == []
    run.evaluate(0.25)
    assert len(reader.read().evaluations) == 1
    for k in range(3):
        run.iterate(k)
        assert len(reader.read().iterations) == k + 1
        run.evaluate(0.25 + k / 4)
    assert reader.read() == run.reader().read()
    assert [evaluation.iteration for evaluation in reader.read().evaluations] == [0, 1, 2, 3]


@pytest.mark.parametrize("iterations", [1, 5])
def test_a_first_read_lists_no_folder_for_each_iteration(
    run: Written, monkeypatch: pytest.MonkeyPatch, iterations: int
):
    for k in range(iterations):
        run.iterate(k)
        run.evaluate(k / 8)
    listed: list[str] = []
    entries = Files.entries
    monkeypatch.setattr(
        Files, "entries", lambda files, prefix: listed.append(prefix) or entries(files, prefix)
    )
    history = run.reader().read()
    assert [evaluation.iteration for evaluation in history.evaluations] == [
        *range(1, iterations + 1)
    ]
    assert sorted(listed) == ["branches/run", "branches/run/segments"]


def test_evaluations_of_a_segment_are_of_the_version_that_it_replaces(run: Written):
    run.iterate(0)
    made = run.node(Stage.SEGMENT, replaced=run.weights[1])
    Segments(run.files).record("run", 1, 1, weights=run.weights[1], segment="0" * 64)
    Segments(run.files).record("run", 1, 2, weights=run.weights[1], segment=made)
    run.weights.append(made)
    run.evaluate(0.5)
    assert [evaluation.iteration for evaluation in run.reader().read().evaluations] == [1]


def test_the_report_compares_answers_to_the_same_prompts(run: Written):
    run.evaluate(0.0, answers={"a": "wrong", "b": "worse", "gone": "wrong"})
    run.evaluate(0.5, dataset=1, answers={"a": "of another set"})
    run.iterate(0)
    run.evaluate(0.5, answers={"b": "right", "a": "wrong still"})
    assert run.reader().read().samples == [
        SampleChange("question a", "wrong", "wrong still", "right", 0.0, 0.0),
        SampleChange("question b", "worse", "right", "right", 0.0, 1.0),
    ]


def test_samples_in_report_bounds_the_samples(tmp_path: Path):
    run = Written(tmp_path, observe={"samples_in_report": 2})
    answers = {f"q{number}": "a" for number in range(5)}
    run.evaluate(0.0, answers=answers)
    run.iterate(0)
    run.evaluate(0.0, answers=answers)
    assert [change.prompt for change in run.reader().read().samples] == [
        "question q0",
        "question q1",
    ]


def test_the_history_of_a_fork_has_only_its_own_iterations(tmp_path: Path):
    root = Written(tmp_path)
    for k in range(3):
        root.iterate(k)
    root.evaluate(0.125, index=0)
    fork = Written(tmp_path, "fork", parent=commit_name("run", 1))
    reader = fork.reader()
    assert (reader.read().iterations, reader.read().evaluations) == ([], [])
    fork.iterate(2)
    fork.evaluate(0.5)
    assert [record.iteration for record in reader.read().iterations] == [2]
    assert reader.read().evaluations == [Evaluation(3, "held", 0.5, 1)]


def test_another_reward_is_a_change_of_its_first_iteration(tmp_path: Path):
    run = Written(tmp_path, num_rollout=5)
    function = {"config": {"function": {"type": "python"}}, "hooks": {"reward.py:score": "1"}}
    run.iterate(0)
    run.iterate(1)
    reader = run.reader()
    assert reader.read().reward_changes == {}
    run.iterate(2, function)
    run.iterate(3, {**function, "hooks": {"reward.py:score": "2"}})
    run.iterate(4, {**function, "hooks": {"reward.py:score": "2"}})
    changes = {
        2: "reward.function.type: math → python",
        3: "reward.py:score has another source",
    }
    assert reader.read().reward_changes == changes
    assert run.reader().read().reward_changes == changes


def test_the_samples_with_reward_errors_are_summed_over_the_run(tmp_path: Path):
    run = Written(tmp_path)
    run.iterate(0)
    assert run.reader().read().reward_errors() == ""
    for k, prompt in ((1, "a"), (2, "b")):
        failed = {"prompts": {prompt: 2}, "last_error": f"ValueError: {prompt} (reward.py:{k})"}
        run.iterate(k, reward={"seconds": 0.5, "errors": 2, "failed": failed})
    assert run.reader().read().reward_errors() == (
        "4 samples had reward errors, in 2 of 3 iterations; prompts: a (2), b (2); "
        "last error: ValueError: b (reward.py:2)"
    )


def test_a_fork_with_another_reward_has_the_change_at_its_first_iteration(tmp_path: Path):
    run = Written(tmp_path)
    run.iterate(0)
    reward = {"function": {"type": "math", "boxed": True}}
    fork = Written(
        tmp_path,
        "fork",
        commit_name("run", 0),
        fork_from={"branch": "run", "iteration": 0},
        reward=reward,
    )
    fork.iterate(1)
    fork.iterate(2)
    [(iteration, words)] = fork.reader().read().reward_changes.items()
    assert iteration == 1
    assert "reward.function.boxed" in words


def test_a_fork_is_finished_after_the_last_iteration_in_its_parents_numbers(tmp_path: Path):
    root = Written(tmp_path)
    root.iterate(0)
    root.iterate(1)
    fork = Written(tmp_path, "fork", parent=commit_name("run", 1))
    reader = fork.reader()
    assert reader.read().status == "2 of 3 iterations"
    fork.iterate(2)
    assert reader.read().status == "finished"


def test_a_run_that_stop_when_ended_says_so(tmp_path: Path):
    stop = {"metric": "eval/held/accuracy", "at_least": 0.5}
    run = Written(tmp_path, num_rollout=10, stop_when=stop)
    run.iterate(0)
    run.evaluate(0.5, metrics={"eval/held/accuracy": 0.5})
    assert run.reader().read().status == "ended by stop_when after 1 of 10 iterations"
    # Only the newest weights count: the run continued with another condition.
    run.iterate(1)
    assert run.reader().read().status == "2 of 10 iterations"
    run.evaluate(0.25, metrics={"eval/held/accuracy": 0.25})
    assert run.reader().read().status == "2 of 10 iterations"


def test_the_first_evaluation_of_a_fork_is_of_its_first_weights(tmp_path: Path):
    root = Written(tmp_path)
    root.evaluate(0.125)
    root.iterate(0)
    root.iterate(1)
    fork = Written(tmp_path, "fork", parent=commit_name("run", 1))
    root.evaluate(0.25)
    fork.iterate(2)
    fork.evaluate(0.5)
    history = fork.reader().read()
    assert history.description.startswith("Fork of run@1.")
    assert history.evaluations == [Evaluation(2, "held", 0.25, 1), Evaluation(3, "held", 0.5, 1)]
    assert (history.totals["accuracy_before"], history.totals["accuracy_after"]) == (0.25, 0.5)


def test_time_outside_the_stages_comes_from_the_timing_log(run: Written):
    run.spent(30.0, {"start": 30.0})
    run.spent(4.0, {"checkpoint": 1.0}, iteration_s=4.0, work_s=3.5)
    run.spent(3.0, {}, iteration_s=3.0, work_s=2.0)
    run.spent(2.0, {"eval": 2.0})
    run.spent(20.0, {"start": 20.0})
    run.iterate(0, train={"seconds": 2.0})
    history = run.reader().read()
    other = {"start": 50.0, "checkpoint": 1.0, "eval": 2.0, "between stages": 1.5}
    assert history.other_seconds == other
    assert history.iteration_seconds == 3.5
    assert history.totals["seconds"] == 59.0
    assert history.totals["orchestration_s_per_iteration"] == 0.75
    stages = {"rollout": 0.5, "reward": 0.5, "advantage": 0.5, "train": 2.0, "sync": 0.5}
    assert history.totals["seconds_by_stage"] == {**stages, **other}


def test_iterations_whose_stages_overlap_have_no_time_between_stages(run: Written):
    run.spent(3.0, {}, iteration_s=3.0, work_s=5.0)
    assert run.reader().read().other_seconds == {}


def test_a_truncated_line_of_the_timing_log_is_skipped(run: Written):
    run.spent(30.0, {"start": 30.0})
    with (run.directory / "timing.jsonl").open("a") as log:
        log.write('{"seconds": 4.0, "oth\n')
    run.spent(2.0, {"eval": 2.0})
    assert run.reader().read().totals["seconds"] == 32.0


def test_tokens_per_second_cover_the_whole_run(run: Written):
    run.iterate(0, rollout={"tokens": 100, "seconds": 1.0}, train={"tokens": 300, "seconds": 0.5})
    run.iterate(1, rollout={"tokens": 100, "seconds": 3.0}, train={"tokens": 300, "seconds": 1.5})
    totals = run.reader().read().totals
    assert totals["rollout_tokens_per_s"] == 50.0
    assert totals["train_tokens_per_s"] == 300.0


def test_the_largest_log_prob_difference_of_the_run_is_kept(run: Written):
    for k, difference in enumerate((1e-6, 3e-6, 2e-6)):
        run.iterate(k, sync={"metrics": {"sync/logprob_difference_max": difference}})
    assert run.reader().read().totals["max_logprob_difference"] == 3e-6


def test_the_metrics_of_an_iteration_include_stage_metrics_and_rates():
    outputs = {
        Stage.ROLLOUT: {"tokens": 50, "seconds": 2.0, "truncated_ratio": 0.25},
        Stage.REWARD: {"scored": 3},
        Stage.ADVANTAGE: {
            "metrics": {"rollout/raw_reward": 0.5, "rollout/logprob_abs_diff/max": 2e-6}
        },
        Stage.TRAIN: {"tokens": 80, "seconds": 0.5, "metrics": {"train/loss": 0.1}},
        Stage.SYNC: {"metrics": {"sync/logprob_difference_max": 1e-6}},
    }
    assert iteration_metrics(outputs) == {
        "rollout/raw_reward": 0.5,
        "rollout/logprob_abs_diff/max": 2e-6,
        "rollout/truncated_ratio": 0.25,
        "train/loss": 0.1,
        "sync/logprob_difference_max": 1e-6,
        "perf/rollout_tokens": 50.0,
        "perf/rollout_tokens_per_s": 25.0,
        "perf/train_tokens": 80.0,
        "perf/train_tokens_per_s": 160.0,
        "max_logprob_difference": 2e-6,
    }


def test_a_supervised_iteration_has_no_rollout_metrics():
    outputs = {
        Stage.ROLLOUT: {"tokens": 0, "seconds": 1.0, "truncated_ratio": 0.0},
        Stage.TRAIN: {"metrics": {"train/loss": 1.0}},
    }
    assert iteration_metrics(outputs) == {"train/loss": 1.0, "rollout/truncated_ratio": 0.0}


def test_phase_switches_on_shared_gpus_are_metrics_of_their_iteration():
    def switch(seconds: float, peak: float, used: float) -> dict[str, float]:
        return {"seconds": seconds, "trainer_peak_bytes": peak, "used_bytes": used}

    outputs = {
        Stage.ADVANTAGE: {"switches": [switch(0.5, 1.0, 9.0)]},
        Stage.SYNC: {"switches": [switch(0.25, 7.0, 8.0)]},
    }
    expected = {
        "perf/switch_time": 0.75,
        "perf/trainer_peak_bytes": 7.0,
        "perf/gpu_used_bytes": 9.0,
    }
    assert iteration_metrics(outputs) == expected


def test_a_mean_of_rewards_other_than_0_and_1_is_not_an_accuracy(run: Written):
    run.evaluate(0.5, answers={"a": "right", "b": "wrong"}, right=0.4)
    run.evaluate(0.5, dataset=1, answers={"a": "right", "b": "wrong"})
    history = run.reader().read()
    assert history.measure("held") == "mean reward"
    assert history.measure("other") == "accuracy"
    assert history.totals["held_out_measure"] == "mean reward"


def test_a_threshold_of_a_set_gives_a_pass_rate(tmp_path: Path):
    datasets = [{**DATASETS[0], "pass_threshold": 0.3}]
    run = Written(tmp_path, evaluation={"datasets": datasets})
    run.evaluate(0.2, answers={"a": "right", "b": "wrong"}, right=0.4)
    history = run.reader().read()
    assert history.measure("held") == "pass rate"
    assert [score.value for score in history.scores("held")] == [0.5]


def test_the_links_are_the_page_of_samples_and_the_newest_flow_run(run: Written):
    run.spent(1.0, {"start": 1.0})
    assert run.reader().read().links == {}
    for number in range(2):
        with (run.directory / "timing.jsonl").open("a") as log:
            entry = {"seconds": 1, "other": {}, "flow_run_url": f"http://host/{number}"}
            log.write(json.dumps(entry) + "\n")
    (run.directory / "samples.html").write_text("")
    links = {"Samples": "samples.html", FLOW_RUN_TITLE: "http://host/1"}
    assert run.reader().read().links == links
