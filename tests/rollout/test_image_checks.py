"""A run with images refuses what does not read them, before it starts."""

from __future__ import annotations

import pytest

from deployments.recipes.count_shapes import make_model
from rlpipe.config.load import load_run
from rlpipe.data.image_reader import ImageReader
from rlpipe.errors import ConfigError
from rlpipe.rollout.image_checks import checked_image_reader


def config(*overrides: str):
    return load_run("count_shapes", list(overrides), "run")


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> str:
    directory = str(tmp_path_factory.mktemp("model"))
    make_model(directory)
    return directory


def test_the_recipe_is_accepted_and_a_run_of_text_is_not_checked(vision):
    assert isinstance(checked_image_reader(config(), vision), ImageReader)
    text = config("data.multimodal_keys=null", "rollout.tools=[{path: a.b}]")
    assert checked_image_reader(text, vision) is None


def test_a_model_of_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="the model reads no images"):
        checked_image_reader(config(), tmp_path)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.prompts={type: reasoning_gym, task: chain_sum, size: 4}", "only prompts of files"),
        ("rollout.custom_generate_function_path=a.b", "custom_generate_function_path"),
        ("rollout.tools=[{path: a.b}]", "rollout.tools"),
        ("rollout.rollout_function_path=a.b", "rollout.rollout_function_path"),
        ("train.lora={rank: 4}", "train.lora"),
    ],
)
def test_what_does_not_read_images_is_refused(vision, override: str, key: str):
    with pytest.raises(ConfigError, match=key):
        checked_image_reader(config(override), vision)
