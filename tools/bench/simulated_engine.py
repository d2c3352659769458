"""An engine that samples nothing: `/generate` of SGLang with forced lengths and simulated time.

All running requests advance by the same number of tokens. Their speed falls as their number rises:
`speed / (1 + running / knee)` tokens a second each, so `speed × knee` tokens a second at most in
all. A change of the weights takes no time, and later tokens have the new version.

Entry point: `SimulatedEngine`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Length = Callable[[int, int], int]
"""Return the length of a response from the first token of its prompt and its number in the
group."""
MAX_BODY_BYTES = 64 * 1024**2


class SimulatedEngine:
    """Answers requests on a local port while `serving`."""

    def __init__(self, length: Length, *, speed: float, knee: float) -> None:
        self.length = length
        self.speed = speed
        self.knee = knee
        self.tokens = 0.0
        """Tokens of all requests so far."""
        self._position = 0.0
        """Tokens of a request that runs since the start."""
        self._checked_s = time.perf_counter()
        self._running: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._number = 0
        self._changes: list[tuple[float, int]] = [(0.0, 0)]
        """(position, version) of each change of the weights."""
        self._aborted: dict[tuple[int, int], list[int]] = defaultdict(list)
        """(first token of the prompt, tokens so far) → lengths of the aborted responses."""
        self._woken = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Requests that are being sampled."""
        return len(self._running)

    def publish(self, version: int) -> None:
        """Sample later tokens with this version."""
        self._advance()
        self._changes.append((self._position, version))

    def application(self) -> web.Application:
        """Return the endpoints: `/generate`, `/abort_request`, and a router's `/workers`."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/workers", self._workers)
        return app

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Yield the address of the engine."""
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        clock = asyncio.create_task(self._end_requests())
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            clock.cancel()
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        prompts: list[list[int]] = (await request.json())["input_ids"]
        seen = Counter[int]()
        rows = []
        for prompt in prompts:
            first = prompt[0]
            sampled = len(prompt) - 1
            if sampled:
                total = self._aborted[first, sampled].pop()
            else:
                total = self.length(first, seen[first])
                seen[first] += 1
            rows.append(self._sample(first, sampled, total))
        return web.json_response(await asyncio.gather(*rows))

    async def _abort(self, request: web.Request) -> web.Response:
        self._advance()
        for _, _, ended in self._running:
            if not ended.done():
                ended.set_result(False)
        self._running = []
        return web.json_response({})

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [{"url": str(request.url.origin())}]})

    async def _sample(self, first: int, sampled: int, total: int) -> dict[str, Any]:
        """Return the response of `total` tokens from token `sampled` on. `first`: of the prompt."""
        self._advance()
        start = self._position
        end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._number += 1
        heapq.heappush(self._running, (start + total - sampled, self._number, end))
        self._woken.set()
        tokens = total - sampled
        if not (is_complete := await end):
            tokens = min(tokens - 1, int(self._position - start))
            self._aborted[first, sampled + tokens].append(total)
        return {
            "text": "",
            "meta_info": {
                "finish_reason": {"type": "stop" if is_complete else "abort"},
                "output_token_logprobs": [[-1.0, 7]] * tokens,
                "weight_versions": self._spans(start, tokens),
                "cached_tokens": 0,
            },
        }

    def _spans(self, start: float, tokens: int) -> list[dict[str, Any]]:
        """Return the versions of the tokens of a request that began at a position."""
        cuts = [round(position - start) for position, _ in self._changes[1:]]
        starts = [0, *(min(max(cut, 0), tokens) for cut in cuts)]
        return [
            {"version": f"run@{version}@0", "start": first, "end": end}
            for first, end, (_, version) in zip(
                starts, [*starts[1:], tokens], self._changes, strict=True
            )
            if end > first
        ]

    def _rate(self) -> float:
        return self.speed / (1 + len(self._running) / self.knee)

    def _advance(self) -> None:
        now_s = time.perf_counter()
        gained = (now_s - self._checked_s) * self._rate()
        self._checked_s = now_s
        self._position += gained
        self.tokens += gained * len(self._running)

    async def _end_requests(self) -> None:
        while True:
            self._advance()
            while self._running and self._running[0][0] <= self._position:
                end = heapq.heappop(self._running)[2]
                if not end.done():  # the client may have gone
                    end.set_result(True)
            self._woken.clear()
            wait_s = None
            if self._running:
                wait_s = (self._running[0][0] - self._position) / self._rate()
            try:
                await asyncio.wait_for(self._woken.wait(), wait_s)
            except TimeoutError:
                continue
