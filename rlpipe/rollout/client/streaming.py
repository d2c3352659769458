"""One request to `/generate` whose answer comes as it is sampled: server-sent events, put together
to what a whole answer says.

Each event has all tokens so far, or (SGLang's `incremental_streaming_output`) those since the last
one; either is read. A connection that breaks after the first token leaves what there was of the
response, as an abort does: who asked goes on from it.

Not here: asking again (`client`), what a person's client is told of it (`openai_stream`).
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
"""Called with what there is of a response, each time there is more; its finish reason is `abort`
until it is finished."""
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
    """Post a request for one response; its answer in the form that a whole one has (a list of one).

    Raises: as `http.call`; a connection that breaks is EngineUnavailable only before the first
    token.
    """
    row = _Row(url)
    keep = {"content": content, "headers": {**(headers or {}), "Content-Type": "application/json"}}
    try:
        async with (
            asyncio.timeout(deadline_s),
            client.stream("POST", url, timeout=None, extensions={STREAMED: True}, **keep) as got,
        ):
            if got.status_code >= 400:
                raise rejected(
                    where, url, got.status_code, (await got.aread()).decode(errors="replace")
                )
            async for event in _events(got.aiter_bytes()):
                row.add(event, where)
                if not row.finished:
                    watch(row.generation())
    except TimeoutError as error:
        raise deadline_exceeded(where, url, deadline_s) from error
    except UNREADABLE as error:
        raise EngineRejected(
            "the answer cannot be read", where=where, found=f"{error!r} in an event of {url}"
        ) from error
    except httpx.TransportError as error:
        row.broken = f"{error or type(error).__name__} at {url}"
    if not row.finished and not row.pairs:
        found = row.broken or f"a stream without an end from {url}"
        raise EngineUnavailable(
            "no answer", where=where, found=found, do="look at the end of its log"
        )
    return httpx.Response(200, content=orjson.dumps([{"meta_info": row.meta()}]))


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each event, up to `[DONE]`."""
    held = b""
    async for piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        if len(held) > _LONGEST_EVENT_BYTES:
            raise ValueError(f"an event of more than {_LONGEST_EVENT_BYTES} bytes")
        for line in lines:
            said = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if said and said != b"[DONE]":
                event = orjson.loads(said)
                if not isinstance(event, dict):
                    raise TypeError(f"no object: {event!r:.200}")
                yield event


def _part(event: dict[str, Any], name: str) -> dict[str, Any]:
    """An object in an object, empty if it is not there. Raises: TypeError if it is something
    else."""
    part = event.get(name) or {}
    if not isinstance(part, dict):
        raise TypeError(f"{name} is {part!r:.200}")
    return part


class _Row:
    """What the events so far say of the response."""

    def __init__(self, url: str) -> None:
        self.pairs: list[Any] = []
        self.broken: str | None = None
        self._url, self._start_s = url, time.time()
        self._last: dict[str, Any] = {}

    @property
    def finished(self) -> bool:
        """Has the engine said how it ended?"""
        return bool(self._last.get("finish_reason"))

    def add(self, event: dict[str, Any], where: str) -> None:
        """Take an event in. Raises: EngineRejected if it is an error; TypeError or ValueError if it
        cannot be read."""
        error = (
            {"message": event["error"]}
            if isinstance(event.get("error"), str)
            else _part(event, "error")
        )
        self._last = _part(event, "meta_info")
        reason = _part(self._last, "finish_reason")
        if error or reason.get("status_code"):
            status = (error or reason).get("code" if error else "status_code") or 500
            raise rejected(where, self._url, int(status), str((error or reason).get("message")))
        self._extend(self._last.get("output_token_logprobs") or [])

    def _extend(self, more: list[Any]) -> None:
        """Put an event's tokens where they belong: what the engine queued may be the newest ones,
        and then all of them again."""
        length = self._last.get("output_token_logprobs_length", len(more))
        more = more[max(0, len(more) - length) :]
        first = length - len(more)
        if not 0 <= first <= len(self.pairs):
            raise ValueError(f"{len(more)} of {length} tokens after {len(self.pairs)}")
        self.pairs[first:] = more

    def meta(self) -> dict[str, Any]:
        """SGLang's `meta_info`; of a response that is not finished as if it had been aborted
        here."""
        meta = {**self._last, "output_token_logprobs": self.pairs}
        if self.finished:
            return meta
        meta.pop("routed_experts", None)
        if spans := meta.get("weight_versions"):
            meta["weight_versions"] = _cut(spans, len(self.pairs))
        return {**meta, "finish_reason": {"type": "abort"}}

    def generation(self) -> Generation:
        """What there is."""
        return read_meta(self.meta(), self._url, self._start_s, time.time())


def _cut(spans: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Spans of weight versions that end where the tokens end."""
    kept = [{**span, "end": min(span["end"], tokens)} for span in spans if span["start"] < tokens]
    return [*kept[:-1], {**kept[-1], "end": tokens}] if kept else []
