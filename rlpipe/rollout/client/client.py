"""`GenerateClient`: token ids in, sampled token ids with log-probabilities out, through the
sglang-router.

Groups asked for in the same turn of the event loop, with equal sampling parameters, share a request
(an engine without CUDA answers one request of 256 samples several times faster than 256 requests);
every caller still gets its own samples only. The router takes a batch of prompts with one set of
sampling parameters, so samples with seeds of their own go one by one.

What an engine aborts goes on by itself, from prompt and tokens so far, once the gate is open: a
push of weights in the middle only shows as another weight version in the response. Only who set
`stop` gets back what there is.

Not here: what is asked (`generate`), how many groups at a time (`sampler`), or control of an engine
(`engines.sglang.admin`), but for one thing: `cut_off` tells the engines behind the router to abort.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Collection, Iterator, Sequence
from typing import Any, Literal, TypeVar

import httpx

from rlpipe.errors import (
    DataError,
    DeadlineExceeded,
    EngineError,
    EngineRejected,
    EngineUnavailable,
)
from rlpipe.rollout.client.asked import Asked, Key, Together, fail
from rlpipe.rollout.client.direct import Direct
from rlpipe.rollout.client.gate import Gate
from rlpipe.rollout.client.http import Connections, call, deadline_exceeded, read_workers
from rlpipe.rollout.client.streaming import Watch, stream
from rlpipe.rollout.generation import (
    Generation,
    RoutingWanted,
    check_asked,
    joined,
    no_spans,
    nothing_yet,
    read_generations,
    settled,
)

HoldMode = Literal["drain", "abort", "in_place"]
Answer = TypeVar("Answer")

_ROUTING_HEADER = "X-SMG-Routing-Key"
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_ABORT_AGAIN_S = 0.3
_POLL_S = 0.02
_NO_WORKER = ("no_available_workers", "call_upstream_request_error", "HTTP 502", "HTTP 503")


class GenerateClient:
    """Made and used by one event loop; close it with `aclose()` or use it as an async context
    manager."""

    def __init__(
        self,
        router_url: str,
        *,
        vocab_size: int,
        deadline_s: float,
        samples_per_request: int = 1,
        max_connections: int = 512,
        end_ids: Collection[int] = (),
        routed_width: int = 0,
    ) -> None:
        """`vocab_size`: token ids at or above it are refused here, because one of them ends the
        whole engine.

        `deadline_s` is for one call of `generate`, waiting in the engine included, but not while
        the gate is held. `samples_per_request`: groups are put together up to so many samples; a
        larger group is still one request. `end_ids`: the model's end-of-sequence tokens, to know
        whether a response that was aborted had just ended. `routed_width`: numbers per token of the
        engines' routed experts, where any are asked for.
        """
        self.router_url = router_url.rstrip("/")
        self.vocab_size = vocab_size
        self.deadline_s = deadline_s
        self.samples_per_request, self.end_ids, self.routed_width = (
            samples_per_request,
            frozenset(end_ids),
            routed_width,
        )
        self.gate = Gate()
        self._http = httpx.AsyncClient(transport=Connections(max_connections), timeout=None)
        self._asked: dict[Together, list[Asked]] = {}
        self._posts: set[asyncio.Task[None]] = set()
        self._in_flight: dict[int, list[Asked]] = {}
        self._started = self._moves = 0
        self._has_spans: bool | None = None
        self._direct = Direct()

    def move(self, router_url: str) -> None:
        """Ask another router from now on. What the one before does not answer any more is asked
        again here."""
        self.router_url = router_url.rstrip("/")

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what is still in flight, of which its callers hear, and close the connections."""
        for task in self._posts:
            task.cancel()
        await asyncio.gather(*self._posts, return_exceptions=True)
        await self._http.aclose()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        *,
        n: int = 1,
        seeds: Sequence[int] | None = None,
        so_far: Sequence[Generation | None] | None = None,
        stop: asyncio.Event | None = None,
        deadline_s: float | None = None,
        routing_key: str | None = None,
        routed_from: int | None = None,
        watch: Watch | None = None,
        where: str = "generate",
    ) -> list[Generation]:
        """Sample `n` responses, or one per seed if `seeds` are given (engines honour them in
        deterministic mode only).

        `sampling` are SGLang's sampling parameters; `so_far` has what there is of each response, or
        None; once `stop` is set, what is aborted stays so; requests with one `routing_key` go to
        one engine (if the router's policy is consistent_hashing); `routed_from`: answer the experts
        of all tokens from this one on (None: of none); `watch`: the one response comes as it is
        sampled, and this is told of it; `where` names the group in errors. Raises: DataError (a
        prompt no engine may see), DeadlineExceeded, EngineRejected, EngineUnavailable.
        """
        ids = self._checked(prompt_ids, where)
        of_sample = (
            [sampling] * n
            if seeds is None
            else [{**sampling, "sampling_seed": seed} for seed in seeds]
        )
        assert watch is None or (len(of_sample) == 1 and so_far is None), (
            "one new response can be watched"
        )
        begun = list(so_far) if so_far is not None else [None] * len(of_sample)
        fresh = [number for number, there in enumerate(begun) if there is None]
        together = [fresh] if seeds is None and fresh else [[number] for number in fresh]
        work: list[Awaitable[list[Generation]]] = [
            self._begin(
                ids,
                Key(of_sample[numbers[0]], routing_key, routed_from),
                len(numbers),
                where,
                stop,
                watch,
            )
            for numbers in together
        ]
        rest = [number for number, there in enumerate(begun) if there is not None]
        work += [
            self._go_on(
                ids,
                Key(of_sample[number], routing_key, routed_from),
                [begun[number] or nothing_yet("")],
                where,
                stop,
            )
            for number in rest
        ]
        answers = await self._within(
            asyncio.gather(*work), self.deadline_s if deadline_s is None else deadline_s, where
        )
        order = [number for numbers in together for number in numbers] + rest
        of_number = dict(
            zip(order, (generation for answer in answers for generation in answer), strict=True)
        )
        return [of_number[number] for number in range(len(begun))]

    async def hold(self, mode: HoldMode, *, deadline_s: float, expires_s: float) -> None:
        """Before a push of weights. Harmless if it is held already; it opens by itself after
        `expires_s`.

        `drain`: nothing new starts, and it returns when nothing is in flight. `abort`: nothing new
        starts; the push aborts what is in flight, and that goes on after `release`. `in_place`:
        nothing is held here, the engine itself holds all. Raises: DeadlineExceeded naming the
        groups that are not finished (the gate is open then); EngineError for `in_place` with
        engines that cannot say which weights sampled which token.
        """
        if mode == "in_place":
            self._moves += 1
            if self._has_spans is False:
                raise no_spans(self.router_url)
            return
        self.gate.hold(expires_s + (deadline_s if mode == "drain" else 0.0))
        if mode == "drain":
            end_s = time.monotonic() + deadline_s
            while self._in_flight:
                if time.monotonic() > end_s:
                    self.gate.release()
                    raise self._undrained(deadline_s)
                await asyncio.sleep(_POLL_S)
            self.gate.hold(expires_s)

    def release(self) -> None:
        """After a push. Harmless if nothing is held."""
        self.gate.release()

    async def cut_off(self, stop: asyncio.Event) -> None:
        """Set `stop` and end what was asked with it: those calls return what they have.

        Every engine behind the router aborts all it has; what belongs to others goes on by itself.
        """
        stop.set()
        end_s = time.monotonic() + self.deadline_s
        while ours := [
            batch
            for batch in self._in_flight.values()
            if any(asked.stop is stop for asked in batch)
        ]:
            if time.monotonic() > end_s:
                for batch in ours:
                    fail(
                        batch,
                        DeadlineExceeded(
                            "the engine does not abort", where=batch[0].where, found=self.router_url
                        ),
                    )
                return
            with contextlib.suppress(
                EngineError, DeadlineExceeded
            ):  # an engine that is gone has nothing to abort
                await self._abort_all()
            await asyncio.sleep(_ABORT_AGAIN_S if self._has_ours(stop) else 0)

    def _has_ours(self, stop: asyncio.Event) -> bool:
        return any(asked.stop is stop for batch in self._in_flight.values() for asked in batch)

    async def _abort_all(self) -> None:
        keep: dict[str, Any] = {
            "json": {"rid": "", "abort_all": True},
            "deadline_s": self.deadline_s,
            "where": "cut off",
        }
        urls = [
            f"{str(worker['url']).rstrip('/')}/abort_request"
            for worker in await self._workers("cut off")
        ]
        await asyncio.gather(
            *(call(self._http, "POST", url, **keep) for url in urls), return_exceptions=True
        )

    async def _workers(self, where: str) -> list[dict[str, Any]]:
        answer = await call(
            self._http, "GET", f"{self.router_url}/workers", deadline_s=self.deadline_s, where=where
        )
        return read_workers(answer, where)

    def _undrained(self, deadline_s: float) -> DeadlineExceeded:
        waiting = sorted({asked.where for batch in self._in_flight.values() for asked in batch})
        return DeadlineExceeded(
            "requests are not finished",
            where="drain before a push of weights",
            found=f"{len(waiting)} ({', '.join(waiting[:5])}{' …' if len(waiting) > 5 else ''})",
            expected=f"none within {deadline_s:g} s",
            do="give it more time, or set sync.in_flight to abort",
        )

    async def _within(self, work: asyncio.Future[Answer], deadline_s: float, where: str) -> Answer:
        """The result of `work`, if it takes no longer than that without the time the gate was
        held."""
        end_s = time.monotonic() + deadline_s - self.gate.held_s()
        try:
            while not work.done():
                left_s = end_s + self.gate.held_s() - time.monotonic()
                if left_s <= 0:
                    raise deadline_exceeded(where, self.router_url, deadline_s)
                await asyncio.wait({work}, timeout=left_s)
            return work.result()
        finally:
            work.cancel()
            work.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())

    async def _begin(
        self, ids: list[int], key: Key, n: int, where: str, stop, watch: Watch | None
    ) -> list[Generation]:
        return await self._go_on(
            ids, key, await self._ask(ids, key, n, where, stop, watch), where, stop, watch
        )

    async def _go_on(
        self,
        ids: list[int],
        key: Key,
        so_far: list[Generation],
        where: str,
        stop: asyncio.Event | None,
        watch: Watch | None = None,
    ) -> list[Generation]:
        """Ask for the rest of what was aborted, until it is finished or `stop` is set."""
        sampling = key.sampling

        async def finished(generation: Generation) -> Generation:
            pause_s = _POLL_S
            while True:
                generation = settled(generation, sampling, self.end_ids)
                if generation.finish_reason != "abort" or (stop is not None and stop.is_set()):
                    return generation
                rest = (
                    None
                    if watch is None
                    else lambda more, tell=watch, begun=generation: tell(joined(begun, more))
                )
                (more,) = await self._ask(
                    ids + generation.response_ids, key.after(generation), 1, where, stop, rest
                )
                generation = joined(generation, more)
                if not more.response_ids and more.finish_reason == "abort":
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

        return list(await asyncio.gather(*map(finished, so_far)))

    def _checked(self, prompt_ids: Sequence[int], where: str) -> list[int]:
        ids = [int(token) for token in prompt_ids]
        if not ids:
            raise DataError("the prompt has no tokens", where=where)
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise DataError(
                "a token id is not in the vocabulary",
                where=where,
                found=next(token for token in ids if not 0 <= token < self.vocab_size),
                expected=f"0 <= id < {self.vocab_size}",
                do="use the tokenizer of the model directory",
            )
        return ids

    def _ask(
        self,
        ids: list[int],
        asked_for: Key,
        n: int,
        where: str,
        stop: asyncio.Event | None,
        watch: Watch | None,
    ) -> asyncio.Future[list[Generation]]:
        loop = asyncio.get_running_loop()
        asked = Asked(ids, n, where, stop, loop.create_future(), watch)
        key = (
            json.dumps(asked_for.sampling, sort_keys=True),
            asked_for.routing,
            asked_for.routed_from,
        )
        if watch is not None:
            self._start(key, [asked])
            return asked.answer
        if key not in self._asked:
            self._asked[key] = []
            loop.call_soon(self._send, key)
        self._asked[key].append(asked)
        return asked.answer

    def _send(self, key: Together) -> None:
        """Put together what was asked in this turn of the event loop, and start the requests."""
        batch: list[Asked] = []
        samples = 0
        for asked in self._asked.pop(key):
            if batch and samples + asked.n > self.samples_per_request:
                self._start(key, batch)
                batch = []
                samples = 0
            batch.append(asked)
            samples += asked.n
        self._start(key, batch)

    def _start(self, key: Together, batch: list[Asked]) -> None:
        task = asyncio.create_task(self._answer(key, batch))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)
        for asked in batch:
            asked.answer.add_done_callback(
                lambda _: task.cancel() if all(other.answer.done() for other in batch) else None
            )

    async def _answer(self, key: Together, batch: list[Asked]) -> None:
        """Post one request; hand each caller its samples, or the error. A refused batch is asked
        again group by group."""
        try:
            generations = await self._post(key, batch)
        except EngineRejected as error:
            if len(batch) > 1:
                await asyncio.gather(*(self._answer(key, [asked]) for asked in batch))
            else:
                fail(batch, error)
        except asyncio.CancelledError:
            fail(
                batch,
                EngineUnavailable(
                    "the client was closed before it was answered", where=batch[0].where
                ),
            )
            raise
        except Exception as error:  # noqa: BLE001 - who waits hears of it at once, whatever it is
            fail(batch, error)
        else:
            start = 0
            for asked in batch:
                if not asked.answer.done():
                    asked.answer.set_result(generations[start : start + asked.n])
                start += asked.n

    async def _post(self, key: Together, batch: list[Asked]) -> list[Generation]:
        watch = batch[0].watch
        prompts = json.dumps(
            batch[0].prompt_ids
            if watch
            else [asked.prompt_ids for asked in batch for _ in range(asked.n)]
        )
        routing = self._routing(key[2], batch)
        wanted = (
            f', "return_routed_experts": true, "routed_experts_start_len": {routing.routed_from}'
            if routing
            else ""
        )
        streamed = "true" if watch else "false"
        body = f'{{"input_ids": {prompts}, "sampling_params": {key[0]}, "return_logprob": true, "stream": {streamed}{wanted}}}'
        where = (
            batch[0].where
            if len(batch) == 1
            else f"{batch[0].where} and {len(batch) - 1} more groups"
        )
        start_s = time.time()
        moves = self._moves
        samples = sum(asked.n for asked in batch)
        answer = await self._persist(body.encode(), key, where, batch)
        if answer is None:
            return [nothing_yet(self.router_url)] * samples
        generations = read_generations(answer, samples, self.router_url, start_s, where, routing)
        check_asked(generations, self.vocab_size, json.loads(key[0]).get("max_new_tokens"), where)
        self._has_spans = all(generation.has_spans for generation in generations)
        if moves != self._moves and not self._has_spans:
            raise no_spans(where)
        return generations

    def _routing(self, routed_from: int | None, batch: list[Asked]) -> RoutingWanted | None:
        if routed_from is None:
            return None
        assert self.routed_width, "made without routed_width"
        return RoutingWanted(
            self.routed_width,
            routed_from,
            [len(asked.prompt_ids) for asked in batch for _ in range(asked.n)],
        )

    async def _persist(
        self, body: bytes, key: Together, where: str, batch: list[Asked]
    ) -> httpx.Response | None:
        """Post, and again after a broken connection or while the router has no engine, until the
        deadline: a dead engine is being replaced meanwhile. None: all were stopped before it was
        posted.

        Raises: EngineRejected, DeadlineExceeded, EngineUnavailable with what kept it from being
        answered."""
        end_s = time.monotonic() + self.deadline_s - self.gate.held_s()
        pause_s = _FIRST_PAUSE_S
        failed: set[str] = set()
        while True:
            await self.gate.opened()
            if all(asked.stopped for asked in batch):
                return None
            try:
                with self._flying(batch):
                    return await self._answered(body, key, failed, where, batch[0].watch)
            except (EngineUnavailable, EngineRejected) as error:
                passing = isinstance(error, EngineUnavailable) or any(
                    sign in str(error.found) for sign in _NO_WORKER
                )
                if not passing:
                    raise
                if time.monotonic() + pause_s > end_s + self.gate.held_s():
                    raise EngineUnavailable(
                        "no engine answered", where=where, found=error.found, do=error.do
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _answered(
        self, body: bytes, key: Together, failed: set[str], where: str, watch: Watch | None
    ) -> httpx.Response:
        """By the router's choice, or by an engine that is asked past it. `failed`: engines that
        were not there, added to."""
        _, routing, routed_from = key
        if routed_from is None:
            headers = {_ROUTING_HEADER: routing} if routing else None
            return await self._sent(f"{self.router_url}/generate", body, headers, where, watch)
        with self._direct.engine(await self._workers(where), routing, failed) as url:
            try:
                return await self._sent(f"{url}/generate", body, None, where, watch)
            except EngineUnavailable:
                failed.add(url)
                raise

    async def _sent(
        self, url: str, body: bytes, headers: dict[str, str] | None, where: str, watch: Watch | None
    ) -> httpx.Response:
        keep: dict[str, Any] = {
            "content": body,
            "headers": headers,
            "deadline_s": self.deadline_s,
            "where": where,
        }
        return await (
            stream(self._http, url, watch=watch, **keep)
            if watch
            else call(self._http, "POST", url, **keep)
        )

    @contextlib.contextmanager
    def _flying(self, batch: list[Asked]) -> Iterator[None]:
        self._started += 1
        number = self._started
        self._in_flight[number] = batch
        try:
            yield
        finally:
            del self._in_flight[number]
