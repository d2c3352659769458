"""Routed experts of a real engine equal those of transformers, and a trainer that replays them
computes the engine's log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlpipe.batch.columns import BatchColumns
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.train import TrainConfig
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import Server
from rlpipe.rollout.agent.chat_sessions import ChatSessions
from rlpipe.rollout.agent.gateway import Gateway
from rlpipe.rollout.agent.routes import agent_routes
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.generate import SingleTurn
from rlpipe.store.routed_experts import NOT_ROUTED, one_per_token, routed_width
from rlpipe.system.ports import free_port
from rlpipe.types import PlannedGroup, Sample, Status
from tests.engine_template import forked_engines
from tests.engines.megatron.ranks import engine
from tests.live_engine import FIRST_STAMP, START_S

pytestmark = pytest.mark.integration

VOCABULARY = 128
CONTEXT = 256
LAYERS = 2
TOP_K = 2
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 24, "ignore_eos": True}
GROUP = PlannedGroup(group_id="b:00000001", prompt="p", prompt_ids=(5, 6, 7), seeds=tuple(range(8)))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A mixture of four experts, in transformers and behind a server that returns them."""
    folder = tmp_path_factory.mktemp("moe")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "head_dim": 16,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": TOP_K,
    }
    rest = {
        "max_position_embeddings": CONTEXT,
        "norm_topk_prob": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=VOCABULARY, **sizes, **heads, **rest, tie_word_embeddings=False)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.12, generator=generator)
    model.save_pretrained(folder / "model")
    server = server_of(folder)
    router = Router(EngineConfig(), port=None, log_path=folder / "router.log")
    try:
        with forked_engines():
            server.start()
        router.start()
        server.wait_ready(START_S)
        router.wait_ready(START_S)
        router.add(server.url)
        yield SimpleNamespace(
            model=model.eval(),
            folder=folder,
            router=router,
            width=routed_width(model.config.to_dict()),
        )
    finally:
        server.stop()
        router.stop()


def server_of(folder: Path) -> Server:
    keep = {
        "dtype": "float32",
        "port": None,
        "log_path": folder / "server.log",
        "seed": 1,
        "weight_version": FIRST_STAMP,
    }
    return Server(
        folder / "model",
        EngineConfig(),
        ResourcesConfig(),
        **keep,
        names_experts=True,
        device="cpu",
    )


def client_of(moe) -> GenerateClient:
    url = moe.router.url
    return GenerateClient(
        url, vocab_size=VOCABULARY, deadline_s=120.0, samples_per_request=64, routed_width=moe.width
    )


def check(moe, sample: Sample, tokens: int | None = None) -> None:
    """Check a sample's experts against transformers: all tokens but the last, or `tokens`."""
    ids = [*sample.prompt_ids, *sample.response_ids]
    with torch.no_grad():
        logits = moe.model(torch.tensor([ids]), output_router_logits=True).router_logits
    wanted = (
        torch.stack([layer.topk(TOP_K, -1).indices for layer in logits], 1).sort(-1).values.numpy()
    )
    samples = np.sort(sample.rollout_routed_experts.reshape(-1, LAYERS, TOP_K), -1)
    assert len(samples) == (len(ids) - 1 if tokens is None else tokens)
    assert np.array_equal(samples, wanted[: len(samples)])


class Letters:
    """A tokenizer of numbers with a template that only appends."""

    chat_template = "yes"
    name_or_path = "letters"

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{token} " for token in ids)

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, **_options) -> str:
        words = {"user": "2 {} 3 ", "assistant": "4 {}3 "}
        return "".join(words[m["role"]].format(m["content"]) for m in messages) + (
            "4 " if add_generation_prompt else ""
        )


async def test_trainer_and_engine_agree_on_a_group_that_was_cut_off_and_continued(moe):
    async with client_of(moe) as client:
        sampling = {**SAMPLING, "max_new_tokens": 200}
        for wait_s in (
            0.5,
            0.2,
            0.35,
            0.1,
            0.05,
        ):  # one of them ends in the middle, however fast the machine is
            stop = asyncio.Event()
            generate = SingleTurn(
                client, sampling, decode=str, context_len=CONTEXT, routed=True, stop=stop
            )
            running = asyncio.ensure_future(generate(GROUP))
            await asyncio.sleep(wait_s)
            await client.cut_off(stop)
            cut = await running
            if {sample.status for sample in cut} == {Status.ABORTED} and any(
                sample.response_ids for sample in cut
            ):
                break
        assert {sample.status for sample in cut} == {Status.ABORTED}
        assert any(sample.response_ids for sample in cut)
        for sample in cut:
            if sample.response_ids:
                check(moe, sample)
        whole = await SingleTurn(client, sampling, decode=str, context_len=CONTEXT, routed=True)(
            GROUP, cut
        )
    for sample in whole:
        assert len(sample.response_ids) == 200
        check(moe, sample)
    samples = whole[:4]
    batch = BatchColumns.from_lists(
        [s.prompt_ids for s in samples], [s.response_ids for s in samples]
    )
    experts = np.concatenate([one_per_token(s.rollout_routed_experts, 203) for s in samples])
    config = TrainConfig.model_validate(
        {"max_tokens_per_gpu": 512, "use_rollout_routing_replay": True}
    )
    ours = engine(str(moe.folder / "model"), config, 0, 1, free_port(), rollout_temperature=1.0)
    try:
        ours.load_hf()
        named = ours.routing_of_engines(batch.with_columns(routed_experts=experts))
        scores = ours.score(batch.with_columns(routed_experts=named), replay=True)
        assert (named == NOT_ROUTED).any() and np.array_equal(scores, ours.score(batch))
    finally:
        ours.close()
    np.testing.assert_allclose(
        scores, np.concatenate([s.rollout_log_probs or [] for s in samples]), atol=1e-4
    )


async def test_samples_of_an_openai_session_have_routed_experts(moe):
    opened: list[ChatSessions] = []

    def routes(gateway: Gateway):
        opened.append(
            ChatSessions(
                gateway, {**SAMPLING, "max_new_tokens": 10}, {}, model="m", evaluation=False
            )
        )
        return agent_routes(opened[0])

    sample = Sample(session_id="s")
    async with (
        client_of(moe) as client,
        Gateway(client, Letters(), context_len=CONTEXT, routed=True, routes=routes) as gateway,  # pyright: ignore
    ):
        opened[0].begin(sample)
        url = f"{gateway.url}/sessions/s/v1/chat/completions"
        messages = [{"role": "user", "content": "40 41"}]
        async with httpx.AsyncClient(timeout=120) as http:
            for _ in range(3):
                reply = (await http.post(url, json={"messages": messages})).json()["choices"][0][
                    "message"
                ]
                messages += [reply, {"role": "user", "content": "42"}]
        samples = opened[0].samples(sample)
    assert [one.num_turns for one in samples] == [3]
    check(moe, samples[0])
