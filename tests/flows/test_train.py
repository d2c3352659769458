"""Whole runs with real parts: Prefect, Ray, SGLang, router, Megatron, store."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from rlpipe.lineage.stage_inputs import checkpoint_inputs
from rlpipe.store.audit.verification import check_branch, check_store
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage
from tests.flows.live_run import LiveRun
from tests.servers import seaweed

MODEL = "{type: made, maker: 'deployments/recipes/tiny_models.py:make_spell_backward_model'}"
WORDS = (
    "{type: reasoning_gym, task: spell_backward, "
    "arguments: {min_word_len: 3, max_word_len: 5}, size: 40, seed: %d}"
)
SAMPLING = f"""
model: {{source: {MODEL}, dtype: float32}}
data: {{prompts: {WORDS % 0}}}
rollout: {{rollout_batch_size: 4, n_samples_per_prompt: 4, rollout_max_response_len: 6}}
reward: {{function: {{type: python, path: "%s"}}}}
train: {{global_batch_size: 8, optimizer: {{lr: 1e-3, weight_decay: 0.1}}}}
"""
SUPERVISED = f"""
num_rollout: 2
model: {{source: {MODEL}, dtype: float32}}
data: {{prompts: {WORDS % 0}}}
rollout: {{type: dataset, rollout_batch_size: 32, rollout_max_response_len: 8}}
reward: {{function: {{type: none}}}}
advantage: {{advantage_estimator: none}}
train: {{loss: {{type: sft}}, global_batch_size: 8, optimizer: {{lr: 1e-3}}}}
"""
REWARD = "def score(sample):\n    return sum(c in 'aeiou' for c in sample.response) / 6\n"


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A folder with a small recipe (`small.yaml`), its reward function and its warm start."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "warm.yaml").write_text(SUPERVISED)
    (tmp_path / "small.yaml").write_text(SAMPLING % (tmp_path / "reward.py"))
    return tmp_path


def committed(home: Path, run: str) -> int:
    """Return the committed iterations of a run."""
    return len(list((home / "store" / "branches" / run).glob("0*.json")))


@pytest.mark.long
@pytest.mark.integration
def test_an_interrupted_run_that_loses_processes_continues_with_complete_records(
    recipes: Path,
) -> None:
    home = recipes / "home"
    evaluation = (
        f"evaluation={{eval_interval: 3, datasets: [{{name: heldout, prompts: {WORDS % 9000}}}]}}"
    )
    arguments = (
        "--recipe",
        str(recipes / "small.yaml"),
        f"warm_start={recipes / 'warm.yaml'}",
        evaluation,
    )
    sizes = ("num_rollout=6", "checkpoint.save_interval=3")

    with LiveRun(home, *arguments, *sizes, own_servers=True) as run:
        run.wait_until(lambda: committed(home, "small") >= 2)
        servers = [
            process.pid for process in run.parts(lambda line: "rlpipe.engines.sglang" in line)
        ]
        assert run.interrupt() == 130
        assert "the same command continues" in run.output
        assert "Traceback" not in run.output
    stopped = committed(home, "small")
    assert 2 <= stopped < 6
    assert servers
    assert not [
        pid
        for pid in servers
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]

    with LiveRun(home, *arguments, *sizes) as run:
        run.wait_until(lambda: committed(home, "small") > stopped)
        run.kill_part("ray::TrainerRank")
        assert run.finish() == 0, run.output
        assert f"{stopped} of 6 iterations are done" in run.output

    files = Files(home / "store")
    assert check_branch(files, "small") == []
    assert check_branch(files, "small.warm_start") == []
    report = check_store(files, "small", head=Branches(files).read_stored("small", 5)[1])
    assert report.findings == [] and "6 commits down to small/00000000" in str(report.proof)
    unfixed = sorted(
        note.where.removeprefix(files.root).split("/")[2]
        for note in report.notes
        if note.rule == "chain"
    )
    assert unfixed == ["checkpoint", "eval"], "of the newest weights"
    summary = json.loads((home / "small" / "summary.json").read_text())
    assert summary["iterations"] == 6
    assert summary["max_logprob_difference"] <= 1e-4
    assert {"rollout", "reward", "advantage", "train", "sync", "checkpoint", "eval"} <= set(
        summary["seconds_by_stage"]
    )
    assert [point[0] for point in summary["accuracy"]["heldout"]["curve"]] == [0, 3, 6]
    for name in ("report.html", "report.png"):
        assert (home / "small" / name).stat().st_size > 10_000
    assert list((home / "small" / "tensorboard" / "small").glob("events*"))


@pytest.mark.long
@pytest.mark.integration
def test_a_terminated_run_finishes_its_iteration_and_saves_its_weights(
    recipes: Path,
) -> None:
    home = recipes / "home"
    arguments = (
        "--recipe",
        str(recipes / "small.yaml"),
        "num_rollout=1000",
        "checkpoint.save_interval=1000",
    )
    with LiveRun(home, *arguments) as run:
        run.wait_until(lambda: committed(home, "small") >= 2)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish(90) == 143, run.output
        assert "the same command continues" in run.output
        assert "Traceback" not in run.output
    files = Files(home / "store")
    assert check_branch(files, "small") == []
    newest = Branches(files).newest("small")
    assert newest is not None
    kept = Nodes(files).find(Stage.CHECKPOINT, checkpoint_inputs(newest.nodes[Stage.TRAIN]).digest)
    assert kept is not None
    assert kept.outputs["version"] == newest.iteration + 1


@pytest.mark.integration
def test_two_ranks_two_engines_and_s3_survive_a_killed_engine(recipes: Path) -> None:
    home = recipes / "home"
    with seaweed(recipes / "s3") as server:
        root = f"s3://{server.bucket}/runs"
        arguments = (
            "--recipe",
            str(recipes / "small.yaml"),
            f"store.root={root}",
            "num_rollout=3",
            "resources={actor_num_gpus_per_node: 2, rollout_num_gpus: 2}",
            "train.parallel.tensor_model_parallel_size=2",
            "sync.transport=delta",
            "advantage.reference=true",
            "train.loss.kl_loss_coef=0.01",
        )
        with LiveRun(home, *arguments, environment=server.environment) as run:
            run.wait_until(lambda: "small 1/3" in run.output, timeout_s=400)
            run.kill_first("sglang::scheduler")
            assert run.finish(400) == 0, run.output
        with pytest.MonkeyPatch.context() as environment:
            for name, value in server.environment.items():
                environment.setenv(name, value)
            files = Files(root)
            assert check_branch(files, "small") == []
            nodes = Nodes(files)
            trained = [
                nodes.get(Stage.TRAIN, commit.nodes[Stage.TRAIN])
                for commit in Branches(files).walk("small")
            ]
            synced = [
                nodes.get(Stage.SYNC, commit.nodes[Stage.SYNC])
                for commit in Branches(files).walk("small")
            ]
    assert len(trained) == 3
    assert len({node.outputs["state_digest"] for node in trained}) == 3
    assert min(node.outputs.get("share", 1) for node in synced) < 0.9, (
        "changes are pushed, not all weights"
    )
    assert not list((home / "store").glob("*"))


@pytest.mark.long
@pytest.mark.integration
def test_a_colocated_trainer_and_engine_continue_after_kills(
    recipes: Path,
) -> None:
    home = recipes / "home"
    arguments = (
        "--recipe",
        str(recipes / "small.yaml"),
        "num_rollout=4",
        "resources.colocate=true",
        "checkpoint.save_interval=3",
    )
    with LiveRun(home, *arguments) as run:
        run.wait_until(lambda: committed(home, "small") >= 1)
        run.kill_first("sglang::scheduler")
        run.wait_until(lambda: committed(home, "small") >= 2)
        run.kill_part("ray::TrainerRank")
        assert run.finish(400) == 0, run.output
    files = Files(home / "store")
    assert check_branch(files, "small") == []
    nodes = Nodes(files)
    commits = list(Branches(files).walk("small"))
    assert len(commits) == 4
    outputs = [
        {stage: nodes.get(stage, commit.nodes[stage]).outputs for stage in commit.nodes}
        for commit in commits
    ]
    entered = {
        stage: [s["to"] for one in outputs for s in one[stage].get("switches", [])]
        for stage in outputs[0]
    }
    assert set(entered[Stage.ADVANTAGE]) >= {"score"}
    assert {"push", "sample"} <= set(entered[Stage.SYNC])
    assert entered[Stage.REWARD] == []
    switches = [
        switch
        for one in outputs
        for message in one.values()
        for switch in message.get("switches", [])
    ]
    kept = {
        to: [switch["trainer_bytes"] for switch in switches if switch["to"] == to]
        for to in ("sample", "score", "train")
    }
    assert set(kept["sample"]) == {0}
    assert 0 < max(kept["score"]) < max(kept["train"])
    assert max(one[Stage.SYNC]["metrics"]["sync/logprob_difference"] for one in outputs) <= 1e-4


@pytest.mark.long
@pytest.mark.integration
def test_asynchronous_rollouts_with_filter_and_buffer_lose_nothing_after_a_killed_generator(
    recipes: Path,
) -> None:
    home = recipes / "home"
    arguments = (
        "--recipe",
        str(recipes / "small.yaml"),
        "num_rollout=8",
        "async_buffer_size=2",
        "sync.update_weights_interval=2",
        "rollout.over_sampling_batch_size=6",
        "rollout.dynamic_sampling_filter_path=rlpipe.rollout.filters.reward_nonzero_std",
        "rollout.partial_rollout=true",
        "checkpoint.save_interval=3",
    )
    with LiveRun(home, *arguments) as run:
        run.wait_until(lambda: committed(home, "small") >= 2)
        run.kill_part("ray::Generator")
        assert run.finish(400) == 0, run.output
    files = Files(home / "store")
    assert check_branch(files, "small") == []
    nodes = Nodes(files)
    commits = list(Branches(files).walk("small"))
    assert len(commits) == 8
    batches = [
        nodes.get(Stage.ADVANTAGE, commit.nodes[Stage.ADVANTAGE]).outputs for commit in commits
    ]
    assert all(len(batch["groups"]) == 4 for batch in batches)
    assert max(batch["metrics"]["rollout/staleness/max"] for batch in batches) <= 2
    syncs = [
        nodes.get(Stage.SYNC, commit.nodes[Stage.SYNC]).outputs for commit in reversed(commits)
    ]
    assert ["sync/logprob_difference" in sync["metrics"] for sync in syncs] == [False, True] * 4, (
        "each second one pushes"
    )
    assert any(commit.data.buffer for commit in commits), (
        "groups beyond the batch wait in the buffer"
    )
