"""Rewards over HTTP: a reward server of the user (`remote`) or a model as judge (`judge`).

A request without an answer or with a temporary error (408, 429, 5xx) is sent again after 1, 2, 4,
... 30 s, plus a random part of a second. Any other error status fails at once. The last error is
the error of the row. `reward.sample_timeout_s` limits all tries of a sample together.

Entry points: `make_remote`, `make_judge`, `post`. A judge of whole groups is a user function.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from rlpipe.config.data import JudgeReward, RemoteReward
from rlpipe.errors import ConfigError, RewardError
from rlpipe.system.certificates import certificates
from rlpipe.types import Sample

MAX_PAUSE_S = 30.0
RETRY_STATUSES = (408, 429)
"""Temporary errors besides 5xx."""
KEY_VARIABLE = "RLPIPE_JUDGE_KEY"
"""Environment variable with the judge's API key."""
_QUOTED_CHARACTERS = 300
_MAX_ANSWER_BYTES = 16 * 1024**2


def make_remote(config: RemoteReward) -> Callable[[Sample], Awaitable[Any]]:
    """Return the async function that posts one sample to the reward server."""
    _check_url(config.url)

    async def reward(sample: Sample) -> Any:
        request = {
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "metadata": sample.metadata,
        }
        return await post(config.url, request, tries=config.tries)

    return reward


def make_judge(config: JudgeReward) -> Callable[[Sample], Awaitable[dict[str, float]]]:
    """Return the async function that lets a model judge one sample: `{"reward"}`.

    Raises: ConfigError for a bad URL, prompt format or pattern.
    """
    _check_url(config.url)
    pattern = _compiled_pattern(config.score_pattern)
    judge_prompt(config, Sample("", 0, "", []))  # fails now if the format is wrong
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def reward(sample: Sample) -> dict[str, float]:
        request = {
            "model": config.model,
            "messages": [{"role": "user", "content": judge_prompt(config, sample)}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        url = f"{config.url.rstrip('/')}/chat/completions"
        answer = await post(url, request, tries=config.tries, headers=headers)
        return {"reward": _judge_score(answer, pattern) / config.scale}

    return reward


async def post(url: str, content: Any, *, tries: int, headers: dict[str, str] | None = None) -> Any:
    """POST JSON and return the JSON of the answer, with at most `tries` requests.

    Raises: RewardError if no request succeeds or the answer is not JSON.
    """
    problem = ""
    for number in range(tries):
        if number:
            # The random part spreads the retries of concurrent rows.
            await asyncio.sleep(min(2 ** (number - 1), MAX_PAUSE_S) + random.random())
        try:
            answer = await _post_once(url, content, headers)
        except httpx.RequestError as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if answer.is_success:
            return _json(answer, url)
        problem = f"HTTP {answer.status_code}: {answer.text[:_QUOTED_CHARACTERS]}"
        if answer.status_code < 500 and answer.status_code not in RETRY_STATUSES:
            break
    raise RewardError(
        "the request to the reward server failed",
        where=url,
        found=f"{problem} (try {number + 1} of {tries})",
    )


async def _post_once(url: str, content: Any, headers: dict[str, str] | None) -> httpx.Response:
    """Send one request. Raises: httpx.RequestError, also for an answer above 16 MiB."""
    body = bytearray()
    # No timeout here: reward.sample_timeout_s cancels the whole call.
    async with (
        httpx.AsyncClient(verify=certificates(), timeout=None) as client,
        client.stream("POST", url, json=content, headers=headers) as answer,
    ):
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > _MAX_ANSWER_BYTES:
                raise httpx.DecodingError(f"more than {_MAX_ANSWER_BYTES} bytes")
    return httpx.Response(answer.status_code, content=bytes(body))


def judge_prompt(config: JudgeReward, sample: Sample) -> str:
    """Return the message to the judge for one sample.

    Raises: ConfigError if `config.prompt` is not a format of prompt, response and label.
    """
    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = "\n\n".join(
            f"{message.get('role')}: {message.get('content')}" for message in prompt
        )
    try:
        return config.prompt.format(prompt=prompt, response=sample.response, label=sample.label)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            "not a Python format of prompt, response and label",
            where="reward.function.prompt",
            found=f"{config.prompt!r}: {error!r}",
            expected="text with {prompt}, {response} and {label}; write {{ for a brace",
        ) from error


def _judge_score(answer: Any, pattern: re.Pattern[str]) -> float:
    try:
        text = str(answer["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError) as error:
        raise RewardError(
            "the judge's answer is not a chat completion",
            where="judge",
            found=repr(answer)[:_QUOTED_CHARACTERS],
        ) from error
    # The last match: judges often quote scores before they decide.
    scores = [match.group(1) for match in pattern.finditer(text)]
    try:
        return float(scores[-1])
    except (IndexError, TypeError, ValueError) as error:
        raise RewardError(
            "the judge's answer has no score",
            where="judge",
            found=repr(text[-_QUOTED_CHARACTERS:]),
            expected=pattern.pattern,
        ) from error


def _json(answer: httpx.Response, url: str) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError) as error:
        raise RewardError(
            "the reward server did not answer in JSON",
            where=url,
            found=answer.text[:_QUOTED_CHARACTERS],
        ) from error


def _check_url(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "not a URL", where="reward.function.url", found=url, expected="http://host:port/path"
        )


def _compiled_pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ConfigError(
            "not a regular expression",
            where="reward.function.score_pattern",
            found=f"{text!r}: {error}",
        ) from error
    if pattern.groups < 1:
        raise ConfigError(
            "the pattern has no group",
            where="reward.function.score_pattern",
            found=text,
            expected="one (...)",
        )
    return pattern
