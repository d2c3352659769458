"""Settings that a warm start takes from its run (flows.train)."""

from __future__ import annotations

import json
from pathlib import Path

from rlpipe.config.load import load_run, warm_start_overrides
from tests.flows.test_train import MODEL, SUPERVISED, WORDS

PPO = f"""
model: {{source: {MODEL}, dtype: float32}}
data: {{prompts: {WORDS % 0}}}
rollout: {{rollout_batch_size: 4}}
reward: {{function: {{type: math}}}}
advantage: {{advantage_estimator: ppo}}
num_rollout: 1
"""


def test_a_run_with_separate_critic_ranks_may_have_a_warm_start(tmp_path: Path):
    for name, text in (("ppo", PPO), ("warm", SUPERVISED)):
        (tmp_path / f"{name}.yaml").write_text(text)
    overrides = [
        "resources.critic_num_gpus_per_node=2",
        "resources.actor_num_gpus_per_node=2",
        "seed=3",
        "model.dtype=bfloat16",
    ]
    run = load_run(str(tmp_path / "ppo.yaml"), overrides, "run")
    warm = load_run(str(tmp_path / "warm.yaml"), warm_start_overrides(run), "run.warm_start")
    assert (warm.resources.trainer_ranks, warm.resources.critic_ranks) == (2, 0)
    assert (warm.seed, warm.model.dtype, warm.resources.cluster) == (3, "bfloat16", "run")
    assert json.loads(warm.store.model_dump_json()) == json.loads(run.store.model_dump_json())
