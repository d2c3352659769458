"""The summary of a run (rlpipe.observe.summary, rlpipe.observe.run_history)."""

from __future__ import annotations

import json
import math

import pytest

from rlpipe.observe.run_history import REWARD, Evaluation, IterationRecord, RunHistory
from rlpipe.observe.summary import stage_table, summarise, write_summary
from tests.observe.histories import example_history


def test_the_summary_has_accuracy_before_and_after_reward_and_times():
    summary = summarise(example_history())
    assert summary["accuracy"]["heldout"]["before"] == 0.36
    assert summary["accuracy"]["heldout"]["after"] == 0.74
    assert summary["accuracy"]["heldout"]["curve"][1] == [25, 0.47]
    assert summary["iterations"] == 300
    assert summary["seconds_per_iteration"] == pytest.approx(1.84)
    assert summary["seconds_per_stage"]["train"]["median"] == 0.52
    assert summary["samples"] == 76_800
    assert summary["reward"]["first"] < summary["reward"]["last"]


def test_stage_shares_add_up_to_1_including_time_outside_iterations():
    table = stage_table(example_history())
    assert sum(row["share"] or 0.0 for row in table.values()) == pytest.approx(1)
    assert table["train"]["total"] == pytest.approx(0.52 * 300)
    assert table["eval"] == {
        "total": 17.9,
        "median": None,
        "share": pytest.approx(17.9 / (1.84 * 300 + 60.6)),
    }


def test_the_log_prob_difference_has_two_sources():
    scored = IterationRecord(
        0, {"rollout/logprob_abs_diff/mean": 1e-6, "train/train_rollout_logprob_abs_diff": 2e-6}
    )
    assert RunHistory("r", [scored]).logprob_difference() == [(0, 1e-6)]
    trained = IterationRecord(0, {"train/train_rollout_logprob_abs_diff": 2e-6})
    assert RunHistory("r", [trained]).logprob_difference() == [(0, 2e-6)]
    assert RunHistory("r").logprob_difference() == []


def test_before_of_a_fork_is_the_score_of_its_first_weights():
    scores = [Evaluation(20, "a", 0.5, 10), Evaluation(25, "a", 0.4, 10)]
    iterations = [IterationRecord(k, {}) for k in range(20, 25)]
    history = RunHistory("fork", iterations, scores)
    assert summarise(history)["accuracy"]["a"]["before"] == 0.5
    later = RunHistory("fork", iterations, scores[1:])
    assert summarise(later)["accuracy"]["a"]["before"] is None


def test_without_an_evaluation_before_training_before_is_null():
    history = RunHistory(
        "r", evaluations=[Evaluation(5, "a", 0.5, 10), Evaluation(9, "a", 0.4, 10)]
    )
    assert summarise(history)["accuracy"]["a"] == {
        "measure": "accuracy",
        "before": None,
        "after": 0.4,
        "best": 0.5,
        "n": 10,
        "curve": [[5, 0.5], [9, 0.4]],
    }


def test_a_run_without_iterations_has_a_summary():
    summary = summarise(RunHistory("empty", status="failed"))
    assert summary["status"] == "failed"
    assert summary["iterations"] == 0
    assert summary["accuracy"] == {}
    assert summary["reward"] == {"first": None, "last": None, "best": None}
    assert summary["seconds_per_iteration"] is None


def test_the_file_is_strict_json_with_null_for_nan(tmp_path):
    history = RunHistory("r", [IterationRecord(0, {REWARD: math.nan})], totals={"worst": math.inf})
    path = write_summary(history, tmp_path / "deep" / "summary.json")
    read = json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the file")
    )
    assert read["reward"]["first"] is None
    assert read["worst"] is None
    assert [child.name for child in path.parent.iterdir()] == ["summary.json"]
