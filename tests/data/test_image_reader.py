"""Tokens and pixels of images: equal to transformers' processors."""

from __future__ import annotations

import base64
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from deployments.recipes.count_shapes import draw, make_model, make_rows
from rlpipe.config.data import DataConfig, FilePrompts
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.image_reader import (
    MODEL_TYPES,
    SETTINGS,
    ImageReader,
    StoredPixels,
    load_image_reader,
)
from rlpipe.data.prompts import PromptRow, load_prompts
from rlpipe.data.source import DataSource
from rlpipe.data.tokenizer import load_tokenizer
from rlpipe.data.tokens import encode_prompt, encode_supervised
from rlpipe.engines.megatron.bridges.supported import VISION
from rlpipe.errors import ConfigError, DataError
from rlpipe.store.images import Images, image_path
from rlpipe.store.objects.files import Files
from rlpipe.types import DataState

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    directory = str(tmp_path_factory.mktemp("model"))
    make_model(directory)
    return directory


@pytest.fixture(scope="module")
def reader(model) -> ImageReader:
    found = load_image_reader(model)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tokenizer(model) -> Any:
    return load_tokenizer(model)


def data(**keys: Any) -> DataConfig:
    prompts = FilePrompts(type="file", paths=("x.jsonl",), label_key="label")
    return DataConfig(prompts=prompts, multimodal_keys={"image": "images"}, **keys)


def rows(folder: Path, *contents: dict[str, Any]) -> list[PromptRow]:
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(content) + "\n" for content in contents))
    source = FilePrompts(type="file", paths=(str(path),), label_key="label")
    return list(load_prompts(source, image_key="images"))


def rollout(**keys: Any) -> RolloutConfig:
    return RolloutConfig(rollout_batch_size=1, **keys)


def picture(width: int, height: int) -> str:
    values = np.random.default_rng(width * height).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_the_models_that_read_images_are_those_of_the_trainer():
    assert set(MODEL_TYPES) == VISION


@pytest.mark.parametrize(("width", "height"), [(48, 48), (20, 90), (300, 70), (16, 16), (33, 47)])
def test_patches_and_tokens_are_those_of_transformers(
    tmp_path, model, reader, tokenizer, width, height
):
    (row,) = rows(tmp_path, {"prompt": "<image>", "images": picture(width, height), "label": "1"})
    encoded = encode_prompt(tokenizer, row, data(), rollout(), images=reader)
    content = row.images[0].read()
    expected = Qwen2VLImageProcessorPil.from_pretrained(model)(
        images=[Image.open(io.BytesIO(content))], return_tensors="np"
    )
    (image,) = encoded.images
    assert [[1, *image[1:]]] == expected["image_grid_thw"].tolist()
    assert np.array_equal(reader.pixels(content, image), expected["pixel_values"])
    count = encoded.prompt_ids.count(reader.image_token)
    assert count == len(expected["pixel_values"]) // 4 == reader.num_tokens(image)
    start, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    assert encoded.prompt_ids == (start, *[reader.image_token] * count, end)


def test_a_chat_template_places_images_in_text_and_in_parts(tmp_path, reader, tokenizer):
    tokenizer.chat_template = TEMPLATE
    try:
        parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
        images = [picture(16, 16), picture(32, 48)]
        texts, messages = rows(
            tmp_path,
            {"prompt": "<image>a<image>b", "images": images, "label": "1"},
            {
                "prompt": [
                    {"role": "user", "content": "<image>"},
                    {"role": "user", "content": parts},
                ],
                "images": images,
                "label": "1",
            },
        )
        found, other = (
            encode_prompt(tokenizer, row, data(apply_chat_template=True), rollout(), images=reader)
            for row in (texts, messages)
        )
    finally:
        tokenizer.chat_template = None
    assert found.prompt_ids == other.prompt_ids
    assert found.images == other.images
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert found.prompt == f"{image}a{image}b"
    assert found.prompt_ids.count(reader.image_token) == 1 + 6


def test_a_supervised_row_has_the_prompt_of_a_sampled_row(tmp_path, reader, tokenizer):
    (row,) = rows(tmp_path, *make_rows(1))
    sampled = encode_prompt(tokenizer, row, data(), rollout(), images=reader)
    supervised = encode_supervised(
        tokenizer, row, data(), rollout(type="dataset", rollout_max_response_len=4), images=reader
    )
    assert supervised.prompt_ids == sampled.prompt_ids
    assert supervised.images == sampled.images
    assert tokenizer.decode(supervised.response_ids[:-1]) == row.label


def test_a_text_that_is_the_placeholder_is_refused(tmp_path, reader, tokenizer):
    (row,) = rows(
        tmp_path, {"prompt": "<image><|image_pad|>", "images": picture(16, 16), "label": "1"}
    )
    with pytest.raises(DataError, match="not one place for each image"):
        encode_prompt(tokenizer, row, data(), rollout(), images=reader)


def test_a_prompt_with_images_is_not_cut(tmp_path, reader, tokenizer):
    (row,) = rows(tmp_path, *make_rows(1))
    short = {"rollout_max_prompt_len": 5}
    with pytest.raises(DataError, match="cannot be cut"):
        encode_prompt(
            tokenizer,
            row,
            data(**short, overlong_prompts="truncate_left"),
            rollout(),
            images=reader,
        )
    dropped = encode_prompt(
        tokenizer, row, data(**short, overlong_prompts="drop"), rollout(), images=reader
    )
    assert dropped.overlong is not None and dropped.overlong.tokens == 12


def test_a_plan_names_its_images_which_are_stored_before_it(tmp_path, reader, tokenizer):
    files = Files(tmp_path / "store")
    source = DataSource(
        rows(tmp_path, *make_rows(3)),
        tokenizer,
        data(),
        rollout(),
        "run",
        images=reader,
        stored=Images(files),
    )
    (group,) = source.plan(0, DataState()).groups
    (image,) = group.images
    assert files.list() == [image_path(image[0])]
    contents = {picture for picture, _ in map(draw, range(3))}
    assert Images(files).read(image[0]) in contents
    pixels = StoredPixels(files, reader, [image])
    again = pickle.loads(pickle.dumps(pixels))
    assert np.array_equal(again[image[0]], pixels[image[0]])
    assert pixels[image[0]].shape == (36, 3 * 2 * 8 * 8)


def test_other_settings_of_the_processor_are_found(tmp_path, reader):
    content, _ = draw(0)
    digest, rows_, columns = reader.image("0" * 64, 48, 48)
    with pytest.raises(DataError, match="makes other patches"):
        reader.pixels(content, (digest, rows_, columns + 2))
    with pytest.raises(DataError, match="refuses an image"):
        reader.image(digest, 1, 1000)


def test_a_model_directory_without_a_processor_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_image_reader(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(ConfigError, match=f"(?s)settings of its image processor.*{SETTINGS}"):
        load_image_reader(tmp_path)
