"""Whole runs on GPUs (`pytest -s -m gpu`): colocated and separate runs over kills, PPO, the
demo.

PPO has separate ranks for the critic and an external engine.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.recipes.tiny_models import make_spell_backward_model
from rlpipe.store.audit.verification import check_branch
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage
from tests.flows.live_run import LiveRun
from tests.gpus import environment, visible_gpus
from tests.sync.gpu import engine_on

ITERATIONS = 24
KILLED_AT = 6
LAST = 5
RECIPE = """
num_rollout: %(iterations)d
model:
  source:
    type: made
    maker: 'deployments/recipes/tiny_models.py:make_spell_backward_model'
    arguments:
      {hidden_size: 1024, num_layers: 28, num_heads: 16, num_kv_heads: 8, intermediate_size: 3072}
  dtype: bfloat16
data: {prompts: {type: file, paths: [%(prompts)s], input_key: prompt, label_key: answer}}
rollout: {rollout_batch_size: 16, n_samples_per_prompt: 8, rollout_max_response_len: 64}
reward: {function: {type: python, path: "%(reward)s"}}
train: {optimizer: {lr: 3.0e-5}, max_tokens_per_gpu: 16384}
checkpoint: {save_interval: 1000}
resources: {start_timeout_s: 400, exclusive_gpus: false}
engine:
  sglang:
    mem_fraction_static: 0.5
    max_total_tokens: 65536
    attention_backend: triton
    sampling_backend: pytorch
    grammar_backend: none
"""
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_size": 1536,
}
REWARD = """
def score(sample):
    return sum(letter in 'aeiou' for letter in sample.response) / (len(sample.response) or 1)
