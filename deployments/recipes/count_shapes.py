"""Pictures, model and reward of the recipe `count_shapes`.

    python -m deployments.recipes.count_shapes     # writes deployments/recipes/shapes/

A picture has one to five shapes, each in one of nine cells. The shapes are squares, discs and
triangles of any colour. The prompt asks for their number, and the answer is one token.
"""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from deployments.recipes.tiny_models import SPECIAL_TOKENS, character_tokenizer, save_model
from rlpipe.types import Sample

FOLDER = Path(__file__).with_name("shapes")
SIZES = {"train": 1024, "heldout": 128}
CELL = 16
"""Pixels of the side of a cell: one merged patch of the model."""
CELLS = 3
MOST_SHAPES = 5
PATCH = 8
PROMPT = "<image>How many shapes? "
ENDS = {
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index("<eos>"),
    "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
}
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def draw(seed: int) -> tuple[bytes, int]:
    """Return a PNG file and its number of shapes; `seed` alone decides them."""
    source = random.Random(seed)
    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
    canvas = ImageDraw.Draw(picture)
    number = source.randint(1, MOST_SHAPES)
    for cell in source.sample(range(CELLS * CELLS), number):
        row, column = divmod(cell, CELLS)
        size = source.randint(9, CELL - 2)
        left = column * CELL + source.randint(1, CELL - 1 - size)
        top = row * CELL + source.randint(1, CELL - 1 - size)
        colour = tuple(source.randint(0, 170) for _ in "rgb")
        box = (left, top, left + size, top + size)
        kind = source.choice(("square", "disc", "triangle"))
        if kind == "square":
            canvas.rectangle(box, fill=colour)
        elif kind == "disc":
            canvas.ellipse(box, fill=colour)
        else:
            corners = [(left, top + size), (left + size, top + size), (left + size // 2, top)]
            canvas.polygon(corners, fill=colour)
    file = io.BytesIO()
    picture.quantize(16).save(file, "PNG", optimize=True)
    return file.getvalue(), number


def make_rows(num_rows: int, seed: int = 0) -> list[dict[str, object]]:
    """Return rows with a picture in base64 and its number of shapes."""
    rows = []
    for number in range(num_rows):
        picture, count = draw(seed + number)
        content = base64.b64encode(picture).decode()
        rows.append({"prompt": PROMPT, "images": [content], "label": str(count)})
    return rows


def reward(sample: Sample) -> float:
    """Return 1 if the response is the number of shapes, else 0."""
    return float(sample.response.strip() == sample.label)


def make_model(directory: str, *, seed: int = 0) -> None:
    """Write a Qwen3-VL of 0.4M float32 parameters, its tokenizer and its image processor.

    `seed` alone decides the weights. The tokenizer has one token for each printable ASCII character
    and one for the question.
    """
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = character_tokenizer(PROMPT.removeprefix("<image>"))
    tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_TOKENS]})
    ids = [tokenizer.convert_tokens_to_ids(token) for token in IMAGE_TOKENS]
    config = _config(len(tokenizer) + -len(tokenizer) % 8, ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    for name, token in ENDS.items():
        setattr(model.generation_config, name, token)
    save_model(model, tokenizer, directory)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": CELL // PATCH,
        "size": {"shortest_edge": CELL**2, "longest_edge": (CELLS * CELL) ** 2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    Path(directory, "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _config(vocab_size: int, ids: list[Any]) -> Any:
    """Return the sizes of the model. `ids`: of IMAGE_TOKENS."""
    from transformers import Qwen3VLConfig

    start, image, end, video = ids
    return Qwen3VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            **ENDS,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 96,
            "patch_size": PATCH,
            "spatial_merge_size": CELL // PATCH,
            "num_position_embeddings": (CELLS * CELL // PATCH) ** 2,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )


def main() -> None:
    """Write one file for training and one of held-out rows."""
    rows = make_rows(sum(SIZES.values()))
    FOLDER.mkdir(exist_ok=True)
    for name, size in SIZES.items():
        part, rows = rows[:size], rows[size:]
        lines = [json.dumps(row) + "\n" for row in part]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
