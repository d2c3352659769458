"""Images in requests to a real server: log-probs equal transformers'."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
import torch

from rlpipe.engines.sglang.image_inputs import decoded, image_data
from tests.engine_template import forked_engines
from tests.engines.megatron import vision_models
from tests.engines.megatron.vision_models import IMAGE, START
from tests.live_engine import START_S, make_server

SIZES = [[(4, 6), (8, 4)]]
UNSAMPLED = [IMAGE, START, 93]
"""Tokens that mean images and videos to transformers. SGLang's log-probs include the bias."""


def test_arrays_of_a_request_are_tensors_again():
    pixels = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    grids = np.array([[1, 2, 4]])
    (item,) = map(decoded, image_data(pixels, grids))
    assert np.array_equal(item["pixel_values"].numpy(), pixels)
    assert np.array_equal(item["image_grid_thw"].numpy(), grids)
    assert decoded("https://example.org/a.png") == "https://example.org/a.png"
    wrong = {"base64": "", "dtype": "object", "shape": [0]}
    with pytest.raises(ValueError, match="pixel_values has the dtype 'object'"):
        decoded({"format": "processor_output", "pixel_values": wrong})


@pytest.mark.integration
@pytest.mark.parametrize("family", vision_models.FAMILIES)
def test_a_server_reads_images_like_transformers(family, tmp_path):
    directory = tmp_path / "model"
    model = vision_models.load(vision_models.make(family, directory))
    vision_models.write_processor(directory)
    batch = vision_models.make_batch(model, SIZES)
    images = batch.images
    assert images is not None
    prompt = batch.tokens[: batch.prompt_lengths[0]].tolist()
    pixels = np.concatenate([images.pixels[digest] for digest in images.digests])
    server = make_server(directory, tmp_path / "log", context_length=256)
    try:
        with forked_engines():
            server.start()
        server.wait_ready(START_S)
        answer = httpx.post(
            f"{server.url}/generate",
            json={
                "input_ids": prompt,
                "image_data": image_data(pixels, images.grids),
                "sampling_params": {
                    "max_new_tokens": 8,
                    "ignore_eos": True,
                    "logit_bias": {str(token): -100.0 for token in UNSAMPLED},
                },
                "return_logprob": True,
            },
            timeout=120,
        ).json()
    finally:
        server.stop()
    response = answer["output_ids"]
    tokens = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = model(
            input_ids=tokens,
            mm_token_type_ids=(tokens == IMAGE).int(),
            pixel_values=torch.from_numpy(pixels),
            image_grid_thw=torch.from_numpy(images.grids),
        ).logits[0, len(prompt) - 1 : -1]
    logits[:, UNSAMPLED] -= 100
    wanted = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()
    found = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    assert answer["meta_info"]["prompt_tokens"] == len(prompt)
    assert np.abs(np.array(found) - wanted).max() < 1e-5