"""
LAYOUTS = {
    "shared": ((-1,), "resources.colocate=true"),
    "separate": ((0, 1), "sync.transport=distributed"),
}
"""Which of the GPUs, and how. The runs go side by side; of two GPUs they share the second."""


@pytest.mark.gpu(2)
@pytest.mark.integration
@pytest.mark.timeout(1500)
def test_colocated_and_separate_runs_learn_equally_and_continue_after_kills(
    tmp_path: Path,
) -> None:
    recipe = _recipe(tmp_path)
    with ThreadPoolExecutor(len(LAYOUTS)) as threads:
        runs = {
            name: threads.submit(_run, tmp_path / name, recipe, *LAYOUTS[name]) for name in LAYOUTS
        }
        curves = {name: run.result() for name, run in runs.items()}
    for name, curve in curves.items():
        print(name, " ".join(f"{reward:.3f}" for reward in curve))
    shared, separate = (float(np.mean(curves[name][-LAST:])) for name in LAYOUTS)
    gain = min(shared, separate) - float(np.mean(curves["shared"][:2]))
    assert gain > 0.1, curves
    assert abs(shared - separate) < max(0.05, 0.3 * gain), curves


@pytest.mark.integration
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "gpus", [pytest.param(1, marks=pytest.mark.gpu(1)), pytest.param(2, marks=pytest.mark.gpu(2))]
)
def test_the_demo_runs_to_its_end(tmp_path: Path, gpus: int) -> None:
    """Run the demo as the Makefile does, with its warm start. The last iterations are nearly
    deterministic.

    The heads of its model have 32 dimensions, which FlashAttention does not support.
    """
    plain = {
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mem_fraction_static": 0.3,
        "max_total_tokens": 65_536,
    }
    settings = [
        "model.dtype=bfloat16",
        "resources.start_timeout_s=400",
        "resources.exclusive_gpus=false",
        *(f"engine.sglang.{name}={value}" for name, value in plain.items()),
    ]
    there = environment(visible_gpus()[:gpus])
    with LiveRun(
        tmp_path / "home", "--recipe", "spell_backward", *settings, environment=there
    ) as run:
        assert run.finish(1700) == 0, run.output
        print(run.output[-1500:])
    summary = json.loads((tmp_path / "home" / "spell_backward" / "summary.json").read_text())
    assert summary["iterations"] == 75
    accuracy = summary["accuracy"]["heldout"]
    assert accuracy["after"] > accuracy["before"] + 0.15
    assert check_branch(Files(tmp_path / "home" / "store"), "spell_backward") == []


@pytest.mark.gpu(4)
@pytest.mark.integration
@pytest.mark.timeout(1500)
def test_a_separate_critic_rank_and_an_external_engine_continue_after_kills(
    tmp_path: Path,
) -> None:
    """Train a policy on two tensor-parallel ranks and push to an engine outside the run's GPUs.

    The test kills a rank of the policy, then one of the critic.
    """
    *ours, last = visible_gpus()[:4]
    model = tmp_path / "model"
    home = tmp_path / "home"
    make_spell_backward_model(str(model), **SIZES)
    with engine_on(last, model, tmp_path / "engine.log") as engine:
        settings = {
            "model.source": {"type": "huggingface", "hf_checkpoint": str(model)},
            "advantage.advantage_estimator": "ppo",
            "critic.parallel": {"tensor_model_parallel_size": 1},
            "train.parallel.tensor_model_parallel_size": 2,
            "engine.sglang": {},
            "resources.actor_num_gpus_per_node": 2,
            "resources.critic_num_gpus_per_node": 1,
            "resources.external_engines": [engine.url],
            "sync": {"transport": "distributed", "check_weight_update_equal": True},
            "num_rollout": 8,
        }
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        with LiveRun(
            home, "--recipe", str(_recipe(tmp_path)), *overrides, environment=environment(ours)
        ) as run:
            for rank in ("ray::TrainerRank", "ray::CriticRank"):
                before = _committed(home)
                run.wait_until(lambda before=before: _committed(home) > before + 1, 600)
                run.parts(lambda line, rank=rank: rank in line)[0].kill()
            assert run.finish(900) == 0, run.output
            print(run.output[-1500:])
    assert check_branch(Files(home / "store"), "vowels") == []


def _recipe(folder: Path) -> Path:
    (folder / "reward.py").write_text(REWARD)
    rows = (
        {"prompt": f"Spell {word} backward: ", "answer": word[::-1]}
        for word in ("sun", "moon", "star", "sky") * 16
    )
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    filled = {
        "prompts": folder / "prompts.jsonl",
        "reward": folder / "reward.py",
        "iterations": ITERATIONS,
    }
    (folder / "vowels.yaml").write_text(RECIPE % filled)
    return folder / "vowels.yaml"


def _committed(home: Path) -> int:
    return len(list((home / "store" / "branches" / "vowels").glob("0*.json")))


def _run(home: Path, recipe: Path, gpus: tuple[int, ...], layout: str) -> list[float]:
    """Return mean rewards of a run that loses its flow process, a trainer rank and an engine."""
    run_of = ("--recipe", str(recipe), layout)
    there = environment([visible_gpus()[gpu] for gpu in gpus])
    with LiveRun(home, *run_of, environment=there) as run:
        run.wait_until(lambda: _committed(home) >= KILLED_AT, 600)
        run.process.kill()
    before = _committed(home)
    with LiveRun(home, *run_of, environment=there) as run:
        run.wait_until(lambda: _committed(home) > before, 600)
        run.kill_part("ray::TrainerRank")
        run.wait_until(lambda: _committed(home) > before + 3, 600)
        run.parts(lambda line: "sglang::scheduler" in line)[0].kill()
        assert run.finish(900) == 0, run.output
        print(run.output[-1500:])
    files = Files(home / "store")
    assert check_branch(files, "vowels") == []
    nodes = Nodes(files)
    rows = [
        nodes.get(Stage.ADVANTAGE, commit.nodes[Stage.ADVANTAGE]).outputs
        for commit in Branches(files).walk("vowels")
    ]
    return [row["metrics"]["rollout/raw_reward"] for row in rows][::-1]
