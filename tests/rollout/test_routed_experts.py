"""Routed experts from answers to samples, with engines of fixed answers.

`test_routed_engine` uses a real engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import httpx
import numpy as np
import pytest

from rlpipe.errors import EngineError, EngineRejected, HookError
from rlpipe.rollout.agent.chat_sessions import ChatSessions
from rlpipe.rollout.agent.gateway import Gateway
from rlpipe.rollout.agent.routes import agent_routes
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.generate import SingleTurn, planned_sample
from rlpipe.rollout.generation import Generation
from rlpipe.rollout.hooks.journal import Answer, Journal
from rlpipe.rollout.hooks.sample_checks import Limits, checked_rows
from rlpipe.store.routed_experts import read_rows, write_rows
from rlpipe.types import PlannedGroup, Sample, Status

WIDTH = 2
GROUP = PlannedGroup(group_id="b:00000001", prompt="p", prompt_ids=(5, 6, 7), seeds=(10, 11))
SAMPLING = {"max_new_tokens": 4}


def rows_of(ids: list[int], weights: int = 0) -> np.ndarray:
    """Return the experts of all tokens but the last, which no engine reads."""
    return np.array(
        [[token, 1000 * weights + place] for place, token in enumerate(ids[:-1])], np.uint16
    ).reshape(-1, WIDTH)


class Engine:
    """Answer with given tokens, in order; return the requested experts unless `silent`."""

    def __init__(
        self, *answers: tuple[list[int], str], silent: bool = False, waiting: int = 0
    ) -> None:
        """The first `waiting` answers were aborted in the queue and have no experts."""
        self.answers = list(answers)
        self.requests = []
        self.silent = silent
        self.waiting = waiting
        self.num_answers = 0

    def client(self, width: int = WIDTH) -> GenerateClient:
        client = GenerateClient(
            "http://router",
            vocab_size=128,
            deadline_s=5.0,
            samples_per_request=8,
            routed_width=width,
        )
        client.pool.http = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return client

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            return httpx.Response(
                200, json={"workers": [{"url": "http://engine:1", "is_healthy": True}]}
            )
        assert (request.url.host == "engine") == (
            "return_routed_experts" in request.content.decode()
        )
        body = json.loads(request.content)
        self.requests.append(body)
        return httpx.Response(200, json=[self._row(body, prompt) for prompt in body["input_ids"]])

    def _row(self, body: dict, prompt: list[int]) -> dict:
        ids, reason = self.answers.pop(0)
        pairs = [[-0.5, token, None] for token in ids]
        meta = {
            "output_token_logprobs": pairs,
            "finish_reason": {"type": reason},
            "weight_version": f"b@{self.num_answers}@d",
        }
        if (
            body.get("return_routed_experts")
            and not self.silent
            and self.waiting <= self.num_answers
        ):
            rows = rows_of([*prompt, *ids], self.num_answers)
            meta["routed_experts"] = write_rows(rows[body["routed_experts_start_len"] :])
        self.num_answers += 1
        return {"meta_info": meta}


async def single(engine: Engine, so_far=(), width: int = WIDTH) -> list[Sample]:
    async with engine.client(width) as client:
        return await SingleTurn(client, SAMPLING, decode=str, context_len=64, routed=True)(
            GROUP, so_far
        )


async def test_a_sample_has_the_experts_of_all_tokens_but_the_last():
    engine = Engine(([8, 9], "stop"), ([8, 9, 10, 11], "length"))
    first, second = await single(engine)
    assert first.rollout_routed_experts.tolist() == rows_of([5, 6, 7, 8, 9], 0).tolist()
    assert second.rollout_routed_experts.tolist() == rows_of([5, 6, 7, 8, 9, 10, 11], 1).tolist()
    assert [body["routed_experts_start_len"] for body in engine.requests] == [0]


async def test_requests_without_routing_replay_ask_for_no_experts():
    engine = Engine(([8], "stop"), ([9], "stop"))
    async with engine.client() as client:
        samples = await SingleTurn(client, SAMPLING, decode=str, context_len=64)(GROUP)
    assert "return_routed_experts" not in engine.requests[0]
    assert [sample.rollout_routed_experts for sample in samples] == [None, None]


async def test_an_aborted_response_keeps_its_experts_and_the_continuation_adds_the_rest():
    engine = Engine(([8, 9], "abort"), ([8], "stop"), ([10, 11], "length"))
    first, _ = await single(engine)
    earlier = rows_of([5, 6, 7, 8, 9], 0)
    later = rows_of([5, 6, 7, 8, 9, 10, 11], 2)
    assert first.rollout_routed_experts.tolist() == [*earlier.tolist(), *later[4:].tolist()]
    assert [body["routed_experts_start_len"] for body in engine.requests] == [0, 4]


async def test_a_response_aborted_in_the_queue_gets_experts_from_the_continuation():
    engine = Engine(([8, 9], "abort"), ([], "abort"), ([10], "stop"), ([8], "stop"), waiting=2)
    first, second = await single(engine)
    assert first.rollout_routed_experts.tolist() == rows_of([5, 6, 7, 8, 9, 10], 2).tolist()
    assert second.rollout_routed_experts.tolist() == rows_of([5, 6, 7, 8], 3).tolist()


async def test_a_shortened_response_loses_rows_of_experts():
    engine = Engine(([8, 20, 9], "abort"), ([8], "stop"))
    async with engine.client() as client:
        sampling = {**SAMPLING, "stop_token_ids": [20]}
        first, _ = await SingleTurn(client, sampling, decode=str, context_len=64, routed=True)(
            GROUP
        )
    assert (
        first.response_ids == [8, 20]
        and first.rollout_routed_experts.tolist() == rows_of([5, 6, 7, 8, 20]).tolist()
    )


async def test_a_continued_sample_keeps_the_experts_of_the_earlier_iteration():
    earlier = [planned_sample(GROUP, index) for index in range(2)]
    for sample in earlier:
        sample.response_ids = [8, 9]
        sample.rollout_log_probs = [-1.0, -1.0]
        sample.weight_versions = [(2, 0)]
        sample.status, sample.rollout_routed_experts = Status.ABORTED, rows_of([5, 6, 7, 8, 9], 3)
    engine = Engine(([10], "stop"), ([11], "stop"))
    first, second = await single(engine, earlier)
    assert first.rollout_routed_experts.tolist() == [*rows_of([5, 6, 7, 8, 9], 3).tolist(), [9, 4]]
    assert second.rollout_routed_experts[-1].tolist() == [9, 1004]


async def test_an_engine_without_routed_experts_is_an_error_with_the_remedy():
    with pytest.raises(
        EngineError, match=r"(?s)does not return routed experts.*--enable-return-routed-experts"
    ):
        await single(Engine(([8], "stop"), ([9], "stop"), silent=True))


async def test_experts_of_another_number_of_layers_are_refused():
    with pytest.raises(EngineRejected, match="not 3 tokens × 4"):
        await single(Engine(*[([8], "stop")] * 6), width=4)


class FixedClient:
    """A client of fixed responses, as the gateway's."""

    end_ids = frozenset()

    def __init__(self, *responses: list[int]) -> None:
        self.responses = list(responses)
        self.wanted = []

    async def generate(self, ids, sampling, *, stop, routing_key, where, routed_from=None):
        self.wanted.append(routed_from)
        response = self.responses.pop(0)
        experts = None if routed_from is None else rows_of([*ids, *response])[routed_from:]
        return [
            Generation(
                response,
                [-0.5] * len(response),
                "stop",
                [(len(response), "b@1@d")],
                "e",
                0,
                1.0,
                2.0,
                routed_experts=experts,
            )
        ]


