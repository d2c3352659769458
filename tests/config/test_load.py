"""Recipes, presets, overrides and their errors (rlpipe.config.load, rlpipe.config.problems)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.config import load
from rlpipe.config.load import dump, find_recipe, home, load_run
from rlpipe.config.similar_keys import all_keys
from rlpipe.errors import ConfigError
from rlpipe.slime.flag_keys import BASE

RECIPE = """\
num_rollout: 3
model:
  source: {type: huggingface, hf_checkpoint: /models/m}
data:
  prompts: {type: file, paths: [a.jsonl]}
rollout:
  rollout_batch_size: 4
  n_samples_per_prompt: 2
reward:
  function: {type: math}
train:
  optimizer:
    lr: 1e-5
evaluation:
  datasets:
    - name: held
      prompts: {type: file, paths: [b.jsonl]}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


def refused(recipe: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_run(recipe, overrides)
    return caught.value


def test_a_recipe_becomes_a_run_config_named_after_its_file(recipe):
    config = load_run(recipe)
    assert config.run == "small"
    assert config.train.optimizer.lr == 1e-5
    assert config.evaluation.datasets[0].name == "held"


def test_a_recipe_that_is_called_recipe_is_named_after_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "copier"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    assert load_run(folder / "recipe.yaml").run == "copier"
    monkeypatch.chdir(folder)
    assert load_run("recipe.yaml").run == "copier"
    (folder / "recipe.yaml").write_text(f"run: mine\n{RECIPE}")
    assert load_run("recipe.yaml").run == "mine"


def test_the_run_argument_wins_over_the_recipe_and_its_overrides(recipe):
    assert load_run(recipe, ["run=a"], run="b").run == "b"
    assert load_run(recipe, ["run=a"]).run == "a"


def test_overrides_reach_nested_keys_lists_and_keys_that_the_recipe_leaves_out(recipe):
    config = load_run(
        recipe,
        [
            "train.optimizer.lr=2e-4",
            "train.loss.eps_clip=0.1",
            "evaluation.datasets.0.temperature=0",
            "rollout.rollout_stop_token_ids=[1, 2]",
            "train.optimizer.lr=3e-4",
        ],
    )
    assert config.train.optimizer.lr == 3e-4
    assert config.train.loss.eps_clip == 0.1
    assert config.evaluation.datasets[0].temperature == 0
    assert config.rollout.rollout_stop_token_ids == (1, 2)


def test_dump_and_load_give_an_equal_configuration(recipe, tmp_path):
    config = load_run(recipe, ["train.megatron.recompute_granularity=full"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(config))
    assert load_run(copy) == config


def test_an_unknown_key_names_its_line_and_the_nearest_key(recipe):
    recipe.write_text(RECIPE.replace("    lr:", "    learning_rate: 1\n    lrr:"))
    message = str(refused(recipe))
    assert f"train.optimizer.learning_rate ({recipe}:13): unknown key" in message
    assert f"train.optimizer.lrr ({recipe}:14): unknown key; expected train.optimizer.lr" in message


def test_an_unknown_key_of_an_override_names_the_override(recipe):
    error = refused(recipe, "train.optimiser.lr=1")
    assert error.where == "train.optimiser (override train.optimiser.lr=1)"
    assert error.expected == "train.optimizer"


def test_the_error_of_a_misplaced_key_names_the_section_that_has_it(recipe):
    assert (
        refused(recipe, "clip_grad=1").expected
        == "train.optimizer.clip_grad; or critic.optimizer.clip_grad"
    )
    assert refused(recipe, "rollout_batch_size=1").expected == "rollout.rollout_batch_size"
    # Several variants of reward.function have this key.
    assert (
        refused(recipe, "reward.reward_key=score").expected
        == "reward.function.reward_key; or evaluation.datasets.reward.function.reward_key"
    )


def test_keys_inside_a_variant_are_named_without_the_variants_tag(recipe):
    error = refused(recipe, "data.prompts.pathz=[a]")
    assert error.where == "data.prompts.pathz (override data.prompts.pathz=[a])"
    assert error.expected == "data.prompts.paths"


def test_the_error_of_an_unknown_variant_lists_the_known_ones(recipe):
    error = refused(recipe, "data.prompts.type=fil")
    assert error.where == "data.prompts.type (override data.prompts.type=fil)"
    assert error.expected == "one of file, reasoning_gym, seeds, verifiers"


def test_the_error_of_a_wrong_value_has_found_and_expected(recipe):
    error = refused(recipe, "rollout.rollout_batch_size=0")
    assert error.where == "rollout.rollout_batch_size (override rollout.rollout_batch_size=0)"
    assert (error.found, error.expected) == ("0", "at least 1 and at most 1000000")


@pytest.mark.parametrize(
    ("override", "expected", "value"),
    [
        ("train.lora.rank=0", "at least 1", "16 (the default), or another number in this range"),
        ("train.lora.dropout=0.5", "0", "0.0 (the default)"),
        (
            "rollout.rollout_top_p=0",
            "more than 0 and at most 1",
            "1.0 (the default), or another number in this range",
        ),
        (
            "train.optimizer.adam_beta1=1",
            "at least 0 and less than 1",
            "0.9 (the default), or another number in this range",
        ),
        (
            "evaluation.datasets.0.top_p=1.5",
            "more than 0 and at most 1",
            "1, or another number in this range",
        ),
        (
            "rollout.rollout_stop_token_ids.0=-1",
            "at least 0 and at most 2147483647",
            "0, or another number in this range",
        ),
        ("train.timeout_s=1e12", "at most 1e+08 (three years)", "at most 1e+08 (three years)"),
    ],
)
def test_the_error_of_a_number_out_of_range_names_the_range_and_a_number_to_set(
    recipe, override: str, expected: str, value: str
):
    recipe.write_text(
        RECIPE.replace(
            "  n_samples_per_prompt: 2", "  n_samples_per_prompt: 2\n  rollout_stop_token_ids: [3]"
        )
    )
    error = refused(recipe, override)
    key = override.partition("=")[0]
    assert (error.where, error.expected) == (f"{key} (override {override})", expected)
    assert error.do == f"set {key} to {value}"


@pytest.mark.parametrize(
    ("override", "found", "do"),
    [
        ("reward.function=math", "'math'", "write {type: math}"),
        ("reward.function=my.py:score", "'my.py:score'", "write {type: python, path: my.py:score}"),
        ("data.prompts=a.jsonl", "'a.jsonl'", "write {type: file, paths: [a.jsonl]}"),
        ("rollout.rollout_stop=STOP", "'STOP'", "write [STOP]"),
        ("num_rollout=", "null (no value)", None),
        ("num_rollout=true", "true", None),
        ("run=a/b", "'a/b'", None),
        ("store.root=gs://bucket/runs", "gs://bucket/runs", None),
        ("engine.router_url=router", "router", None),
        (
            "rollout.rollout_top_k=-3",
            "-3",
            "set rollout.rollout_top_k to a number of tokens, or -1 for all of them",
        ),
        ("model.source.hf_checkpoint=", "null (no value)", None),
    ],
)
def test_the_error_of_a_wrong_value_shows_yaml(recipe, override: str, found: str, do: str | None):
    error = refused(recipe, override)
    assert (error.found, error.do) == (found, do)


def test_a_missing_key_is_named_with_the_reference(recipe):
    recipe.write_text(RECIPE.replace("num_rollout: ", "seed: "))
    assert "num_rollout (" in str(refused(recipe))


def test_a_misspelt_needed_key_is_one_problem_with_one_name(recipe):
    recipe.write_text(RECIPE.replace("num_rollout: ", "num_rolout: "))
    error = refused(recipe)
    assert (error.problem, error.expected) == ("unknown key", "num_rollout")
    assert error.do == "rename it to num_rollout"


def test_several_problems_each_say_what_to_do(recipe):
    error = refused(recipe, "rollout.rollout_temperature=-1", "train.global_batch_sizes=4")
    first, *lines = str(error).splitlines()
    assert first.endswith(": 2 problems") and len(lines) == 2
    assert "; set rollout.rollout_temperature to" in lines[0]
    assert "rename it, or remove it" in lines[1]


def test_a_wrong_value_of_a_union_is_one_problem(recipe):
    error = refused(recipe, "reward.on_error=bad")
    assert error.where == "reward.on_error (override reward.on_error=bad)"
    assert error.expected == "'exclude_group'; or a finite number, without quotes"


def test_the_error_of_a_missing_key_names_it(recipe):
    recipe.write_text(RECIPE.replace("  rollout_batch_size: 4\n", ""))
    error = refused(recipe)
    assert error.problem == "this key is needed"
    assert str(error.where).startswith("rollout.rollout_batch_size")
    recipe.write_text(RECIPE.replace("reward:\n  function: {type: math}\n", ""))
    with pytest.raises(ConfigError, match=r"such as `reward: \{function: \{type: math\}\}`"):
        load_run(recipe)


def test_the_error_of_a_rule_between_keys_names_the_rule(recipe):
    error = refused(recipe, "train.global_batch_size=3")
    assert error.where == str(recipe)
    assert "must be a multiple of train.global_batch_size = 3" in error.problem
    value, _, _ = str(error.do).removeprefix("set ").partition(",")
    assert load_run(recipe, [value]).train.global_batch_size in (1, 2)
    error = refused(recipe, "async_buffer_size=0", "sync.update_weights_interval=4")
    assert str(error.do).startswith("change async_buffer_size or sync.update_weights_interval")
    error = refused(recipe, "teacher.opd_type=null", "advantage.use_opd=true")
    assert error.do is None and "set teacher.opd_type" in error.problem


@pytest.mark.parametrize(
    ("override", "do"),
    [
        ("model.dtype=bf16", "write bfloat16"),
        ("model.dtype=fp16", None),
        ("reward.function.type=maths", "write math"),
        ("advantage.advantage_estimator=gpro", "write grpo or gspo"),
        ("train.lora=4", "write train.lora={rank: 16}"),
    ],
)
def test_the_error_of_a_wrong_word_has_the_nearest_ones(recipe, override, do):
    assert refused(recipe, override).do == do


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.optimizer.lr", "not an override"),
        ("=1", "not an override"),
        ("a..b=1", "not an override"),
        ("num_rollout.x=1", "num_rollout is a value and has no keys"),
        ("evaluation.datasets.1.name=x", "evaluation.datasets is a list"),
        ("evaluation.datasets.first.name=x", "evaluation.datasets is a list"),
        ("data.prompts.paths=[a", "not valid YAML"),
    ],
)
def test_a_malformed_override_is_refused(recipe, override, problem):
    assert refused(recipe, override).problem == problem


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("train.megatron.recompute_granularityy=full", "train.megatron.recompute_granularityy"),
        ("engine.sglang.tensor_parallel_size=2", "engine.sglang.tensor_parallel_size"),
        ("engine.router.portt=1", "engine.router.portt"),
    ],
)
def test_passthrough_arguments_are_checked_with_the_rest(recipe, override, where):
    assert refused(recipe, override).where == where


