"""Relative paths of recipes and overrides (rlpipe.config.paths)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.config.data import FilePrompts
from rlpipe.config.hooks import load_hook
from rlpipe.config.load import load_run, require_files, validate_stored
from rlpipe.config.paths import with_moved_paths, with_recorded_paths
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError

RECIPE = """\
num_rollout: 3
model: {source: {type: huggingface, hf_checkpoint: model}}
data: {prompts: {type: file, paths: ["train.jsonl@[:3]", "/data/more.jsonl", "s3://b/c.jsonl"]}}
rollout: {rollout_batch_size: 1, n_samples_per_prompt: 2, rollout_sample_hook_path: [mine.py:hook]}
reward: {function: {type: python, path: "mine.py:score"}}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in a folder with its files; the current folder is another one."""
    folder = tmp_path / "recipe"
    (folder / "model").mkdir(parents=True)
    (folder / "train.jsonl").touch()
    (folder / "mine.py").touch()
    (folder / "mine.yaml").write_text(RECIPE)
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    return folder / "mine.yaml"


def paths_of(config: RunConfig) -> list[str]:
    assert isinstance(config.data.prompts, FilePrompts)
    return [
        getattr(config.model.source, "hf_checkpoint", ""),
        *config.data.prompts.paths,
        *config.rollout.rollout_sample_hook_path,
        getattr(config.reward.function, "path", ""),
    ]


def test_paths_of_a_recipe_count_from_its_folder(recipe: Path):
    folder = recipe.parent
    expected = [
        f"{folder}/model",
        f"{folder}/train.jsonl@[:3]",
        "/data/more.jsonl",
        "s3://b/c.jsonl",
        f"{folder}/mine.py:hook",
        f"{folder}/mine.py:score",
    ]
    assert paths_of(load_run(recipe)) == expected
    Path("mine.py").touch()  # the recipe's folder comes first
    assert paths_of(load_run(recipe)) == expected
    assert paths_of(load_run(Path("../recipe/mine.yaml"))) == expected


def test_files_that_the_recipes_folder_lacks_are_in_the_current_folder(recipe: Path):
    (recipe.parent / "mine.py").rename("mine.py")
    assert paths_of(load_run(recipe))[-1] == f"{Path.cwd()}/mine.py:score"


def test_paths_of_overrides_count_from_the_current_folder_first(recipe: Path):
    override = "reward.function.path=mine.py:other"
    assert paths_of(load_run(recipe, [override]))[-1] == f"{recipe.parent}/mine.py:other"
    Path("mine.py").touch()
    assert paths_of(load_run(recipe, [override]))[-1] == f"{Path.cwd()}/mine.py:other"


def test_files_of_the_project_stay_relative_and_load_in_every_folder(recipe: Path):
    path = "deployments/recipes/search_data.py:reward"
    assert paths_of(load_run(recipe, [f"reward.function.path={path}"]))[-1] == path
    assert callable(load_hook(path))
    hidden = Path("deployments/recipes/search_data.py")
    hidden.parent.mkdir(parents=True)
    hidden.touch()
    assert paths_of(load_run(recipe, [f"reward.function.path={path}"]))[-1].startswith("/")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("reward.function.path=mien.py:score", "reward.function.path"),
        ("data.prompts.paths=['trian.jsonl@[1:]']", "data.prompts.paths.0"),
        ("model.source.hf_checkpoint=./mode1", "model.source.hf_checkpoint"),
        ("warm_start=mien.yaml", "warm_start"),
    ],
)
def test_the_error_of_a_missing_file_names_both_folders(recipe: Path, override: str, key: str):
    require_files(recipe)
    with pytest.raises(ConfigError) as caught:
        require_files(recipe, [override])
    message = str(caught.value)
    assert message.startswith(f"{key} (override {override}): the file does not exist")
    for part in (str(Path.cwd()), str(recipe.parent), "do:", f"write {recipe.parent}/"):
        assert part in message


def test_the_error_of_a_missing_file_names_the_most_similar_file_of_both_folders(recipe: Path):
    Path("remind.py").write_text("")
    with pytest.raises(ConfigError) as caught:
        require_files(recipe, ["reward.function.path=mien.py:score"])
    assert caught.value.do == f"write {recipe.parent}/mine.py:score"


def test_a_missing_function_file_without_a_name_is_advised_with_the_functions(recipe: Path):
    (recipe.parent / "mine.py").write_text("def score(sample): ...\n\ndef _helper(): ...\n")
    with pytest.raises(ConfigError) as caught:
        require_files(recipe, ["reward.function.path=mien.py"])
    assert caught.value.do == f"write {recipe.parent}/mine.py:score"


def test_all_missing_files_are_named_at_once(recipe: Path):
    overrides = [
        "reward.function.path=mien.py:score",
        f"data.prompts.paths=['trian.jsonl@[1:]', {recipe.parent}/no.jsonl]",
    ]
    with pytest.raises(ConfigError) as caught:
        require_files(recipe, overrides, absolute=True)
    message = str(caught.value)
    assert "3 files do not exist" in message
    for part in ("no mien.py in", "no trian.jsonl in", f"no {recipe.parent}/no.jsonl", "write "):
        assert part in message


def test_a_name_of_the_hub_is_no_missing_file(recipe: Path):
    require_files(recipe, ["model.source.hf_checkpoint=Qwen/Qwen3-0.6B"])
    (recipe.parent / "Qwen/Qwen3-0.6B").mkdir(parents=True)
    config = load_run(recipe, ["model.source.hf_checkpoint=Qwen/Qwen3-0.6B"])
    assert paths_of(config)[0] == f"{Path.cwd()}/Qwen/Qwen3-0.6B".replace("current", "recipe")


def stored(config: RunConfig, **keys: str) -> RunConfig:
    values = config.model_dump(mode="json")
    values["reward"]["function"].update(keys)
    return validate_stored(values)


def test_a_run_that_recorded_relative_paths_keeps_them(recipe: Path, monkeypatch):
    config = load_run(recipe)
    old = stored(config, path="recipe/mine.py:score")
    assert with_recorded_paths(config, old) == config  # the path names no file here
    monkeypatch.chdir(recipe.parent.parent)
    assert with_recorded_paths(config, old) == old
    assert with_recorded_paths(config, stored(config, path="recipe/mine.py:other")) == config


def test_a_recorded_file_that_this_machine_lacks_was_moved(recipe: Path):
    config = load_run(recipe)
    assert with_moved_paths(stored(config, path="/before/mine.py:score"), config) == config
    for path in ("/before/mine.py:other", "/before/yours.py:score"):
        old = stored(config, path=path)
        assert with_moved_paths(old, config) == old
    Path("mine.py").touch()
    old = stored(config, path=f"{Path.cwd()}/mine.py:score")
    assert with_moved_paths(old, config) == old
