"""Presets under a recipe (rlpipe.config.load)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.config.load import dump, load_run
from rlpipe.errors import ConfigError
from rlpipe.slime.build import BASE

RECIPE = """\
num_rollout: 3
preset: {preset}
model:
  source: {{type: huggingface, hf_checkpoint: /models/m}}
data:
  prompts: {{type: file, paths: [a.jsonl]}}
rollout:
  rollout_batch_size: 4
  n_samples_per_prompt: 2
reward:
  function: {{type: math}}
train:
  max_tokens_per_gpu: 100
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(
        "train:\n  parallel:\n    tensor_model_parallel_size: 3\n    context_parallel_siz: 2\n"
    )
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE.format(preset="qwen3-4b"))
    return path


def test_a_recipe_wins_over_its_preset_and_an_override_over_both(recipe):
    config = load_run(
        recipe, ["train.megatron.recompute_num_layers=4", "resources.actor_num_gpus_per_node=4"]
    )
    assert config.train.max_tokens_per_gpu == 100
    assert config.train.parallel.tensor_model_parallel_size == 2
    assert config.train.megatron == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 4,
    }
    assert (config.resources.actor_num_gpus_per_node, config.resources.rollout_num_gpus) == (4, 4)


def test_the_preset_can_be_chosen_on_a_command_line_and_what_is_stored_is_its_values(
    recipe, tmp_path
):
    config = load_run(recipe, ["preset=moonlight-16b-a3b"])
    assert config.train.parallel.expert_model_parallel_size == 8
    assert "preset" not in dump(config)
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load_run(tmp_path / "again.yaml") == config
    needed = [
        "model.source.hf_checkpoint=/m",
        "data.prompts.paths=[a]",
        "num_rollout=1",
        "rollout.rollout_batch_size=8",
        "rollout.n_samples_per_prompt=2",
    ]
    flags = load_run(BASE, ["preset=llama3.1-8b", *needed, "reward.function.type=math"])
    assert flags.train.parallel.tensor_model_parallel_size == 2


def test_a_preset_that_is_not_there_is_told_the_nearest(recipe):
    with pytest.raises(
        ConfigError, match=r"(?s)preset \(override preset=qwen3-30b\).*qwen3-30b-a3b"
    ):
        load_run(recipe, ["preset=qwen3-30b"])


def test_a_mistake_in_a_preset_is_found_in_its_own_file(recipe):
    mine = recipe.with_name("mine.yaml")
    with pytest.raises(ConfigError, match=rf"context_parallel_siz \({mine}:4\)"):
        load_run(recipe, [f"preset={mine}"])
    mine.write_text("- 1\n")
    with pytest.raises(ConfigError, match="a preset is a mapping"):
        load_run(recipe, [f"preset={mine}"])
