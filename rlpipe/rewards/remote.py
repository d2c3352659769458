"""Rewards that somebody else computes over HTTP: a server of yours (`remote`), or a model that
judges (`judge`).

A post that gets no answer, or one that says "later" (408, 429, 5xx), is sent again after 1, 2, 4
... 30 s and up to a second more by chance; any other error status stands at once. What stands is
the error of the row. The deadline is the caller's (`reward.sample_timeout_s`), so with few tries
and a long one the server has all of it.

Not here: a judge of whole groups; write that as a function of your own.
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

LONGEST_PAUSE_S = 30.0
LATER = (408, 429)
KEY_VARIABLE = "RLPIPE_JUDGE_KEY"
_SHOWN_CHARACTERS = 300
_LARGEST_ANSWER_BYTES = 16 * 1024**2


def make_remote(config: RemoteReward) -> Callable[[Sample], Awaitable[Any]]:
    """The async function that asks the server of one sample."""
    _check_url(config.url)

    async def reward(sample: Sample) -> Any:
        asked = {
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "metadata": sample.metadata,
        }
        return await post(config.url, asked, tries=config.tries)

    return reward


def make_judge(config: JudgeReward) -> Callable[[Sample], Awaitable[dict[str, float]]]:
    """The async function that has one sample judged: `{"reward"}`. Raises: ConfigError for a format
    or pattern that is none."""
    _check_url(config.url)
    pattern = _pattern(config.score_pattern)
    filled(config, Sample("", 0, "", []))
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}

    async def reward(sample: Sample) -> dict[str, float]:
        asked = {
            "model": config.model,
            "messages": [{"role": "user", "content": filled(config, sample)}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        answer = await post(
            f"{config.url.rstrip('/')}/chat/completions", asked, tries=config.tries, headers=headers
        )
        return {"reward": _judged(answer, pattern) / config.scale}

    return reward


async def post(url: str, content: Any, *, tries: int, headers: dict[str, str] | None = None) -> Any:
    """POST JSON and return the JSON of the answer, trying again as the module says. Raises:
    RewardError."""
    said = ""
    for number in range(tries):
        if number:
            await asyncio.sleep(min(2 ** (number - 1), LONGEST_PAUSE_S) + random.random())
        try:
            answer = await _posted(url, content, headers)
        except httpx.RequestError as error:
            said = f"{type(error).__name__}: {error}"
            continue
        if answer.is_success:
            return _json(answer, url)
        said = f"HTTP {answer.status_code}: {answer.text[:_SHOWN_CHARACTERS]}"
        if answer.status_code < 500 and answer.status_code not in LATER:
            break
    raise RewardError(
        "the reward's server did not answer as it should",
        where=url,
        found=f"{said} (try {number + 1} of {tries})",
    )


async def _posted(url: str, content: Any, headers: dict[str, str] | None) -> httpx.Response:
    """Raises: httpx.RequestError, also for an answer that is larger than any reward."""
    body = bytearray()
    async with (
        httpx.AsyncClient(verify=certificates(), timeout=None) as client,
        client.stream("POST", url, json=content, headers=headers) as answer,
    ):
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > _LARGEST_ANSWER_BYTES:
                raise httpx.DecodingError(f"more than {_LARGEST_ANSWER_BYTES} bytes")
    return httpx.Response(answer.status_code, content=bytes(body))


def filled(config: JudgeReward, sample: Sample) -> str:
    """The judge's message for one sample. Raises: ConfigError if `prompt` is no format of the
    three."""
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


def _judged(answer: Any, pattern: re.Pattern[str]) -> float:
    try:
        text = str(answer["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError) as error:
        raise RewardError(
            "not a chat completion", where="judge", found=repr(answer)[:_SHOWN_CHARACTERS]
        ) from error
    found = [match.group(1) for match in pattern.finditer(text)]
    try:
        return float(found[-1])
    except (IndexError, TypeError, ValueError) as error:
        raise RewardError(
            "the judge gave no score",
            where="judge",
            found=repr(text[-_SHOWN_CHARACTERS:]),
            expected=pattern.pattern,
        ) from error


def _json(answer: httpx.Response, url: str) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError) as error:
        raise RewardError(
            "the reward's server did not answer in JSON",
            where=url,
            found=answer.text[:_SHOWN_CHARACTERS],
        ) from error


def _check_url(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "not a URL", where="reward.function.url", found=url, expected="http://host:port/path"
        )


def _pattern(text: str) -> re.Pattern[str]:
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
