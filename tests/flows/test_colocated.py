"""Trainer and engine on one GPU, in a whole run: memory of each phase, without growth.

    python -m pytest -s -m gpu tests/flows/test_colocated.py -k small

The command prints a table. `large` has a 3.3B model and takes minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe.store.audit.verification import check_branch
from rlpipe.store.objects.files import Files
from tests.flows.live_run import LiveRun
from tools.switches import HEADER, summary, switches

SIZES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 1024,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "intermediate_size": 3072,
    },
    "large": {
        "hidden_size": 2560,
        "num_layers": 36,
        "num_heads": 32,
        "num_kv_heads": 8,
        "intermediate_size": 9728,
    },
}
RECIPE = """
num_rollout: %(iterations)d
model:
  source:
    type: made
    maker: 'deployments/recipes/tiny_models.py:make_spell_backward_model'
    arguments: %(sizes)s
  dtype: bfloat16
data: {prompts: {type: file, paths: [%(prompts)s], input_key: prompt, label_key: answer}}
rollout: {rollout_batch_size: 8, n_samples_per_prompt: 8, rollout_max_response_len: 256}
reward: {function: {type: python, path: "%(reward)s"}}
train: {optimizer: {lr: 1.0e-6}, max_tokens_per_gpu: 16384}
checkpoint: {save_interval: 1000}
resources: {colocate: true, offload_train: true, offload_rollout: true, start_timeout_s: 900}
engine:
  sglang:
    mem_fraction_static: 0.7
    attention_backend: triton
    sampling_backend: pytorch
    grammar_backend: none
"""
GIB = 1024**3


@pytest.mark.gpu
@pytest.mark.integration
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("size", "iterations"), [("small", 20), ("large", 5)])
def test_twenty_iterations_on_one_gpu_leak_no_memory(
    tmp_path: Path, size: str, iterations: int
) -> None:
    (tmp_path / "reward.py").write_text(
        "def score(sample):\n    return sum(c in 'aeiou' for c in sample.response) / 256\n"
    )
    rows = (
        {"prompt": f"Spell {word} backward: ", "answer": word[::-1]}
        for word in ("sun", "moon", "star", "sky") * 16
    )
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    filled = {
        "prompts": tmp_path / "prompts.jsonl",
        "reward": tmp_path / "reward.py",
        "sizes": json.dumps(SIZES[size]),
    }
    (tmp_path / "shared.yaml").write_text(RECIPE % {**filled, "iterations": iterations})
    with LiveRun(tmp_path / "home", "--recipe", str(tmp_path / "shared.yaml")) as run:
        assert run.finish(1400) == 0, run.output
    found = switches(tmp_path / "home" / "shared")
    for row in (HEADER, *summary(found)):
        print(
            "  ".join(
                f"{cell:>10.3f}" if isinstance(cell, float) else f"{cell:>10}" for cell in row
            )
        )
    print(run.output.strip().splitlines()[-1])
    assert check_branch(Files(tmp_path / "home" / "store"), "shared") == []
    assert_steady(found)


def assert_steady(found: list[dict[str, Any]]) -> None:
    """Check memory of each phase: from the third time on within 1 GiB, and none of the trainer
    while engines sample.
    """
    for phase in ("score", "train", "push", "sample"):
        used = [switch["used_bytes"] for switch in found if switch["to"] == phase][2:]
        assert max(used) - used[0] <= GIB, (phase, used)
    assert {switch["trainer_bytes"] for switch in found if switch["to"] == "sample"} == {0.0}
