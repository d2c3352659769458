"""Images in the requests of the client: one copy a batch, and no continued placeholder."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from aiohttp import web

from rlpipe.engines.sglang.image_inputs import decoded_all, image_data
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.client.image_requests import RequestImages, image_data_of
from rlpipe.rollout.client.request_settings import RequestSettings

PLACEHOLDER = 7


def images_of(value: float) -> RequestImages:
    pixels = np.full((4, 3), value, np.float32)
    return RequestImages(json.dumps(image_data(pixels, np.array([[1, 2, 2]]))), PLACEHOLDER)


def test_prompts_with_equal_images_share_a_copy():
    one, two = images_of(1), images_of(2)
    data = json.loads(image_data_of([one, one, two, two, one]))
    assert [entry[0].get("same_as") for entry in data] == [None, 0, None, 2, 0]
    found = [row[0]["pixel_values"][0, 0].item() for row in decoded_all(data)]
    assert found == [1, 1, 2, 2, 1]


def test_requests_with_images_go_to_an_engine_past_the_router_which_drops_them():
    settings = RequestSettings({"max_new_tokens": 3}, None, None, images=images_of(1))
    assert settings.batch_key().bypasses_router
    assert not settings._replace(images=None).batch_key().bypasses_router


def test_a_row_of_a_batch_may_have_no_image():
    rows = decoded_all([[], json.loads(images_of(3).data)])
    assert rows[0] == [] and rows[1][0]["pixel_values"].shape == (4, 3)


class Engine:
    """A router that is an engine too. It aborts the first request after these tokens."""

    def __init__(self, first: list[int]) -> None:
        self.first = first
        self.bodies: list[dict[str, Any]] = []

    async def workers(self, request: web.Request) -> web.Response:
        url = f"http://{request.host}"
        return web.json_response({"workers": [{"url": url, "is_healthy": True}]})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.first if not self.bodies else [5]
        reason = "abort" if not self.bodies else "length"
        self.bodies.append(body)
        answer = {
            "output_ids": ids,
            "text": "",
            "meta_info": {
                "finish_reason": {"type": reason},
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
                "weight_version": "run@0@0123456789abcdef",
                "prompt_tokens": 1,
                "cached_tokens": 0,
                "completion_tokens": len(ids),
                "id": "x",
            },
        }
        return web.json_response([answer] * len(body["input_ids"]))


async def sampled(first: list[int]) -> tuple[list[int], Engine]:
    engine = Engine(first)
    app = web.Application()
    app.router.add_get("/workers", engine.workers)
    app.router.add_post("/generate", engine.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with GenerateClient(
            f"http://127.0.0.1:{port}", vocab_size=16, deadline_s=20
        ) as client:
            (generation,) = await client.generate(
                [1, PLACEHOLDER, 2], {"max_new_tokens": 3}, images=images_of(1)
            )
    finally:
        await runner.cleanup()
    return generation.response_ids, engine


async def test_a_response_that_continues_sends_its_images_again():
    response, engine = await sampled([3, 4])
    assert response == [3, 4, 5]
    assert [body["input_ids"][0] for body in engine.bodies] == [
        [1, PLACEHOLDER, 2],
        [1, PLACEHOLDER, 2, 3, 4],
    ]
    assert all("pixel_values" in body["image_data"][0][0] for body in engine.bodies)


async def test_a_response_with_a_sampled_placeholder_starts_again():
    response, engine = await sampled([3, PLACEHOLDER])
    assert response == [5]
    assert engine.bodies[1]["input_ids"] == [[1, PLACEHOLDER, 2]]
