"""Functions of slime's distillation from a teacher's server (rlpipe.rewards.slime_distillation)."""

from __future__ import annotations

from argparse import Namespace

from aiohttp import web
from aiohttp.test_utils import TestServer

from rlpipe.rewards.slime_distillation import post_process_rewards, reward_func
from rlpipe.types import Sample


async def test_log_probs_of_the_response_come_from_the_teacher():
    async def answer(request: web.Request) -> web.Response:
        ids = (await request.json())["input_ids"]
        pairs = [[None, ids[0]], *([-float(token), token] for token in ids[1:])]
        return web.json_response({"meta_info": {"input_token_logprobs": pairs}})

    app = web.Application()
    app.router.add_post("/generate", answer)
    sample = Sample(prompt_ids=[1, 2], response_ids=[3, 4])
    empty = Sample(prompt_ids=[1, 2])
    async with TestServer(app) as server:
        args = Namespace(rm_url=str(server.make_url("/generate")), rollout_temperature=1.0)
        for one in (sample, empty):
            one.reward = await reward_func(args, one)
    assert post_process_rewards(Namespace(reward_key=None), [sample, empty]) == ([0.0] * 2,) * 2
    assert sample.teacher_log_probs == [-3.0, -4.0]
    assert empty.teacher_log_probs == []
