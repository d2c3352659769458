"""One HTTP call with a deadline, and its failures as errors of ours; and the connections of a
client that has hundreds of them.

Not a client: it never retries.
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
"""Extension of an httpx request whose answer is to be read piece by piece."""
LARGEST_ANSWER_BYTES = 4 * 1024**3
"""No answer is larger: with more, something else than an engine answers."""
_SHOWN_CHARACTERS = 500


class Connections(httpx.AsyncBaseTransport):
    """Connections of an httpx client, kept by aiohttp.

    httpx's own pool looks at every connection for every request: with 500 requests in flight that
    is most of the sampler's time. Bodies come whole, unless a request has the extension `STREAMED`.
    No redirects, no proxies. Made anywhere, used by one event loop.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises: httpx.TransportError if there is no connection, or it broke; httpx.DecodingError
        for a body that is none."""
        session = self._opened()
        body = await request.aread()
        headers = {
            name: value
            for name, value in request.headers.items()
            if name not in ("host", "accept-encoding")
        }
        url = URL(str(request.url), encoded=True)
        keep: dict[str, Any] = {"data": body, "headers": headers, "allow_redirects": False}
        try:
            if request.extensions.get(STREAMED):
                begun = await session.request(request.method, url, **keep)
                return httpx.Response(
                    begun.status,
                    headers=list(begun.headers.items()),
                    stream=_Body(begun),
                    request=request,
                )
            async with session.request(request.method, url, **keep) as answer:
                content = await _whole(answer)
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
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections)
            no_limit = aiohttp.ClientTimeout(total=None, sock_connect=None)
            plain = {"Accept-Encoding": "identity"}
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=no_limit, headers=plain
            )
        return self._session


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    pieces = []
    size_bytes = 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size_bytes += len(piece)
        if size_bytes > LARGEST_ANSWER_BYTES:
            raise httpx.DecodingError(f"more than {LARGEST_ANSWER_BYTES} bytes")
    return b"".join(pieces)


class _Body(httpx.AsyncByteStream):
    """What comes of an answer, as it comes. Closed before its end it takes the connection with it,
    and the server notices."""

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
    """Send one request and return its answer, whose status is 2xx.

    `where` names who waits for what and opens every error's message; `content` is a JSON body
    already encoded. Raises: EngineUnavailable (no connection, or it broke), EngineRejected (another
    status, or no body), DeadlineExceeded.
    """
    headers = {
        **(headers or {}),
        **({"Content-Type": "application/json"} if content is not None else {}),
    }
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
            do="look at the end of its log",
        ) from error
    except httpx.DecodingError as error:
        raise EngineRejected(
            "the answer cannot be read", where=where, found=f"{error} from {url}"
        ) from error
    if not answer.is_success:
        raise rejected(where, url, answer.status_code, answer.text)
    return answer


def fetch(method: str, url: str, *, deadline_s: float, json: Any = None) -> httpx.Response:
    """`call` for those who wait: one request and its answer of any status, also from one who never
    stops answering.

    Raises: httpx.TransportError (httpx.ReadTimeout also after `deadline_s` in all);
    httpx.DecodingError for a body that is none.
    """
    end_s = time.monotonic() + deadline_s
    body = bytearray()
    with (
        httpx.Client(timeout=deadline_s, verify=certificates()) as client,
        client.stream(method, url, json=json) as answer,
    ):
        for piece in answer.iter_bytes():
            body += piece
            if time.monotonic() > end_s:
                raise httpx.ReadTimeout(f"no end after {deadline_s:g} s and {len(body)} bytes")
    return httpx.Response(answer.status_code, content=bytes(body))


def read_workers(
    answer: httpx.Response, where: str, keys: Collection[str] = ("url",)
) -> list[dict[str, Any]]:
    """The engines in a router's answer to `/workers`. Raises: EngineRejected if one of them is
    without one of `keys`."""
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
        "not a router's list of engines",
        where=where,
        found=workers,
        expected=f"{', '.join(keys)} of each",
    )


def deadline_exceeded(where: str, url: str, deadline_s: float) -> DeadlineExceeded:
    """The error of a wait that was given `deadline_s` seconds."""
    return DeadlineExceeded(
        "no answer in time",
        where=where,
        found=f"nothing from {url}",
        expected=f"an answer within {deadline_s:g} s",
    )


def rejected(where: str, url: str, status: int, text: str) -> EngineRejected:
    """The error of an answer with an error status."""
    return EngineRejected(
        "the request was refused",
        where=where,
        found=f"HTTP {status} from {url}: {text[:_SHOWN_CHARACTERS]}",
    )
