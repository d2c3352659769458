"""Post the requests of a `GenerateClient`: batches, retries, the gate and the choice of an engine.

Groups that are requested in one iteration of the event loop with equal sampling parameters share a
request. Each caller gets its own samples only. Without CUDA an engine answers one request of 256
samples several times faster than 256 requests. The router accepts a batch of prompts with one set
of sampling parameters, so samples with different seeds need one request each.

Entry points: `RequestPool` with its `Gate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rlpipe.errors import EngineRejected, EngineUnavailable
from rlpipe.rollout.client.http import Connections, call, read_workers
from rlpipe.rollout.client.image_requests import RequestImages, image_data_of
from rlpipe.rollout.client.request_settings import BatchKey, RequestSettings
from rlpipe.rollout.client.streaming import Watch, stream
from rlpipe.rollout.generation import (
    Generation,
    RoutingWanted,
    check_lengths_and_ids,
    empty_generation,
    no_spans,
    read_generations,
)

_ROUTING_HEADER = "X-SMG-Routing-Key"
_FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 2.0
# The router's answers while an engine is restarted or has left the router. They pass by themselves.
_NO_WORKER = ("no_available_workers", "call_upstream_request_error", "HTTP 502", "HTTP 503")


@dataclass(slots=True)
class PendingRequest:
    """`n` responses to one prompt that a caller waits for."""

    prompt_ids: list[int]
    n: int
    where: str
    stop: asyncio.Event | None
    answer: asyncio.Future[list[Generation]]
    watch: Watch | None = None
    """Called with the partial response while it is sampled. Only for `n` = 1."""
    images: RequestImages | None = None

    @property
    def stopped(self) -> bool:
        """True if the caller does not need more tokens."""
        return self.stop is not None and self.stop.is_set()


Batch = list[PendingRequest]


def fail(batch: Sequence[PendingRequest], error: Exception) -> None:
    """Raise an error in every caller that still waits."""
    for request in batch:
        if not request.answer.done():
            request.answer.set_exception(error)


class Gate:
    """Hold back new requests while weights are pushed. Used by one event loop.

    A hold expires, so a caller that dies during a push does not stop the rollout for good.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._until_s = 0.0
        self._earlier_s = 0.0
        self._changed = asyncio.Event()

    def hold(self, expires_s: float) -> None:
        """Close the gate for `expires_s` seconds or until `release`. A second call only moves the
        end of the hold."""
        now_s = time.monotonic()
        if now_s >= self._until_s:
            self._end_hold()
            self._since_s = now_s
        self._until_s = now_s + expires_s
        self._wake()

    def release(self) -> None:
        """Open the gate. Does nothing if the gate is open."""
        self._end_hold()
        self._wake()

    def held_s(self) -> float:
        """Return the seconds of all holds so far. Deadlines of requests exclude this time."""
        current_s = min(time.monotonic(), self._until_s) - self._since_s
        return self._earlier_s + max(0.0, current_s)

    async def opened(self) -> None:
        """Wait until the gate is open."""
        while (left_s := self._until_s - time.monotonic()) > 0:
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)

    def _end_hold(self) -> None:
        self._earlier_s = self.held_s()
        self._since_s = 0.0
        self._until_s = 0.0

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class DirectRouting:
    """Choose the engine of a request that bypasses the router.

    sglang-router 0.3.2 drops `return_routed_experts`, `image_data` and the sampling parameters of
    `DROPPED_BY_ROUTER`, so such requests go to the engines directly. The router's policy
    (`engine.router`) does not apply to these requests. The router still lists the engines: an
    engine with unknown weights is not listed and gets none.
    """

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    @contextlib.contextmanager
    def engine(
        self, workers: Sequence[dict[str, Any]], routing_key: str | None, avoided: Collection[str]
    ) -> Iterator[str]:
        """Reserve an engine for one request and yield its URL.

        `workers` is the router's list. `avoided` engines are chosen only if no other is healthy.
        A routing key stays with its engine while that engine is listed. Without a key, the engine
        with the fewest running requests is chosen. Raises: EngineUnavailable if none is healthy.
        """
        healthy = [
            str(worker["url"]).rstrip("/") for worker in workers if worker.get("is_healthy", True)
        ]
        urls = sorted(set(healthy) - set(avoided)) or sorted(healthy)
        if not urls:
            raise EngineUnavailable(
                "no engine is available",
                where="the router's workers",
                found=f"{len(workers)}, none healthy",
            )
        if routing_key is None:
            chosen = min(urls, key=lambda url: self._running[url])
        else:
            chosen = max(urls, key=lambda url: _rendezvous_weight(url, routing_key))
        self._running[chosen] += 1
        try:
            yield chosen
        finally:
            self._running[chosen] -= 1


