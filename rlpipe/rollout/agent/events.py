"""Send a reply as server-sent events while it is sampled.

Entry points: `Events` writes the events of one response; `sample_streamed` samples and reports
partial responses. The format of the events is that of each API.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from rlpipe.errors import RlpipeError
from rlpipe.rollout.agent.api_errors import error_body
from rlpipe.rollout.client.streaming import Watch
from rlpipe.rollout.generation import Generation


class Events:
    """The streamed answer to one request. Before the first event an error status is possible."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str] | None = None,
        *,
        with_types: bool = False,
    ) -> None:
        """`with_types`: the events are named by their `type`, and the stream has no `[DONE]`."""
        self._request = request
        self._headers = dict(headers or {})
        self._with_types = with_types
        self._response: web.StreamResponse | None = None
        self._writing = asyncio.Lock()

    async def send(self, event: dict[str, Any]) -> None:
        """Write one event."""
        # Several replies of one request write to the stream.
        async with self._writing:
            if self._response is None:
                response = web.StreamResponse(
                    headers={
                        **self._headers,
                        "Content-Type": "text/event-stream",
                        "Cache-Control": "no-cache",
                    }
                )
                await response.prepare(self._request)
                self._response = response
            name = f"event: {event['type']}\n" if self._with_types else ""
            await self._response.write(f"{name}data: {json.dumps(event)}\n\n".encode())

    async def end(self) -> web.StreamResponse:
        """Write the end of the stream."""
        assert self._response is not None, "no event was sent"
        if not self._with_types:
            await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def failed(self, error: RlpipeError) -> web.StreamResponse:
        """Write an error as the last event. Raises: the error, if no event was sent yet."""
        if self._response is None:
            raise error
        await self.send(error_body(self._request.path, 503, error, streamed=True))
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
