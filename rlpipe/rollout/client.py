"""`GenerateClient`: token ids in, sampled token ids with log-probabilities out, through the sglang-router.

Groups asked for in the same turn of the event loop, with equal sampling parameters, share a request (an engine without CUDA
answers one request of 256 samples several times faster than 256 requests); every caller still gets its own samples only.
The router takes a batch of prompts with one set of sampling parameters, so samples with seeds of their own go one by one.

Not here: what is asked (`generate`), how many groups at a time (`sampler`), or control of an engine (`engines.sglang.admin`).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rlpipe.errors import DataError, DeadlineExceeded, EngineRejected, EngineUnavailable
from rlpipe.rollout.http import call, deadline_exceeded

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0
_NO_WORKER = ("no_available_workers", "call_upstream_request_error", "HTTP 502", "HTTP 503")


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled response. `response_ids` and `log_probs` have the same length; `weight_versions` are run lengths over it."""

    response_ids: list[int]
    log_probs: list[float]
    """Of the sampled tokens, after division by the temperature; before top-p and top-k."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    weight_versions: list[tuple[int, str]]
    """(tokens, stamp of the weights that sampled them), in order."""
    engine: str
    """Address that answered: the router's, which does not say which engine it chose."""
    cached_tokens: int
    t_start_s: float
    t_end_s: float


@dataclass(slots=True)
class _Asked:
    prompt_ids: list[int]
    n: int
    where: str
    answer: asyncio.Future[list[Generation]]


