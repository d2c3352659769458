"""Stream one response of `/generate` and return it in the form of a complete answer.

Entry point: `stream`. An event has all tokens so far or, with SGLang's
`incremental_streaming_output`, the tokens since the last event; both are read. A connection that
breaks after the first token gives the partial response with finish reason `abort`, which
`GenerateClient` continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import orjson

from rlpipe.errors import EngineRejected, EngineUnavailable
from rlpipe.rollout.client.http import STREAMED, deadline_exceeded, rejected
from rlpipe.rollout.generation import UNREADABLE, Generation, read_meta

Watch = Callable[[Generation], None]
"""Callback with the partial response each time it has more tokens. Its finish reason is `abort`."""
_LONGEST_EVENT_BYTES = 256 * 1024**2


async def stream(
    client: httpx.AsyncClient,
    url: str,
    *,
    content: bytes,
    headers: dict[str, str] | None,
    deadline_s: float,
    where: str,
    watch: Watch,
) -> httpx.Response:
    """Post a request for one response and return the answer as a list of one row.

    Raises: as `http.call`. A broken connection is EngineUnavailable only before the first token.
    """
    partial = _PartialResponse(url)
    headers = {**(headers or {}), "Content-Type": "application/json"}
    extensions = {STREAMED: True}
    try:
        async with (
            asyncio.timeout(deadline_s),
            client.stream(
                "POST", url, content=content, headers=headers, timeout=None, extensions=extensions
            ) as response,
        ):
            if response.status_code >= 400:
                text = (await response.aread()).decode(errors="replace")
                raise rejected(where, url, response.status_code, text)
            async for event in _events(response.aiter_bytes()):
                partial.add(event, where)
                if not partial.finished:
                    watch(partial.generation())
    except TimeoutError as error:
        raise deadline_exceeded(where, url, deadline_s) from error
    except UNREADABLE as error:
        raise EngineRejected(
            "the answer cannot be read", where=where, found=f"{error!r} in an event of {url}"
        ) from error
    except httpx.TransportError as error:
        partial.broken = f"{error or type(error).__name__} at {url}"
    if not partial.finished and not partial.pairs:
        raise EngineUnavailable(
            "no answer",
            where=where,
            found=partial.broken or f"a stream without an end from {url}",
            do="look at the end of the engine's log",
        )
    return httpx.Response(200, content=orjson.dumps([{"meta_info": partial.meta()}]))


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON object of each server-sent event, except `[DONE]`."""
    unfinished = b""
    async for chunk in chunks:
        *lines, unfinished = (unfinished + chunk).split(b"\n")
        if len(unfinished) > _LONGEST_EVENT_BYTES:
            raise ValueError(f"an event of more than {_LONGEST_EVENT_BYTES} bytes")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                event = orjson.loads(data)
                if not isinstance(event, dict):
                    raise TypeError(f"no object: {event!r:.200}")
                yield event


def _object_at(event: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object under a name; empty if it is missing. Raises: TypeError for another
    type."""
    value = event.get(name) or {}
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {value!r:.200}")
    return value


class _PartialResponse:
    """The response as the events so far report it."""

    def __init__(self, url: str) -> None:
        self.pairs: list[Any] = []
        """[log-prob, token id, ...] of each token."""
        self.top: list[Any] = []
        """The most probable tokens at each position, if the request asks for them."""
        self.broken: str | None = None
        """Text of the error that broke the connection."""
        self._url = url
        self._start_s = time.time()
        self._last_meta: dict[str, Any] = {}

    @property
    def finished(self) -> bool:
        """True if the engine reported a finish reason."""
        return bool(self._last_meta.get("finish_reason"))

    def add(self, event: dict[str, Any], where: str) -> None:
        """Add an event. Raises: EngineRejected if the event is an error; TypeError or ValueError if
        it is malformed."""
        if isinstance(event.get("error"), str):
            error: dict[str, Any] = {"message": event["error"]}
        else:
            error = _object_at(event, "error")
        self._last_meta = _object_at(event, "meta_info")
        reason = _object_at(self._last_meta, "finish_reason")
        # SGLang reports a refused request either as `error` or as an abort with a status code.
        if error or reason.get("status_code"):
            status = error.get("code") if error else reason["status_code"]
            message = str((error or reason).get("message"))
            raise rejected(where, self._url, int(status or 500), message)
        self._extend(
            self._last_meta.get("output_token_logprobs") or [],
            self._last_meta.get("output_top_logprobs") or [],
        )

    def _extend(self, pairs: list[Any], top: list[Any]) -> None:
        # An event that the engine queued may have the newest tokens followed by all tokens again.
        # `output_token_logprobs_length` is the number of tokens so far.
        length = self._last_meta.get("output_token_logprobs_length", len(pairs))
        if top and len(top) != len(pairs):
            raise ValueError(f"{len(top)} top log-probs for {len(pairs)} tokens")
        pairs, top = (some[max(0, len(some) - length) :] for some in (pairs, top))
        first = length - len(pairs)
        if not 0 <= first <= len(self.pairs):
            raise ValueError(f"{len(pairs)} of {length} tokens after {len(self.pairs)}")
        self.pairs[first:] = pairs
        self.top[first:] = top

    def meta(self) -> dict[str, Any]:
        """Return SGLang's `meta_info`. An unfinished response is reported as aborted."""
        meta = {
            **self._last_meta,
            "output_token_logprobs": self.pairs,
            "output_top_logprobs": self.top,
        }
        if self.finished:
            return meta
        meta.pop("routed_experts", None)
        if spans := meta.get("weight_versions"):
            meta["weight_versions"] = _cut(spans, len(self.pairs))
        return {**meta, "finish_reason": {"type": "abort"}}

    def generation(self) -> Generation:
        """Return the partial response."""
        return read_meta(self.meta(), self._url, self._start_s, time.time())


def _cut(spans: list[dict[str, Any]], num_tokens: int) -> list[dict[str, Any]]:
    """Return spans of weight versions that end at the last token."""
    kept = [
        {**span, "end": min(span["end"], num_tokens)}
        for span in spans
        if span["start"] < num_tokens
    ]
    return [*kept[:-1], {**kept[-1], "end": num_tokens}] if kept else []