def test_recipes_are_found_by_name_or_path(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "RECIPES", tmp_path)
    assert find_recipe("small") == recipe
    assert find_recipe(recipe) == recipe
    with pytest.raises(ConfigError) as caught:
        find_recipe("smalll")
    assert caught.value.expected == "one of small"
    # A folder that `rlpipe init` made.
    for folder in ("first", "my/first"):
        monkeypatch.chdir(tmp_path)
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "recipe.yaml").write_text("")
        with pytest.raises(ConfigError) as caught:
            find_recipe(folder)
        assert caught.value.do == f"give the file in this folder: {folder}/recipe.yaml"
    with pytest.raises(ConfigError, match="recipe file does not exist"):
        find_recipe(tmp_path / "none.yaml")


def test_a_recipe_that_is_no_mapping_or_no_text_is_refused(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="a recipe is a mapping"):
        load_run(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(path)


def test_home_follows_the_environment_and_is_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("RLPIPE_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("RLPIPE_HOME")
    monkeypatch.chdir(tmp_path)
    assert home() == tmp_path / "runs"


def test_all_keys_go_down_into_every_variant():
    keys = set(all_keys())
    assert {
        "run",
        "train.optimizer.lr",
        "data.prompts.paths",
        "data.prompts.task",
        "evaluation.datasets.prompts.paths",
    } <= keys


PRESET_RECIPE = """\
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
def preset_recipe(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(
        "train:\n  parallel:\n    tensor_model_parallel_size: 3\n    context_parallel_siz: 2\n"
    )
    path = tmp_path / "small.yaml"
    path.write_text(PRESET_RECIPE.format(preset="qwen3-4b"))
    return path


def test_a_recipe_wins_over_its_preset_and_an_override_over_both(preset_recipe):
    config = load_run(
        preset_recipe,
        ["train.megatron.recompute_num_layers=4", "resources.actor_num_gpus_per_node=4"],
    )
    assert config.train.max_tokens_per_gpu == 100
    assert config.train.parallel.tensor_model_parallel_size == 2
    assert config.train.megatron == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 4,
    }
    assert (config.resources.actor_num_gpus_per_node, config.resources.rollout_num_gpus) == (4, 4)


def test_a_preset_can_be_an_override_and_the_dump_contains_its_values(preset_recipe, tmp_path):
    config = load_run(preset_recipe, ["preset=moonlight-16b-a3b"])
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


def test_the_error_of_an_unknown_preset_names_the_nearest(preset_recipe):
    with pytest.raises(
        ConfigError, match=r"(?s)preset \(override preset=qwen3-30b\).*qwen3-30b-a3b"
    ):
        load_run(preset_recipe, ["preset=qwen3-30b"])


def test_an_error_in_a_preset_names_the_preset_file_and_line(preset_recipe):
    mine = preset_recipe.with_name("mine.yaml")
    with pytest.raises(ConfigError, match=rf"context_parallel_siz \({mine}:4\)"):
        load_run(preset_recipe, [f"preset={mine}"])
    mine.write_text("- 1\n")
    with pytest.raises(ConfigError, match="a preset is a mapping"):
        load_run(preset_recipe, [f"preset={mine}"])
