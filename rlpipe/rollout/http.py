"""One HTTP call with a deadline, and its failures as errors of ours. Not a client: it keeps no state and never retries."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from rlpipe.errors import DeadlineExceeded, EngineRejected, EngineUnavailable

_SHOWN_CHARACTERS = 500


async def call(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    deadline_s: float,
    where: str,
    json: Any = None,
    content: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """Send one request and return its answer, whose status is below 400.

    `where` names who waits for what and opens every error's message; `content` is a JSON body already encoded.
    Raises: EngineUnavailable (no connection, or it broke), EngineRejected (status ≥ 400), DeadlineExceeded.
    """
    headers = {**(headers or {}), **({"Content-Type": "application/json"} if content is not None else {})}
    try:
        async with asyncio.timeout(deadline_s):
            answer = await client.request(method, url, json=json, content=content, headers=headers, timeout=None)
    except TimeoutError as error:
        raise deadline_exceeded(where, url, deadline_s) from error
    except httpx.TransportError as error:
        raise EngineUnavailable(
            "no answer", where=where, found=f"{type(error).__name__}: {error} at {url}", do="look at the end of its log"
        ) from error
    if answer.status_code >= 400:
        raise rejected(where, url, answer.status_code, answer.text)
    return answer


def deadline_exceeded(where: str, url: str, deadline_s: float) -> DeadlineExceeded:
    """The error of a wait that was given `deadline_s` seconds."""
    return DeadlineExceeded(
        "no answer in time", where=where, found=f"nothing from {url}", expected=f"an answer within {deadline_s:g} s"
    )


def rejected(where: str, url: str, status: int, text: str) -> EngineRejected:
    """The error of an answer with an error status."""
    return EngineRejected("the request was refused", where=where, found=f"HTTP {status} from {url}: {text[:_SHOWN_CHARACTERS]}")
