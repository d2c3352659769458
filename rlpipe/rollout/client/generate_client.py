"""Sample responses from the engines: token ids in, sampled token ids with log-probs out.

Entry point: `GenerateClient`. The client sends its requests through the sglang-router.

A response that an engine aborts is continued from prompt and tokens so far once the gate is open.
A response under a grammar starts again instead, because an engine cannot continue a grammar.
A weight push during a response is visible only as another weight version in the response. A caller
that set `stop` gets the aborted response instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rlpipe.errors import DataError, DeadlineExceeded, EngineError
from rlpipe.rollout.client.http import deadline_exceeded
from rlpipe.rollout.client.image_requests import RequestImages
from rlpipe.rollout.client.request_pool import LONGEST_PAUSE_S, RequestPool, fail
from rlpipe.rollout.client.request_settings import RequestSettings
from rlpipe.rollout.client.streaming import Watch
from rlpipe.rollout.generation import (
    Generation,
    empty_generation,
    has_grammar,
    joined,
    no_spans,
    settled,
)

HoldMode = Literal["drain", "abort", "in_place"]
Result = TypeVar("Result")

_ABORT_AGAIN_S = 0.3
_POLL_S = 0.02


@dataclass(slots=True)
class AnsweredTokens:
    """Sums over the responses of a client since the last `take_metrics`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the engine had in its prefix cache."""
    speculated_tokens: int = 0
    """Response tokens of speculative decoding."""
    verify_steps: int = 0

    def add(self, prompt_tokens: int, generation: Generation) -> None:
        """Count a new response."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += min(generation.cached_tokens, prompt_tokens)
        if generation.verify_steps:
            self.speculated_tokens += len(generation.response_ids)
            self.verify_steps += generation.verify_steps

    def metrics(self) -> dict[str, float]:
        """Return cache hit rate and accept length; each is absent without its tokens."""
        found: dict[str, float] = {}
        if self.prompt_tokens:
            found["engine/prefix_cache_hit_rate"] = self.cached_tokens / self.prompt_tokens
        if self.verify_steps:
            found["engine/spec_accept_length"] = self.speculated_tokens / self.verify_steps
        return found


