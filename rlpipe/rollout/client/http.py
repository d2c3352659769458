"""Make HTTP calls to engines and routers with a deadline and named errors.

Entry points: `call` (async) and `fetch` (blocking), neither of which retries; `Connections`, the
connection pool of a client with hundreds of requests in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

import aiohttp
import httpx
from yarl import URL

from rlpipe.errors import DeadlineExceeded, EngineRejected, EngineUnavailable
from rlpipe.system.certificates import certificates

STREAMED = "rlpipe.streamed"
"""Extension of an httpx request that streams the body of its answer."""
LARGEST_ANSWER_BYTES = 4 * 1024**3
"""Upper limit for an answer. A larger answer does not come from an engine."""
_SHOWN_CHARACTERS = 500


class Connections(httpx.AsyncBaseTransport):
    """Transport of an httpx client that uses aiohttp's connection pool.

    A body is read completely unless the request has the extension `STREAMED`. Redirects are not
    followed and proxies are not used. Used by one event loop.
    """

    # httpx's own pool scans every connection for every request. With 500 requests in flight this
    # took most of the sampler's time.

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self._earlier: list[aiohttp.ClientSession] = []
        """Sessions with fewer connections. Their requests finish."""

    def grow(self, max_connections: int) -> None:
        """Allow this number of connections for new requests, if it is larger than before."""
        if max_connections > self._max_connections:
            self._max_connections = max_connections
            if self._session is not None:
                self._earlier.append(self._session)
                self._session = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Raises: httpx.TransportError if the connection fails or breaks;
        httpx.DecodingError for a body that is too large."""
        session = self._client_session()
        body = await request.aread()
        # aiohttp sets these two itself.
        headers = {
            name: value
            for name, value in request.headers.items()
            if name not in ("host", "accept-encoding")
        }
        # httpx has percent-encoded the URL; yarl would encode it a second time.
        url = URL(str(request.url), encoded=True)
        options: dict[str, Any] = {"data": body, "headers": headers, "allow_redirects": False}
        try:
            if request.extensions.get(STREAMED):
                answer = await session.request(request.method, url, **options)
                return httpx.Response(
                    answer.status,
                    headers=list(answer.headers.items()),
                    stream=_StreamedBody(answer),
                    request=request,
                )
            async with session.request(request.method, url, **options) as answer:
                content = await _read_all(answer)
                return httpx.Response(
                    answer.status,
                    headers=list(answer.headers.items()),
                    content=content,
                    request=request,
                )
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.TransportError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        """Close all connections."""
        for session in (*self._earlier, self._session):
            if session is not None:
                await session.close()

    def _client_session(self) -> aiohttp.ClientSession:
        # Created on first use: aiohttp binds a session to the running event loop.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                headers={"Accept-Encoding": "identity"},
            )
        return self._session


async def _read_all(answer: aiohttp.ClientResponse) -> bytes:
    chunks = []
    size_bytes = 0
    async for chunk in answer.content.iter_any():
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > LARGEST_ANSWER_BYTES:
            raise httpx.DecodingError(f"more than {LARGEST_ANSWER_BYTES} bytes")
    return b"".join(chunks)


class _StreamedBody(httpx.AsyncByteStream):
    """Body of an answer in chunks, as the server sends them."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._answer.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise httpx.ReadError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        if self._answer.content.at_eof():
            self._answer.release()
        else:
            # Closing the connection makes the server notice that the client has stopped reading.
            self._answer.close()


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
    """Send one request and return the answer, which has a 2xx status.

    `where` names the caller's operation in errors; `content` is an encoded JSON body. Raises:
    EngineUnavailable (the connection failed or broke), EngineRejected (another status, or an
    unreadable body), DeadlineExceeded.
    """
    headers = dict(headers or {})
    if content is not None:
        headers["Content-Type"] = "application/json"
    try:
        async with asyncio.timeout(deadline_s):
            answer = await client.request(
                method, url, json=json, content=content, headers=headers, timeout=None
            )
    except TimeoutError as error:
        raise deadline_exceeded(where, url, deadline_s) from error
    except httpx.TransportError as error:
        raise EngineUnavailable(
            "no answer",
            where=where,
            found=f"{error or type(error).__name__} at {url}",
            do="look at the end of the server's log",
        ) from error
    except httpx.DecodingError as error:
        raise EngineRejected(
            "the answer cannot be read", where=where, found=f"{error} from {url}"
        ) from error
    if not answer.is_success:
        raise rejected(where, url, answer.status_code, answer.text)
    return answer


def fetch(method: str, url: str, *, deadline_s: float, json: Any = None) -> httpx.Response:
    """Send one request, block, and return the answer of any status.

    Raises: httpx.TransportError (httpx.ReadTimeout after `deadline_s` in total, also for a server
    that never stops sending); httpx.DecodingError for an unreadable body.
    """
    end_s = time.monotonic() + deadline_s
    body = bytearray()
    with (
        httpx.Client(timeout=deadline_s, verify=certificates()) as client,
        client.stream(method, url, json=json) as answer,
    ):
        for chunk in answer.iter_bytes():
            body += chunk
            # httpx's timeout restarts with every chunk.
            if time.monotonic() > end_s:
                raise httpx.ReadTimeout(f"no end after {deadline_s:g} s and {len(body)} bytes")
    return httpx.Response(answer.status_code, content=bytes(body))


def read_workers(
    answer: httpx.Response, where: str, keys: Collection[str] = ("url",)
) -> list[dict[str, Any]]:
    """Return the engines in a router's answer to `/workers`. Raises: EngineRejected if an engine
    lacks one of `keys`."""
    try:
        workers = list(answer.json()["workers"])
        if all(
            {*keys} <= {*worker} and str(worker["url"]).startswith(("http://", "https://"))
            for worker in workers
        ):
            return workers
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        found = f"{answer.text[:_SHOWN_CHARACTERS]} ({error!r})"
        raise EngineRejected(
            "the router's answer cannot be read", where=where, found=found
        ) from error
    raise EngineRejected(
        "the answer is not a router's list of engines",
        where=where,
        found=workers,
        expected=f"{', '.join(keys)} of each",
    )


def deadline_exceeded(where: str, url: str, deadline_s: float) -> DeadlineExceeded:
    """Return the error of a call without an answer within `deadline_s` seconds."""
    return DeadlineExceeded(
        "no answer in time",
        where=where,
        found=f"nothing from {url}",
        expected=f"an answer within {deadline_s:g} s",
    )


def rejected(where: str, url: str, status: int, text: str) -> EngineRejected:
    """Return the error of an answer with an error status."""
    return EngineRejected(
        "the request was refused",
        where=where,
        found=f"HTTP {status} from {url}: {text[:_SHOWN_CHARACTERS]}",
    )
