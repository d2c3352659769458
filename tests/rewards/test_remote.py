"""Rewards over HTTP against a real server: requests, retries and errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlpipe.config.data import JudgeReward, RemoteReward, RewardConfig
from rlpipe.errors import ConfigError, RewardError
from rlpipe.rewards import remote
from rlpipe.rewards.reward_rows import score
from rlpipe.rewards.scorer import Score, Scorer
from rlpipe.types import Sample, Status

SAMPLE = Sample(
    "g",
    0,
    "1 + 1 =",
    [1],
    label="2",
    response="two",
    metadata={"level": 1},
    status=Status.COMPLETED,
)


class Server:
    """Answers posts from a list of (status, JSON) and records the requests.

    The last answer is repeated.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = [(200, 1)]
        self.requests: list[tuple[str, Any, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, content, self.headers.get("Authorization")))
                status, answer = (
                    outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                )
                self.send_response(status)
                self.end_headers()
                self.wfile.write(
                    answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                )

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    server_under_test = Server()
    thread = threading.Thread(
        target=server_under_test.http.serve_forever, kwargs={"poll_interval": 0.01}
    )
    thread.start()
    yield server_under_test
    server_under_test.http.shutdown()
    thread.join()
    server_under_test.http.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(remote.asyncio, "sleep", sleep)
    return pauses


def posted_scores(function: RemoteReward | JudgeReward) -> list[Score]:
    return asyncio.run(Scorer(function).score_async([SAMPLE]))


def test_the_server_gets_prompt_response_and_label(server: Server):
    server.answers = [(200, {"score": 0.5, "length": 3})]
    scores = posted_scores(
        RemoteReward(type="remote", url=f"{server.url}/judge", reward_key="score")
    )
    assert scores == [Score(0.5, {"length": 3.0})]
    content = {"prompt": "1 + 1 =", "response": "two", "label": "2", "metadata": {"level": 1}}
    assert server.requests == [("/judge", content, None)]


def test_temporary_errors_are_retried_after_growing_pauses(server: Server, no_pauses: list[float]):
    server.answers = [(503, 0), (429, 0), (500, 0), (200, 2)]
    assert posted_scores(RemoteReward(type="remote", url=server.url)) == [Score(2.0)]
    assert [int(pause) for pause in no_pauses] == [1, 2, 4]


def test_after_all_tries_the_last_error_is_reported(server: Server):
    server.answers = [(503, "busy")]
    with pytest.raises(RewardError, match=r"HTTP 503: \"busy\" \(try 3 of 3\)"):
        posted_scores(RemoteReward(type="remote", url=server.url, tries=3))
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("answer", "problem"), [((404, "no"), "HTTP 404"), ((200, b"<html>"), "not answer in JSON")]
)
def test_permanent_errors_are_not_retried(server: Server, answer: tuple[int, Any], problem: str):
    server.answers = [answer]
    with pytest.raises(RewardError, match=problem):
        posted_scores(RemoteReward(type="remote", url=server.url))
    assert len(server.requests) == 1


def test_an_unreachable_server_is_an_error_of_the_row_and_never_0():
    function = RemoteReward(type="remote", url="http://127.0.0.1:9", tries=2)
    (row,) = asyncio.run(score([SAMPLE], RewardConfig(function=function, max_error_fraction=1.0)))
    assert row.reward is None
    assert "ConnectError" in str(row.error)


def test_a_model_judges_a_response(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLPIPE_JUDGE_KEY", "secret")
    server.answers = [(200, {"choices": [{"message": {"content": "Score: 2? No.\nScore: 7.5"}}]})]
    function = JudgeReward(
        type="judge",
        url=f"{server.url}/v1/",
        model="j",
        prompt="{prompt} {response} ({label})",
        scale=10,
    )
    assert posted_scores(function) == [Score(0.75)]
    ((path, content, key),) = server.requests
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert content["messages"] == [{"role": "user", "content": "1 + 1 = two (2)"}]
    assert (content["model"], content["temperature"]) == ("j", 0.0)


@pytest.mark.parametrize(
    "answer", [{"choices": [{"message": {"content": "fine"}}]}, {"error": "x"}]
)
def test_a_judge_without_a_score_is_an_error(server: Server, answer: Any):
    server.answers = [(200, answer)]
    with pytest.raises(RewardError, match=r"answer has no score|not a chat completion"):
        posted_scores(JudgeReward(type="judge", url=server.url))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"url": "localhost:1"}, "not a URL"),
        ({"prompt": "{question}"}, "not a Python format"),
        ({"score_pattern": "Score"}, "the pattern has no group"),
        ({"score_pattern": "("}, "not a regular expression"),
    ],
)
def test_an_invalid_judge_is_refused_before_the_first_sample(keys: dict[str, str], problem: str):
    with pytest.raises(ConfigError, match=problem):
        Scorer(JudgeReward.model_validate({"type": "judge", "url": "http://h", **keys}))
