"""`smoke=true` merges the section `smoke` of a recipe over its keys (rlpipe.config.smoke)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.config.load import load_run
from rlpipe.config.model import MadeModel
from rlpipe.config.smoke import merged
from rlpipe.errors import ConfigError

RECIPE = """\
num_rollout: 200
model:
  source: {type: huggingface, hf_checkpoint: org/large}
  dtype: bfloat16
data: {prompts: {type: file, paths: [train.jsonl], label_key: label}}
rollout: {rollout_batch_size: 32, n_samples_per_prompt: 8}
reward: {function: {type: math}}
smoke:
  num_rollout: 2
  model:
    source: {type: made, maker: 'makers.py:tiny'}
  rollout: {rollout_batch_size: 2}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "big.yaml"
    path.write_text(RECIPE)
    return path


def test_without_the_switch_the_section_has_no_effect(recipe: Path):
    for overrides in ([], ["smoke=false"], ["smoke=true", "smoke=false"]):
        config = load_run(recipe, overrides)
        assert (config.run, config.num_rollout) == ("big", 200)


def test_the_section_replaces_keys_and_overrides_win_over_it(recipe: Path):
    config = load_run(recipe, ["num_rollout=3", "smoke=true"])
    assert (config.run, config.num_rollout) == ("big-smoke", 3)
    assert isinstance(config.model.source, MadeModel)
    assert config.model.dtype == "bfloat16"
    assert (config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt) == (2, 8)
    assert load_run(recipe, ["smoke=true"], "mine").run == "mine"


def test_an_error_in_the_section_names_its_line(recipe: Path):
    recipe.write_text(RECIPE.replace("rollout_batch_size: 2}", "rollout_batch_syze: 2}"))
    load_run(recipe)
    with pytest.raises(ConfigError, match=r"rollout\.rollout_batch_syze .*big\.yaml:12"):
        load_run(recipe, ["smoke=true"])


def test_wrong_uses_are_refused(recipe: Path):
    with pytest.raises(ConfigError, match="not a switch"):
        load_run(recipe, ["smoke=2"])
    with pytest.raises(ConfigError, match="write num_rollout=1"):
        load_run(recipe, ["smoke.num_rollout=1"])
    recipe.write_text(RECIPE[: RECIPE.index("smoke:")])
    with pytest.raises(ConfigError, match="this recipe has no smoke test"):
        load_run(recipe, ["smoke=true"])


def test_a_mapping_of_another_type_replaces_the_whole_mapping():
    below = {"a": {"type": "x", "b": 1}, "c": {"d": 1, "e": 2}}
    above = {"a": {"type": "y"}, "c": {"e": 3}}
    assert merged(above, below) == {"a": {"type": "y"}, "c": {"d": 1, "e": 3}}
    assert merged({"a": {"b": 2}}, below)["a"] == {"type": "x", "b": 2}
