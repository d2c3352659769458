"""Generate function, reward and retrieval service of the recipe `search_r1`."""

from __future__ import annotations

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from deployments.recipes import search_r1
from deployments.recipes.scripted_model import make_scripted_model
from rlpipe.types import Sample, Status

CORPUS = "deployments/recipes/smoke/wiki.jsonl"
GROUND_TRUTH = {"ground_truth": {"target": ["The Oak", "oak tree"]}, "style": "rule"}


SCRIPT = {"<search>": ["tree of Bado"], "</information>\n\n": ["<answer>", "</search>"]}


def made_sample(response: str = "") -> Sample:
    return Sample("g", 0, "", [1], response=response, metadata=dict(GROUND_TRUTH))


@pytest.mark.parametrize(
    ("response", "reward", "searched"),
    [
        ("<answer> the oak. </answer>", 1, 0),
        ("<information>...</information><answer>Oak Tree</answer>", 1, 1),
        ("<answer>oak</answer><answer>palm</answer>", 0, 0),
        ("oak", 0, 0),
    ],
)
def test_the_last_answer_must_match_exactly(response: str, reward: int, searched: int):
    assert search_r1.reward(made_sample(response)) == {"reward": reward, "searched": searched}


def test_the_service_answers_with_the_best_documents_in_the_protocol_of_search_r1():
    url = search_r1.service(CORPUS)
    assert search_r1.service(CORPUS) == url
    body = {"queries": ["tree of Fike", "Bado"], "topk": 2, "return_scores": True}
    first, second = httpx.post(url, json=body).json()["result"]
    assert [len(first), len(second)] == [2, 1]
    assert first[0]["document"]["contents"].startswith("Fike\nFike is an island.")
    assert first[0]["score"] > first[1]["score"]

    async def text() -> str:
        async with httpx.AsyncClient() as client:
            return await search_r1.search(client, url, "Bado", 1)

    assert asyncio.run(text()) == "Doc 1(Title: Bado) Bado is an island. Its tree is the oak."


class Engine(BaseHTTPRequestHandler):
    """Answers /generate with prepared texts, a token a character."""

    texts: ClassVar[list[str]] = []
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        text = self.texts.pop(0)
        about = {
            "output_token_logprobs": [[-0.1, ord(letter), None] for letter in text],
            "finish_reason": {"type": "stop"},
        }
        body = json.dumps({"text": text, "meta_info": about}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def engine() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    Engine.requests.clear()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def test_documents_are_in_the_context_and_not_in_the_loss(engine: int, tmp_path: Path):
    make_scripted_model(str(tmp_path), script=SCRIPT)
    query, answer = "<search>tree of Bado</search>", "<answer>oak</answer>"
    Engine.texts[:] = [query, answer]
    args = Namespace(
        sglang_router_ip="127.0.0.1",
        sglang_router_port=engine,
        hf_checkpoint=str(tmp_path),
        retrieval_url=None,
        retrieval_corpus=CORPUS,
        retrieval_topk=1,
        max_turns=3,
        rollout_max_response_len=512,
    )
    sample = asyncio.run(search_r1.generate(args, made_sample(), {"temperature": 1.0}))
    found = "Doc 1(Title: Bado) Bado is an island. Its tree is the oak."
    assert sample.response == f"{query}\n\n<information>{found}</information>\n\n{answer}"
    assert sample.status is Status.COMPLETED
    mask = sample.loss_mask
    assert mask is not None
    between = len(mask) - len(query) - len(answer)
    assert mask == [1] * len(query) + [0] * between + [1] * len(answer)
    assert sample.response_length == len(mask)
    assert Engine.requests[1]["input_ids"] == sample.tokens[: 1 + len(query) + between]
    assert search_r1.reward(sample) == {"reward": 1, "searched": 1}
    # Without room for the documents the rollout is cut off.
    Engine.texts[:] = [query]
    args.rollout_max_response_len = len(query) + 3
    cut = asyncio.run(search_r1.generate(args, made_sample(), {}))
    assert (len(cut.loss_mask or ()), cut.status) == (len(query) + 3, Status.TRUNCATED)