class Numbers:
    """A tokenizer whose texts are numbers, with a template that only appends."""

    chat_template = name_or_path = "numbers"

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(f"{token} " for token in ids)

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, **_options) -> str:
        shapes = {"user": "2 {} 3 ", "assistant": "4 {}3 "}
        return "".join(shapes[m["role"]].format(m["content"]) for m in messages) + (
            "4 " if add_generation_prompt else ""
        )


async def _posted(
    client: FixedClient, *bodies: dict, routed: bool = True
) -> tuple[list[dict], Journal]:
    gateway = Gateway(client, Numbers(), context_len=64, routed=routed)  # pyright: ignore
    async with gateway, httpx.AsyncClient() as http:
        return [
            (await http.post(f"{gateway.url}/generate", json=body)).json() for body in bodies
        ], gateway.journal


async def test_the_gateway_returns_experts_like_an_engine():
    wanted = {"return_routed_experts": True}
    bodies = [
        {"input_ids": [5, 6], **wanted},
        {"input_ids": [5, 6, 8], **wanted, "routed_experts_start_len": 2},
    ]
    (first, second), _ = await _posted(FixedClient([8], [9, 10]), *bodies)
    assert (
        read_rows(first["meta_info"]["routed_experts"], 2, WIDTH).tolist()
        == rows_of([5, 6, 8]).tolist()
    )
    assert (
        read_rows(second["meta_info"]["routed_experts"], 2, WIDTH).tolist()
        == rows_of([5, 6, 8, 9, 10])[2:].tolist()
    )
    (refused,), _ = await _posted(FixedClient([8]), bodies[0], routed=False)
    assert "train.use_rollout_routing_replay" in refused["error"]["message"]