class GenerateClient:
    """Sample from the engines behind a router.

    Made and used by one event loop. Close the client with `aclose()` or use it as an async context
    manager.
    """

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
        """Create a client without connecting.

        vocab_size: larger token ids are refused here, because such an id crashes the engine.
        deadline_s: limit for one call of `generate`. Waiting in the engine counts, a held gate does
            not.
        samples_per_request: groups share a request up to this number of samples. A larger group is
            still one request.
        end_ids: the model's end-of-sequence tokens, to recognize an aborted response that had
            ended.
        routed_width: numbers per token of the routed experts; needed for `routed_from`.
        """
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        self.pool = RequestPool(
            router_url.rstrip("/"),
            vocab_size=vocab_size,
            deadline_s=deadline_s,
            samples_per_request=samples_per_request,
            max_connections=max_connections,
            routed_width=routed_width,
        )
        self.gate = self.pool.gate
        self._answered = AnsweredTokens()

    def move(self, router_url: str, *, max_connections: int) -> None:
        """Use this router from now on, with at least this number of connections at once.

        Requests that the old router does not answer are sent to the new one.
        """
        self.pool.router_url = router_url.rstrip("/")
        self.pool.connections.grow(max_connections)

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel running requests (their callers get an error) and close the connections."""
        await self.pool.aclose()

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
        num_top_log_probs: int = 0,
        images: RequestImages | None = None,
        where: str = "generate",
    ) -> list[Generation]:
        """Sample `n` responses, or one per seed.

        sampling: SGLang's sampling parameters.
        seeds: used by engines in deterministic mode only.
        so_far: partial responses to continue; None for a new response.
        stop: once set, aborted responses are not continued.
        routing_key: requests with one key go to one engine under the policy consistent_hashing.
        routed_from: return the experts of all tokens from this one on. None: no experts.
        watch: stream the single response and call this with the partial response.
        num_top_log_probs: number of the most probable tokens to report at each position.
        images: of the prompt, which has one placeholder token for each merged patch.
        where: names the group in errors.

        Raises: DataError for a prompt that would crash the engine; DeadlineExceeded;
        EngineRejected; EngineUnavailable.
        """
        ids = self._checked_ids(prompt_ids, where)
        params = _with_seeds(sampling, n, seeds)
        assert watch is None or (len(params) == 1 and so_far is None), (
            "only a single new response can be streamed"
        )
        settings = [
            RequestSettings(one, routing_key, routed_from, num_top_log_probs, images)
            for one in params
        ]
        partials = list(so_far) if so_far is not None else [None] * len(params)
        new = [index for index, partial in enumerate(partials) if partial is None]
        # New responses with equal parameters share a request; seeds need one request each.
        batches = [new] if seeds is None and new else [[index] for index in new]
        work: list[Awaitable[list[Generation]]] = [
            self._sample_new(ids, settings[batch[0]], len(batch), where, stop, watch)
            for batch in batches
        ]
        order = [index for batch in batches for index in batch]
        for index, partial in enumerate(partials):
            if partial is not None:
                work.append(self._finish(ids, settings[index], [partial], where, stop))
                order.append(index)
        deadline_s = self.pool.deadline_s if deadline_s is None else deadline_s
        answers = await self._within(asyncio.gather(*work), deadline_s, where)
        generations = [generation for answer in answers for generation in answer]
        by_index = dict(zip(order, generations, strict=True))
        return [by_index[index] for index in range(len(partials))]

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the responses since the last call, as `AnsweredTokens.metrics`."""
        answered, self._answered = self._answered, AnsweredTokens()
        return answered.metrics()

    async def hold(self, mode: HoldMode, *, deadline_s: float, expires_s: float) -> None:
        """Prepare for a weight push. A second call does no harm; a hold expires after `expires_s`.

        drain: start no request and wait until none is in flight.
        abort: start no request. The push aborts the requests in flight; they continue after
            `release`.
        in_place: hold nothing here; the engine itself pauses all requests.

        Raises: DeadlineExceeded with the unfinished groups (the gate is open then); EngineError for
        `in_place` with engines that do not report the weight version of each token.
        """
        if mode == "in_place":
            self.pool.num_in_place_pushes += 1
            if self.pool.has_spans is False:
                raise no_spans(self.pool.router_url)
            return
        if mode == "abort":
            self.gate.hold(expires_s)
            return
        # The hold must not expire while the requests drain.
        self.gate.hold(expires_s + deadline_s)
        end_s = time.monotonic() + deadline_s
        while self.pool.in_flight:
            if time.monotonic() > end_s:
                self.gate.release()
                raise self._undrained(deadline_s)
            await asyncio.sleep(_POLL_S)
        self.gate.hold(expires_s)

    def release(self) -> None:
        """Open the gate after a weight push. Does nothing if the gate is open."""
        self.gate.release()

    async def cut_off(self, stop: asyncio.Event) -> None:
        """Set `stop` and abort the requests that were made with it: their callers get the partial
        responses.

        Every engine aborts all its requests. Requests of other callers are continued.
        """
        stop.set()
        end_s = time.monotonic() + self.pool.deadline_s
        while ours := self._batches_of(stop):
            if time.monotonic() > end_s:
                for batch in ours:
                    error = DeadlineExceeded(
                        "the engine does not abort its requests",
                        where=batch[0].where,
                        found=self.pool.router_url,
                    )
                    fail(batch, error)
                return
            # An engine that is gone has no request to abort.
            with contextlib.suppress(EngineError, DeadlineExceeded):
                await self.pool.abort_all()
            # A request that was on its way to the engine misses the abort: repeat it.
            await asyncio.sleep(_ABORT_AGAIN_S if self._batches_of(stop) else 0)

    def _batches_of(self, stop: asyncio.Event):
        return [
            batch for batch in self.pool.in_flight if any(request.stop is stop for request in batch)
        ]

    def _undrained(self, deadline_s: float) -> DeadlineExceeded:
        groups = sorted({request.where for batch in self.pool.in_flight for request in batch})
        return DeadlineExceeded(
            "requests are not finished",
            where="drain before a weight push",
            found=f"{len(groups)} ({', '.join(groups[:5])}{' …' if len(groups) > 5 else ''})",
            expected=f"none within {deadline_s:g} s",
            do="raise the deadline, or set sync.in_flight to abort",
        )

    async def _within(self, work: asyncio.Future[Result], deadline_s: float, where: str) -> Result:
        """Wait for `work` at most `deadline_s` seconds, without the time that the gate is held."""
        end_s = time.monotonic() + deadline_s - self.gate.held_s()
        try:
            while not work.done():
                left_s = end_s + self.gate.held_s() - time.monotonic()
                if left_s <= 0:
                    raise deadline_exceeded(where, self.pool.router_url, deadline_s)
                await asyncio.wait({work}, timeout=left_s)
            return work.result()
        finally:
            work.cancel()
            # Reading the exception keeps asyncio from logging it as never retrieved.
            work.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    async def _sample_new(
        self,
        ids: list[int],
        settings: RequestSettings,
        n: int,
        where: str,
        stop: asyncio.Event | None,
        watch: Watch | None,
    ) -> list[Generation]:
        generations = await self.pool.add(ids, settings, n, where, stop, watch)
        finished = await self._finish(ids, settings, generations, where, stop, watch)
        for generation in finished:
            self._answered.add(len(ids), generation)
        return finished

    async def _finish(
        self,
        ids: list[int],
        settings: RequestSettings,
        partials: list[Generation],
        where: str,
        stop: asyncio.Event | None,
        watch: Watch | None = None,
    ) -> list[Generation]:
        """Continue aborted responses until they are finished or `stop` is set."""
        again_from_start = has_grammar(settings.sampling)

        async def finished(generation: Generation) -> Generation:
            pause_s = _POLL_S
            while True:
                generation = settled(generation, settings.sampling, self.end_ids)
                if generation.finish_reason != "abort" or (stop is not None and stop.is_set()):
                    return generation
                if again_from_start or _has_placeholder(settings.images, generation):
                    generation = empty_generation(generation.engine)
                watch_all = None if watch is None else _watch_joined(watch, generation)
                (more,) = await self.pool.add(
                    ids + generation.response_ids,
                    settings.continued(generation),
                    1,
                    where,
                    stop,
                    watch_all,
                )
                generation = joined(generation, more)
                if not more.response_ids and more.finish_reason == "abort":
                    # The engine aborts at once, as during a push: do not retry in a busy loop.
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

        return list(await asyncio.gather(*map(finished, partials)))

    def _checked_ids(self, prompt_ids: Sequence[int], where: str) -> list[int]:
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


def _with_seeds(
    sampling: dict[str, Any], n: int, seeds: Sequence[int] | None
) -> list[dict[str, Any]]:
    """Return the sampling parameters of each response."""
    if seeds is None:
        return [sampling] * n
    return [{**sampling, "sampling_seed": seed} for seed in seeds]


def _has_placeholder(images: RequestImages | None, generation: Generation) -> bool:
    """True if the policy sampled the placeholder of an image, which an engine would fill."""
    return images is not None and images.token in generation.response_ids


def _watch_joined(watch: Watch, first: Generation) -> Watch:
    """Return a watch for the continuation of `first` that reports the whole response."""
    return lambda more: watch(joined(first, more))
