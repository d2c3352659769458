"""Generate function, reward and retrieval service of the recipe `search_r1`.

    rollout.custom_generate_function_path    search_r1.py:generate
    reward.function.path                     search_r1.py:reward
    python deployments/recipes/search_r1.py CORPUS --port 8000     the service, for small corpora

The policy writes a query between <search> and </search>, reads the documents that the service
answers between <information> and </information>, and ends with <answer>...</answer>. Documents are
in the context and not in the loss.

The service has the protocol of Search-R1's retrieval servers, so theirs (dense retrieval over 21
million passages of Wikipedia) and this one (BM25 in memory) are exchangeable:

    POST /retrieve {"queries": [text], "topk": 3}
    {"result": [[{"document": {"contents": "title\\ntext"}, "score": 1.0}, ...]]}

Source: Search-R1, arXiv 2503.09516.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import string
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from transformers import AutoTokenizer

from rlpipe.rollout.retrieval import Retrieval
from rlpipe.system.certificates import certificates
from rlpipe.types import Sample

STOPS = ["</search>", "</answer>"]
_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Sample one rollout: turns of the policy with search results between them.

    `rollout.custom_config`: `retrieval_url`, or `retrieval_corpus` to start a service in this
    process; `retrieval_topk`, documents of a query. Limits: `rollout.max_turns` and
    `rollout.rollout_max_response_len`, which counts the documents too.
    """
    url = args.retrieval_url or service(args.retrieval_corpus)
    engine = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.loss_mask = []
    reason = "length"
    async with httpx.AsyncClient(timeout=None, verify=certificates()) as client:
        for turn in range(1, args.max_turns + 1):
            room = args.rollout_max_response_len - len(sample.loss_mask)
            if room < 1:
                reason = "length"
                break
            params = {
                **sampling_params,
                "max_new_tokens": room,
                "stop": STOPS,
                "no_stop_trim": True,
            }
            body = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
            answer = (await client.post(engine, json=body)).raise_for_status().json()
            about = answer["meta_info"]
            reason = about["finish_reason"]["type"]
            _append(
                sample, [entry[1] for entry in about["output_token_logprobs"]], answer["text"], 1
            )
            query = _QUERY.search(answer["text"])
            if query is None or reason != "stop" or turn == args.max_turns:
                break
            found = await search(client, url, query[1].strip(), args.retrieval_topk)
            text = f"\n\n<information>{found}</information>\n\n"
            ids = tokenizer(args.hf_checkpoint).encode(text, add_special_tokens=False)
            _append(sample, ids[: args.rollout_max_response_len - len(sample.loss_mask)], text, 0)
    statuses = {"stop": "completed", "length": "truncated", "abort": "aborted"}
    sample.status = sample.Status(statuses[reason])
    return sample


def _append(sample: Sample, ids: list[int], text: str, mask: int) -> None:
    assert sample.loss_mask is not None
    sample.tokens = sample.tokens + ids
    sample.response_length += len(ids)
    sample.response += text
    sample.loss_mask = [*sample.loss_mask, *[mask] * len(ids)]


async def search(client: httpx.AsyncClient, url: str, query: str, topk: int) -> str:
    """Return the best documents of a query as text."""
    body = {"queries": [query], "topk": topk, "return_scores": True}
    answer = (await client.post(url, json=body, timeout=60.0)).raise_for_status().json()
    lines = []
    for number, entry in enumerate(answer["result"][0], start=1):
        title, _, text = entry["document"]["contents"].partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}")
    return "\n".join(lines)


@functools.cache
def tokenizer(directory: str) -> Any:
    """Return the tokenizer of a model directory."""
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def reward(sample: Sample) -> dict[str, float]:
    """Return 1 for an exact match with a reference answer, else 0. `searched`: 1 after a search.

    Case, punctuation and articles do not count, as in SQuAD.
    """
    answers = _ANSWER.findall(sample.response)
    targets = sample.metadata["ground_truth"]["target"]
    is_correct = bool(answers) and _plain(answers[-1]) in map(_plain, targets)
    return {
        "reward": float(is_correct),
        "searched": float("</information>" in sample.response),
    }


def _plain(text: str) -> str:
    """Return a text without case, punctuation, articles and repeated spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


@functools.cache
def service(corpus: str) -> str:
    """Start a retrieval service in this process, once for a corpus; return its URL."""
    server = make_server(corpus, "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/retrieve"


def make_server(corpus: str, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server of a corpus, a `.jsonl` file; `serve_forever` runs it."""
    index = Retrieval(corpus)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", 0))
            request = json.loads(self.rfile.read(length))
            topk = request.get("topk") or index.topk
            answer = {"result": [_documents(index, query, topk) for query in request["queries"]]}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Log nothing: there are hundreds of requests an iteration."""

    return ThreadingHTTPServer((host, port), Handler)


def _documents(index: Retrieval, query: str, topk: int) -> list[dict[str, Any]]:
    return [
        {"document": {"contents": "\n".join(index.documents[number])}, "score": score}
        for number, score in index.search(query, topk)
    ]


def main() -> None:
    """Run the service."""
    parser = argparse.ArgumentParser(description="Serve a corpus by BM25 over HTTP.")
    parser.add_argument("corpus", help="a .jsonl file of documents; see rlpipe.rollout.retrieval")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    make_server(arguments.corpus, arguments.host, arguments.port).serve_forever()


if __name__ == "__main__":
    main()