async def test_an_agents_turns_request_only_missing_experts_and_make_one_sample():
    client = FixedClient([50, 51], [52], [53, 54])
    opened = []

    def routes(gateway: Gateway):
        opened.append(ChatSessions(gateway, SAMPLING, {}, model="m", evaluation=False))
        return agent_routes(opened[0])

    sample = Sample(session_id="s")
    messages = [{"role": "user", "content": "40"}]
    gateway = Gateway(client, Numbers(), context_len=64, routed=True, routes=routes)  # pyright: ignore
    async with gateway, httpx.AsyncClient() as http:
        opened[0].begin(sample)
        for _ in range(3):
            answer = await http.post(
                f"{gateway.url}/sessions/s/v1/chat/completions", json={"messages": messages}
            )
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "41"}]
        (result,) = opened[0].samples(sample)
    tokens = [*result.prompt_ids, *result.response_ids]
    assert tokens == [2, 40, 3, 4, 50, 51, 3, 2, 41, 3, 4, 52, 3, 2, 41, 3, 4, 53, 54]
    assert (
        client.wanted == [0, 5, 11]
        and result.rollout_routed_experts.tolist() == rows_of(tokens).tolist()
    )


LIMITS = Limits(vocab_size=100, context_len=40, routed_width=WIDTH)


def as_row(
    sample: Sample, journal: Journal, limits: Limits = LIMITS, before: Sample | None = None
) -> Sample:
    (row,) = checked_rows(sample, GROUP, 1, journal, limits, before=before, where="h")
    return row


def sampled(response: list[int], mask: list[int] | None = None) -> Sample:
    sample = planned_sample(GROUP, 1)
    sample.tokens, sample.response_length, sample.loss_mask = (
        [5, 6, 7, *response],
        len(response),
        mask,
    )
    return sample


async def test_a_sample_without_experts_gets_the_experts_of_the_answers():
    client = FixedClient([8, 9], [12])
    _, journal = await _posted(
        client, {"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 7, 8, 9, 10, 11]}
    )
    row = as_row(sampled([8, 9, 10, 11, 12, 13], [1, 1, 0, 0, 1, 0]), journal)
    assert row.rollout_routed_experts.tolist() == rows_of([5, 6, 7, 8, 9, 10, 11, 12]).tolist()
    assert as_row(sampled([8, 9]), journal, Limits(100, 40)).rollout_routed_experts is None, (
        "the run does not want them"
    )


def test_tokens_of_an_earlier_iteration_keep_their_experts():
    before = sampled([8, 9])
    before.rollout_routed_experts = rows_of([5, 6, 7, 8, 9], 4)
    before.weight_versions = [(2, 0)]
    before.rollout_log_probs = [-1.0, -1.0]
    before.status = Status.ABORTED
    journal = Journal()
    journal.add(
        [5, 6, 7, 8, 9],
        Answer((10, 11), (-0.5, -0.5), ((2, 1),), rows_of([5, 6, 7, 8, 9, 10, 11], 1)),
    )
    continued = sampled([8, 9, 10, 11])
    continued.rollout_routed_experts = before.rollout_routed_experts.copy()
    row = as_row(continued, journal, before=before)
    assert row.rollout_routed_experts.tolist() == [
        *rows_of([5, 6, 7, 8, 9], 4).tolist(),
        [9, 1004],
        [10, 1005],
    ]


def test_experts_in_slimes_shape_are_accepted_and_other_shapes_refused():
    sample = sampled([8, 9])
    sample.rollout_routed_experts = rows_of([5, 6, 7, 8, 9]).astype(np.int32).reshape(4, WIDTH, 1)
    row = as_row(sample, Journal())
    assert row.rollout_routed_experts.dtype == np.uint16 and row.rollout_routed_experts.shape == (
        4,
        WIDTH,
    )
    wrong = [
        np.zeros((5, WIDTH), int),
        np.zeros((1, 3), int),
        np.zeros((4, WIDTH)),
        np.full((4, WIDTH), -1),
    ]
    for experts in wrong:
        sample = sampled([8, 9])
        sample.rollout_routed_experts = experts
        with pytest.raises(HookError, match=r"(?s)do not fit.*4 tokens × 2"):
            as_row(sample, Journal())
