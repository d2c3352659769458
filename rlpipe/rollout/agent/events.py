"""A reply that goes out while it is sampled: server-sent events, one for what has come since the
last was written.

Not here: what the events say (`gateway` for SGLang's, `openai_stream` for OpenAI's).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rlpipe.errors import RlpipeError
from rlpipe.rollout.client.streaming import Watch
from rlpipe.rollout.generation import Generation


class Events:
    """The answer to one request. Until the first event it may still be an error status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    async def send(self, event: dict[str, Any]) -> None:
        """Write one event."""
        if self._response is None:
            self._response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            await self._response.prepare(self._request)
        await self._response.write(f"data: {json.dumps(event)}\n\n".encode())

    async def end(self) -> web.StreamResponse:
        """No more will come."""
        assert self._response is not None, "nothing was sent"
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def failed(self, error: RlpipeError) -> web.StreamResponse:
        """Say so in the stream. Raises: the error, if nothing was sent yet."""
        if self._response is None:
            raise error
        await self.send(
            {"error": {"message": str(error), "type": type(error).__name__, "code": 503}}
        )
        return await self.end()


async def followed(
    sample: Callable[[Watch], Awaitable[Generation]], tell: Callable[[Generation], Awaitable[None]]
) -> Generation:
    """What `sample` comes to. `tell` is given what there is of it as often as it gets that done,
    and not the end."""
    newest: list[Generation] = []
    more = asyncio.Event()

    def watch(part: Generation) -> None:
        newest[:] = [part]
        more.set()

    work = asyncio.ensure_future(sample(watch))
    work.add_done_callback(lambda _: more.set())
    try:
        while True:
            await more.wait()
            more.clear()
            if work.done():
                return work.result()
            await tell(newest[0])
    finally:
        work.cancel()
