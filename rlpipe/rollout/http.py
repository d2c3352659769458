"""One HTTP call with a deadline, and its failures as errors of ours; and the connections of a client that has hundreds of them.

Not a client: it never retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
from yarl import URL

from rlpipe.errors import DeadlineExceeded, EngineRejected, EngineUnavailable

STREAMED = "rlpipe.streamed"
"""Extension of an httpx request whose answer is to be read piece by piece."""
_SHOWN_CHARACTERS = 500


class Connections(httpx.AsyncBaseTransport):
    """Connections of an httpx client, kept by aiohttp.

    httpx's own pool looks at every connection for every request: with 500 requests in flight that is most of the sampler's time.
    Bodies come whole, unless a request has the extension `STREAMED`. No redirects, no proxies. Made anywhere, used by one event
    loop.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises: httpx.TransportError if there is no connection, or it broke."""
        session, body = self._opened(), await request.aread()
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "accept-encoding")}
        url = URL(str(request.url), encoded=True)
        keep: dict[str, Any] = {"data": body, "headers": headers, "allow_redirects": False}
        try:
            if request.extensions.get(STREAMED):
                begun = await session.request(request.method, url, **keep)
                return httpx.Response(begun.status, headers=list(begun.headers.items()), stream=_Body(begun), request=request)
            async with session.request(request.method, url, **keep) as answer:
                return httpx.Response(
                    answer.status, headers=list(answer.headers.items()), content=await answer.read(), request=request
                )
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.TransportError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections)
            no_limit = aiohttp.ClientTimeout(total=None, sock_connect=None)
            plain = {"Accept-Encoding": "identity"}
            self._session = aiohttp.ClientSession(connector=connector, timeout=no_limit, headers=plain)
        return self._session


class _Body(httpx.AsyncByteStream):
    """What comes of an answer, as it comes. Closed before its end it takes the connection with it, and the server notices."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._answer.content.iter_any():
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.ReadError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        self._answer.release() if self._answer.content.at_eof() else self._answer.close()


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
            "no answer", where=where, found=f"{error or type(error).__name__} at {url}", do="look at the end of its log"
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
