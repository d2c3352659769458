"""Send a reply as server-sent events while it is sampled.

Entry points: `Events` writes the events of one response; `sample_streamed` samples and reports
partial responses. The format of the events is in `gateway` (SGLang) and `openai_stream` (OpenAI).
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
    """The streamed answer to one request. Before the first event an error status is possible."""

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
        """Write the end of the stream."""
        assert self._response is not None, "no event was sent"
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def failed(self, error: RlpipeError) -> web.StreamResponse:
        """Write an error as the last event. Raises: the error, if no event was sent yet."""
        if self._response is None:
            raise error
        details = {"message": str(error), "type": type(error).__name__, "code": 503}
        await self.send({"error": details})
        return await self.end()


async def sample_streamed(
    sample: Callable[[Watch], Awaitable[Generation]],
    send: Callable[[Generation], Awaitable[None]],
) -> Generation:
    """Return the response of `sample`, and send partial responses meanwhile.

    Partial responses are skipped while `send` is busy. The complete response is not sent.
    """
    newest: list[Generation] = []
    changed = asyncio.Event()

    def watch(partial: Generation) -> None:
        newest[:] = [partial]
        changed.set()

    sampling = asyncio.ensure_future(sample(watch))
    sampling.add_done_callback(lambda _: changed.set())
    try:
        while True:
            await changed.wait()
            changed.clear()
            if sampling.done():
                return sampling.result()
            await send(newest[0])
    finally:
        sampling.cancel()