class GenerateClient:
    """Made and used by one event loop; close it with `aclose()` or use it as an async context manager."""

    def __init__(
        self,
        router_url: str,
        *,
        vocab_size: int,
        deadline_s: float,
        samples_per_request: int = 1,
        max_connections: int = 512,
    ) -> None:
        """`vocab_size`: token ids at or above it are refused here, because one of them ends the whole engine.

        `deadline_s` is for one call of `generate`, waiting in the engine included. `samples_per_request`: groups are put together
        up to so many samples; a larger group is still one request.
        """
        self.router_url, self.vocab_size, self.deadline_s = router_url.rstrip("/"), vocab_size, deadline_s
        self.samples_per_request = samples_per_request
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self._http = httpx.AsyncClient(limits=limits, timeout=None)
        self._asked: dict[str, list[_Asked]] = {}
        self._posts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what is still in flight and close the connections."""
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
        deadline_s: float | None = None,
        where: str = "generate",
    ) -> list[Generation]:
        """Sample `n` responses, or one per seed if `seeds` are given (engines honour them in deterministic mode only).

        `sampling` are SGLang's sampling parameters; `where` names the group in errors.
        Raises: DataError (a prompt no engine may see), DeadlineExceeded, EngineRejected, EngineUnavailable.
        """
        ids = self._checked(prompt_ids, where)
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        asked: list[Awaitable[list[Generation]]]
        if seeds is None:
            asked = [self._ask(ids, sampling, n, where)]
        else:
            asked = [self._ask(ids, {**sampling, "sampling_seed": seed}, 1, where) for seed in seeds]
        try:
            async with asyncio.timeout(deadline_s):
                answers = await asyncio.gather(*asked)
        except TimeoutError as error:
            raise deadline_exceeded(where, self.router_url, deadline_s) from error
        return [generation for answer in answers for generation in answer]

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

    def _ask(self, ids: list[int], sampling: dict[str, Any], n: int, where: str) -> asyncio.Future[list[Generation]]:
        loop = asyncio.get_running_loop()
        asked = _Asked(ids, n, where, loop.create_future())
        key = json.dumps(sampling, sort_keys=True)
        if key not in self._asked:
            self._asked[key] = []
            loop.call_soon(self._send, key)
        self._asked[key].append(asked)
        return asked.answer

    def _send(self, key: str) -> None:
        """Put together what was asked in this turn of the event loop, and start the requests."""
        batch: list[_Asked] = []
        samples = 0
        for asked in self._asked.pop(key):
            if batch and samples + asked.n > self.samples_per_request:
                self._start(key, batch)
                batch, samples = [], 0
            batch.append(asked)
            samples += asked.n
        self._start(key, batch)

    def _start(self, key: str, batch: list[_Asked]) -> None:
        task = asyncio.create_task(self._answer(key, batch))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)
        for asked in batch:
            asked.answer.add_done_callback(lambda _: task.cancel() if all(other.answer.done() for other in batch) else None)

    async def _answer(self, key: str, batch: list[_Asked]) -> None:
        """Post one request; hand each caller its samples, or the error. A refused batch is asked again group by group."""
        try:
            generations = await self._post(key, batch)
        except EngineRejected as error:
            if len(batch) > 1:
                await asyncio.gather(*(self._answer(key, [asked]) for asked in batch))
            else:
                _fail(batch, error)
        except (EngineUnavailable, DeadlineExceeded) as error:
            _fail(batch, error)
        else:
            start = 0
            for asked in batch:
                if not asked.answer.done():
                    asked.answer.set_result(generations[start : start + asked.n])
                start += asked.n

    async def _post(self, key: str, batch: list[_Asked]) -> list[Generation]:
        prompts = json.dumps([asked.prompt_ids for asked in batch for _ in range(asked.n)])
        body = f'{{"input_ids": {prompts}, "sampling_params": {key}, "return_logprob": true, "stream": false}}'
        where = batch[0].where if len(batch) == 1 else f"{batch[0].where} and {len(batch) - 1} more groups"
        start_s = time.time()
        answer = await self._persist(body.encode(), where)
        return _generations(answer, sum(asked.n for asked in batch), self.router_url, start_s, where)

    async def _persist(self, body: bytes, where: str) -> httpx.Response:
        """Post, and again after a broken connection or while the router has no engine, until the deadline: a dead engine is being
        replaced meanwhile. Raises: EngineRejected, DeadlineExceeded, EngineUnavailable with what kept it from being answered."""
        end_s, pause_s = time.monotonic() + self.deadline_s, _FIRST_PAUSE_S
        while True:
            try:
                return await call(
                    self._http, "POST", f"{self.router_url}/generate", content=body, deadline_s=self.deadline_s, where=where
                )
            except (EngineUnavailable, EngineRejected) as error:
                passing = isinstance(error, EngineUnavailable) or any(sign in str(error.found) for sign in _NO_WORKER)
                if not passing:
                    raise
                if time.monotonic() + pause_s > end_s:
                    raise EngineUnavailable("no engine answered", where=where, found=error.found, do=error.do) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _fail(batch: list[_Asked], error: Exception) -> None:
    for asked in batch:
        if not asked.answer.done():
            asked.answer.set_exception(error)


def _generations(answer: httpx.Response, expected: int, engine: str, start_s: float, where: str) -> list[Generation]:
    """Read one answer of `/generate`. Raises: EngineRejected if it is not what was asked for."""
    end_s = time.time()
    try:
        rows = [_generation(row["meta_info"], engine, start_s, end_s) for row in answer.json()]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineRejected("the answer cannot be read", where=where, found=f"{error!r} in {answer.text[:300]}") from error
    if len(rows) != expected:
        raise EngineRejected("the answer has not one row per sample", where=where, found=len(rows), expected=expected)
    return rows


def _generation(meta: dict[str, Any], engine: str, start_s: float, end_s: float) -> Generation:
    """Read SGLang's `meta_info`. Token spans of weight versions exist from 0.5.21 on; before, one version per response."""
    pairs = meta["output_token_logprobs"]
    if not all(map(math.isfinite, (pair[0] for pair in pairs))):
        raise ValueError("a log-probability is not finite")
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(pairs)}]
    return Generation(
        response_ids=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        finish_reason=meta["finish_reason"]["type"],
        weight_versions=[(span["end"] - span["start"], span["version"]) for span in spans if span["end"] > span["start"]],
        engine=engine,
        cached_tokens=meta.get("cached_tokens", 0),
        t_start_s=start_s,
        t_end_s=end_s,
    )