def _rendezvous_weight(url: str, routing_key: str) -> bytes:
    # Rendezvous hashing: an engine that joins or leaves moves only its own keys.
    return hashlib.sha256(f"{routing_key} {url}".encode()).digest()


class RequestPool:
    """Post requests in batches, again after a lost engine, and return each caller its responses."""

    def __init__(
        self,
        router_url: str,
        *,
        vocab_size: int,
        deadline_s: float,
        samples_per_request: int,
        max_connections: int,
        routed_width: int,
    ) -> None:
        """See `GenerateClient` for the parameters."""
        self.router_url = router_url
        self.deadline_s = deadline_s
        self.gate = Gate()
        self.connections = Connections(max_connections)
        self.http = httpx.AsyncClient(transport=self.connections, timeout=None)
        self.has_spans: bool | None = None
        """True if the last answer named the weight version of each token; None: no answer yet."""
        self.num_in_place_pushes = 0
        self._vocab_size = vocab_size
        self._samples_per_request = samples_per_request
        self._routed_width = routed_width
        self._unsent: dict[BatchKey, Batch] = {}
        self._posts: set[asyncio.Task[Any]] = set()
        self._in_flight: dict[int, Batch] = {}
        self._num_posted = 0
        self._direct = DirectRouting()
        self._next_listing: asyncio.Task[list[dict[str, Any]]] | None = None
        self._listing = asyncio.Lock()

    async def aclose(self) -> None:
        """Cancel running requests (their callers get an error) and close the connections."""
        for task in self._posts:
            task.cancel()
        await asyncio.gather(*self._posts, return_exceptions=True)
        await self.http.aclose()

    @property
    def in_flight(self) -> list[Batch]:
        """Batches that an engine is sampling now."""
        return list(self._in_flight.values())

    def add(
        self,
        prompt_ids: list[int],
        settings: RequestSettings,
        n: int,
        where: str,
        stop: asyncio.Event | None,
        watch: Watch | None,
    ) -> asyncio.Future[list[Generation]]:
        """Request `n` responses. The future has them in order."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        request = PendingRequest(prompt_ids, n, where, stop, answer, watch, settings.images)
        key = settings.batch_key()
        if watch is not None:
            # A streamed request has one response and shares no batch.
            self._start(key, [request])
            return request.answer
        if key not in self._unsent:
            self._unsent[key] = []
            # Runs after all callers of this iteration of the event loop have added their requests.
            loop.call_soon(self._send, key)
        self._unsent[key].append(request)
        return request.answer

    async def abort_all(self) -> None:
        """Abort all requests of every engine that the router lists. Raises: EngineError or
        DeadlineExceeded if the router does not answer."""
        where = "cut off"
        body = {"rid": "", "abort_all": True}
        urls = [
            f"{str(worker['url']).rstrip('/')}/abort_request"
            for worker in await self.workers(where)
        ]
        calls = (
            call(self.http, "POST", url, json=body, deadline_s=self.deadline_s, where=where)
            for url in urls
        )
        await asyncio.gather(*calls, return_exceptions=True)

    async def workers(self, where: str) -> list[dict[str, Any]]:
        """Return the engines that the router lists."""
        url = f"{self.router_url}/workers"
        answer = await call(self.http, "GET", url, deadline_s=self.deadline_s, where=where)
        return read_workers(answer, where)

    async def _listed(self) -> list[dict[str, Any]]:
        """Return the engines of a listing that begins after this call.

        All requests that wait for one share it. With a listing for each request, their cost grew
        with the square of the engines.
        """
        if self._next_listing is None:
            self._next_listing = asyncio.create_task(self._list_next())
            self._posts.add(self._next_listing)
            self._next_listing.add_done_callback(self._end_listing)
        # The caller may be cancelled; others still wait.
        return await asyncio.shield(self._next_listing)

    async def _list_next(self) -> list[dict[str, Any]]:
        async with self._listing:
            # Later requests need a later listing: an engine may have left meanwhile.
            self._next_listing = None
            return await self.workers("choice of an engine")

    def _end_listing(self, listing: asyncio.Task[Any]) -> None:
        self._posts.discard(listing)
        if not listing.cancelled():
            listing.exception()  # without a caller that still waits, asyncio would log it

    def _send(self, key: BatchKey) -> None:
        """Split the collected requests into batches and start them."""
        batch: Batch = []
        num_samples = 0
        for request in self._unsent.pop(key):
            if batch and num_samples + request.n > self._samples_per_request:
                self._start(key, batch)
                batch = []
                num_samples = 0
            batch.append(request)
            num_samples += request.n
        self._start(key, batch)

    def _start(self, key: BatchKey, batch: Batch) -> None:
        task = asyncio.create_task(self._answer(key, batch))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

        def cancel_if_unwanted(_: asyncio.Future[list[Generation]]) -> None:
            # Callers may stop waiting at a deadline. Cancelling closes the connection.
            if all(request.answer.done() for request in batch):
                task.cancel()

        for request in batch:
            request.answer.add_done_callback(cancel_if_unwanted)

    async def _answer(self, key: BatchKey, batch: Batch) -> None:
        """Post one batch and give each caller its responses, or the error."""
        try:
            generations = await self._post(key, batch)
        except EngineRejected as error:
            if len(batch) > 1:
                # One bad group makes the engine refuse the batch: post the groups one by one.
                await asyncio.gather(*(self._answer(key, [request]) for request in batch))
            else:
                fail(batch, error)
        except asyncio.CancelledError:
            closed = EngineUnavailable(
                "the client was closed before the engine answered", where=batch[0].where
            )
            fail(batch, closed)
            raise
        except Exception as error:  # noqa: BLE001 - any error must reach the waiting callers
            fail(batch, error)
        else:
            start = 0
            for request in batch:
                if not request.answer.done():
                    request.answer.set_result(generations[start : start + request.n])
                start += request.n

    async def _post(self, key: BatchKey, batch: Batch) -> list[Generation]:
        routing = self._routing_wanted(key.routed_from, batch)
        where = batch[0].where
        if len(batch) > 1:
            where = f"{where} and {len(batch) - 1} more groups"
        start_s = time.time()
        pushes_before = self.num_in_place_pushes
        num_samples = sum(request.n for request in batch)
        answer = await self._post_until_deadline(_body(key, batch, routing), key, where, batch)
        if answer is None:
            return [empty_generation(self.router_url)] * num_samples
        generations = read_generations(
            answer, num_samples, self.router_url, start_s, where, routing
        )
        max_new_tokens = json.loads(key.sampling).get("max_new_tokens")
        check_lengths_and_ids(generations, self._vocab_size, max_new_tokens, where)
        self.has_spans = all(generation.has_spans for generation in generations)
        # Without spans, tokens from before and after an in-place push cannot be told apart.
        if pushes_before != self.num_in_place_pushes and not self.has_spans:
            raise no_spans(where)
        return generations

    def _routing_wanted(self, routed_from: int | None, batch: Batch) -> RoutingWanted | None:
        if routed_from is None:
            return None
        assert self._routed_width, "the client has no routed_width"
        prompt_lengths = [len(request.prompt_ids) for request in batch for _ in range(request.n)]
        return RoutingWanted(self._routed_width, routed_from, prompt_lengths)

    async def _post_until_deadline(
        self, body: bytes, key: BatchKey, where: str, batch: Batch
    ) -> httpx.Response | None:
        """Post a request; repeat it after a broken connection and while the router has no engine.

        A dead engine is replaced meanwhile. None: every caller stopped before the request was
        posted. Raises: EngineRejected, DeadlineExceeded; EngineUnavailable with the last failure.
        """
        end_s = time.monotonic() + self.deadline_s - self.gate.held_s()
        pause_s = _FIRST_PAUSE_S
        lost_engines: set[str] = set()
        while True:
            # Also before a repetition: the engine may have been lost during a push.
            await self.gate.opened()
            if all(request.stopped for request in batch):
                return None
            try:
                with self._counted(batch):
                    return await self._post_once(body, key, lost_engines, where, batch[0].watch)
            except (EngineUnavailable, EngineRejected) as error:
                temporary = isinstance(error, EngineUnavailable) or any(
                    sign in str(error.found) for sign in _NO_WORKER
                )
                if not temporary:
                    raise
                if time.monotonic() + pause_s > end_s + self.gate.held_s():
                    raise EngineUnavailable(
                        "no engine answered", where=where, found=error.found, do=error.do
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _post_once(
        self, body: bytes, key: BatchKey, lost_engines: set[str], where: str, watch: Watch | None
    ) -> httpx.Response:
        """Post to the router, or to an engine if the router drops a part of the request. An engine
        without an answer is added to `lost_engines`."""
        if not key.bypasses_router:
            headers = {_ROUTING_HEADER: key.routing_key} if key.routing_key else None
            return await self._call(f"{self.router_url}/generate", body, headers, where, watch)
        workers = await self._listed()
        with self._direct.engine(workers, key.routing_key, lost_engines) as url:
            try:
                return await self._call(f"{url}/generate", body, None, where, watch)
            except EngineUnavailable:
                lost_engines.add(url)
                raise

    async def _call(
        self, url: str, body: bytes, headers: dict[str, str] | None, where: str, watch: Watch | None
    ) -> httpx.Response:
        options: dict[str, Any] = {
            "content": body,
            "headers": headers,
            "deadline_s": self.deadline_s,
            "where": where,
        }
        if watch is not None:
            return await stream(self.http, url, watch=watch, **options)
        return await call(self.http, "POST", url, **options)

    @contextlib.contextmanager
    def _counted(self, batch: Batch) -> Iterator[None]:
        self._num_posted += 1
        number = self._num_posted
        self._in_flight[number] = batch
        try:
            yield
        finally:
            del self._in_flight[number]


def _body(key: BatchKey, batch: Batch, routing: RoutingWanted | None) -> bytes:
    """Return the JSON body of a batch. The sampling parameters are encoded already."""
    streamed = batch[0].watch is not None
    if streamed:
        prompts: list[Any] = batch[0].prompt_ids
    else:
        prompts = [request.prompt_ids for request in batch for _ in range(request.n)]
    experts = ""
    if routing is not None:
        experts = (
            f', "return_routed_experts": true, "routed_experts_start_len": {routing.routed_from}'
        )
    images = ""
    if key.has_images:
        of_rows = [request.images for request in batch for _ in range(request.n) if request.images]
        data = of_rows[0].data if streamed else image_data_of(of_rows)
        images = f', "image_data": {data}'
    top_log_probs = ""
    if key.num_top_log_probs:
        top_log_probs = f', "top_logprobs_num": {key.num_top_log_probs}'
    body = (
        f'{{"input_ids": {json.dumps(prompts)}, "sampling_params": {key.sampling}, '
        f'"return_logprob": true, "stream": {json.dumps(streamed)}'
        f"{experts}{top_log_probs}{images}}}"
    )
    return body.encode()
