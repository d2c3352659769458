"""Tiny random models that read images, batches with images, and their log-probs by transformers."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.images import BatchImages
from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from tests.engines.megatron.ranks import engine
from tests.engines.megatron.sizes import SIZES

IMAGE = 90
START = 91
END = 92
_TEXT: dict[str, Any] = {
    **SIZES,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [2, 3, 3],
    },
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": _TEXT,
        # Windows of 2 × 2 merged patches: larger images have several.
        "vision_config": {**_TOWER, "depth": 3, "window_size": 56, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": {
            **_TEXT,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            **_TOWER,
            "depth": 3,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
    },
}


def make(family: str, directory: Path, *, tied: bool = False) -> str:
    """Write a random model and return its directory."""
    values = FAMILIES[family]
    values = {name: {**part, "tie_word_embeddings": tied} for name, part in values.items()}
    del values["vision_config"]["tie_word_embeddings"]
    kind: Any = CONFIG_MAPPING[family]
    config = kind(
        **values,
        tie_word_embeddings=tied,
        image_token_id=IMAGE,
        video_token_id=93,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and not name.endswith(".bias")
            parameter.normal_(float(is_norm), 0.12, generator=generator)
    model.save_pretrained(directory)
    return str(directory)


def write_processor(directory: Path) -> None:
    """Write a tokenizer and an image processor, which SGLang reads."""
    names = {IMAGE: "<|image_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}
    names |= {93: "<|video_pad|>"}
    words = {names.get(token, f"w{token}"): token for token in range(96)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        additional_special_tokens=[*names.values()],
    )
    tokenizer.save_pretrained(directory)
    Qwen2VLImageProcessorPil().save_pretrained(directory)


def load(directory: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)


def make_batch(model: Any, sizes: list[list[tuple[int, int]]], seed: int = 0) -> BatchColumns:
    """Return samples with images of these patches (height, width), by sample."""
    random = np.random.default_rng(seed)
    vision = model.config.vision_config
    features = 3 * vision.temporal_patch_size * vision.patch_size**2
    prompts, grids, digests, pixels = [], [], [], {}
    for images in sizes:
        prompt = random.integers(0, 90, random.integers(1, 6)).tolist()
        for height, width in images:
            values = random.normal(0, 1, (height * width, features)).astype(np.float32)
            digests.append(hashlib.sha256(values.tobytes()).hexdigest())
            pixels[digests[-1]] = values
            grids.append((1, height, width))
            prompt += [START, *[IMAGE] * (height * width // 4), END]
            prompt += random.integers(0, 90, random.integers(1, 4)).tolist()
        prompts.append(prompt)
    responses = [random.integers(0, 90, random.integers(1, 9)).tolist() for _ in sizes]
    batch = BatchColumns.from_lists(prompts, responses)
    size = batch.num_response_tokens
    advantages = np.repeat(random.normal(0, 1, len(sizes)), batch.response_lengths)
    images = BatchImages(
        offsets=np.cumsum([0, *map(len, sizes)], dtype=np.int64),
        grids=np.array(grids, np.int64).reshape(-1, 3),
        digests=tuple(digests),
        pixels=pixels,
    )
    return replace(
        batch,
        images=images,
        rollout_log_probs=random.normal(-4, 1, size).astype(np.float32),
        advantages=advantages.astype(np.float32),
    )


class Reads(torch.nn.Module):
    """The model as `reference` calls it: logits of one sample, with its images."""

    def __init__(self, model: Any, batch: BatchColumns) -> None:
        super().__init__()
        self.model = model
        self._batch = batch

    def forward(self, tokens: torch.Tensor) -> Any:
        batch, images = self._batch, self._batch.images
        assert images is not None
        (sample,) = (
            i
            for i in range(len(batch))
            if np.array_equal(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]], tokens[0])
        )
        here = images.of_sample(sample)
        if not images.digests[here]:
            return self.model(input_ids=tokens)
        pixels = np.concatenate([images.pixels[digest] for digest in images.digests[here]])
        return self.model(
            input_ids=tokens,
            mm_token_type_ids=(tokens == IMAGE).int(),
            pixel_values=torch.from_numpy(pixels),
            image_grid_thw=torch.from_numpy(images.grids[here]),
        )


def score_and_train_images(
    rank: int, world_size: int, port: int, model_dir: str, train: dict, batch: BatchColumns
) -> dict:
    """Score a batch, train one step on it, and return everything to compare."""
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    try:
        ours.load_hf()
        scores = ours.score(batch)
        packing = plan(
            batch.lengths,
            global_batch_size=None,
            max_tokens=ours.max_tokens,
            data_parallel=ours.data_parallel,
        )
        columns = batch.with_columns(proximal_log_probs=scores, reference_log_probs=scores)
        result = ours.train(columns, packing)
        after = {name: tensor.clone().numpy() for name, tensor in ours.named_hf_tensors()}
        return {
            "scores": scores,
            "steps": result.steps,
            "digest": result.state_digest,
            "after": after,
        }
    finally:
        ours.close()
