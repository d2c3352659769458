"""Serve the engines to a user function over HTTP on the loopback address, during one rollout.

    POST /generate                             SGLang's API: input_ids or text, one prompt or
                                               several; one response also as a stream
    POST /sessions/<id>/v1/…                   OpenAI's and Anthropic's APIs, one session per
                                               rollout; see `routes`
    POST /v1/…                                 the same APIs, without a session
    GET  /workers, /health

Requests go through the run's `GenerateClient`: they wait during a weight push, continue after an
abort, are repeated after a lost engine, and are refused if they would crash an engine. The journal
records the answers. Each open rollout has a separate gateway and port, which attributes the
requests to the rollout. Rollouts one after another have the same port, because a function may keep
the address of the first one (`GatewayPorts`).

Entry points: `Gateway`, `GatewayPorts`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from aiohttp import web

from rlpipe.errors import DataError, RlpipeError
from rlpipe.rollout.agent.api_errors import errors_as_json
from rlpipe.rollout.agent.events import Events, sample_streamed
from rlpipe.rollout.agent.request_models import GenerateRequest, read_body
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.client.streaming import Watch
from rlpipe.rollout.generate import version_runs
from rlpipe.rollout.generation import Generation, has_grammar
from rlpipe.rollout.hooks.journal import Answer, Journal
from rlpipe.store.routed_experts import within, write_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOCAL = "127.0.0.1"
_WAITING_CONNECTIONS = 1024
# SGLang's default.
_DEFAULT_MAX_NEW_TOKENS = 128
_LARGEST_REQUEST_BYTES = 256 * 1024**2
_ROUTING_HEADER = "X-SMG-Routing-Key"


class _Request(NamedTuple):
    """Settings of a `/generate` request for one prompt."""

    ids: list[int]
    sampling: dict[str, Any]
    routing_key: str | None
    routed_from: int | None
    """First token with experts in the answer. None: no experts."""
    start_s: float

    @property
    def where(self) -> str:
        return f"POST /generate with {len(self.ids)} tokens"


class GatewayPorts:
    """Listening sockets of the gateways of one process. A closed gateway's is the next one's.

    A socket keeps listening between two gateways: connections then wait for the next one, as
    requests wait during a weight push.
    """

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._used: set[socket.socket] = set()

    @contextmanager
    def listener(self) -> Iterator[socket.socket]:
        """Yield a socket that no other open gateway has, if possible the same as before."""
        unused = (listener for listener in self._listeners if listener not in self._used)
        listener = next(unused, None)
        if listener is None:
            listener = socket.create_server((LOCAL, 0), backlog=_WAITING_CONNECTIONS)
            self._listeners.append(listener)
        self._used.add(listener)
        try:
            yield listener
        finally:
            self._used.remove(listener)


class Gateway:
    """HTTP server of one rollout. An async context manager; `address` is (host, port) while it is
    open."""

    def __init__(
        self,
        client: GenerateClient,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context_len: int,
        stop: asyncio.Event | None = None,
        affinity: bool = False,
        routed: bool = False,
        routes: Callable[[Gateway], Sequence[web.RouteDef]] = lambda _: (),
        listener: socket.socket | None = None,
    ) -> None:
        """Create a gateway without starting the server.

        stop: as in `GenerateClient.generate`.
        affinity: pass the callers' routing keys to the router.
        routed: request the experts of all tokens from the engines.
        routes: further routes besides SGLang's.
        listener: listening socket, which stays open; None: a new one.
        """
        self.client = client
        self.tokenizer = tokenizer
        self.context_len = context_len
        self.stop = stop
        self.affinity = affinity
        self.routed = routed
        self.journal = Journal()
        self.address = (LOCAL, 0)
        self._listener = listener
        self._routes = routes
        self._cleanup = AsyncExitStack()

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://{self.address[0]}:{self.address[1]}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_LARGEST_REQUEST_BYTES, middlewares=[errors_as_json])
        app.add_routes([web.post("/generate", self._generate), web.get("/workers", self._workers)])
        app.add_routes([web.get("/health", _healthy), *self._routes(self)])
        # With handler_cancellation, a client that disconnects ends its request.
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        await runner.setup()
        self._cleanup.push_async_callback(runner.cleanup)
        if self._listener is None:
            site = web.TCPSite(runner, *self.address)
        else:
            # A duplicate: the server closes its socket, and the listener continues to listen.
            # Its default backlog would replace the listener's.
            site = web.SockSite(runner, self._listener.dup(), backlog=_WAITING_CONNECTIONS)
        await site.start()
        self.address = runner.addresses[0]
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._cleanup.aclose()

    async def sample(
        self,
        ids: Sequence[int],
        sampling: dict[str, Any],
        *,
        routing_key: str | None = None,
        routed_from: int = 0,
        watch: Watch | None = None,
        num_top_log_probs: int = 0,
        where: str = "generate",
    ) -> Generation:
        """Sample one response and record it in the journal.

        `routed_from` is the first token that needs experts, if the gateway is `routed`. `watch` is
        called with partial responses, except under a grammar: such a response starts again after an
        abort. `num_top_log_probs` as in `GenerateClient.generate`.

        Raises: as `GenerateClient.generate`; DataError without room for a response.
        """
        room = self.context_len - len(ids)
        if room < 1:
            raise DataError(
                "no room for a response",
                where=where,
                found=f"{len(ids)} tokens",
                expected=f"< {self.context_len}",
            )
        max_new_tokens = sampling.get("max_new_tokens")
        if max_new_tokens is None:
            max_new_tokens = _DEFAULT_MAX_NEW_TOKENS
        params = {**sampling, "max_new_tokens": min(max_new_tokens, room)}
        options: dict[str, Any] = {"routing_key": routing_key if self.affinity else None}
        if self.routed:
            options["routed_from"] = routed_from
        if watch is not None and not has_grammar(sampling):
            options["watch"] = watch
        if num_top_log_probs:
            options["num_top_log_probs"] = num_top_log_probs
        (generation,) = await self.client.generate(
            ids, params, stop=self.stop, **options, where=where
        )
        answer = Answer(
            response_ids=tuple(generation.response_ids),
            log_probs=tuple(generation.log_probs),
            weight_versions=tuple(version_runs(generation, where)),
            routed_experts=generation.routed_experts,
            routed_from=routed_from,
        )
        self.journal.add(ids, answer)
        return generation

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without a chat template.

        Raises: DataError for half of a surrogate pair, which no tokenizer accepts.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                "text with half of a surrogate pair", where="gateway", found=str(error)
            ) from error
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def text_of(self, generation: Generation, sampling: dict[str, Any]) -> str:
        """Return the text as SGLang does: without the stop token or stop text, unless
        `no_stop_trim`."""
        ids = generation.response_ids
        skip = sampling.get("skip_special_tokens", True)
        if sampling.get("no_stop_trim"):
            return self.decode(ids, skip_special_tokens=skip)
        stop_ids = {*self.client.end_ids, *(sampling.get("stop_token_ids") or ())}
        if generation.finish_reason == "stop" and ids and ids[-1] in stop_ids:
            ids = ids[:-1]
        text = self.decode(ids, skip_special_tokens=skip)
        for stop in as_list(sampling.get("stop")):
            text = text.partition(stop)[0]
        return text

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body: Any = await read_body(request, GenerateRequest)
        wants_experts = bool(body.get("return_routed_experts"))
        if wants_experts and not self.routed:
            raise DataError(
                "the engines do not return routed experts here",
                where="POST /generate",
                found="return_routed_experts",
                do="set train.use_rollout_routing_replay; evaluations have no routed experts",
            )
        sampling = dict(body.get("sampling_params") or {})
        copies = int(sampling.pop("n", 1) or 1)
        prompts, is_batch = self._prompts(body)
        start = int(body.get("routed_experts_start_len") or 0)
        routing_key = request.headers.get(_ROUTING_HEADER)
        requests = [
            _Request(ids, sampling, routing_key, start if wants_experts else None, time.time())
            for ids in prompts
            for _ in range(copies)
        ]
        if body.get("stream"):
            if len(requests) != 1:
                raise DataError(
                    "a stream has one response",
                    where="POST /generate",
                    found=f"{len(requests)} responses, stream: true",
                    expected=1,
                )
            return await self._stream(request, requests[0])
        rows = await asyncio.gather(*map(self._sampled_row, requests))
        return web.json_response(rows if is_batch or copies > 1 else rows[0])

    def _prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        """Return the prompts of a request as ids, and True if the request has a list of prompts."""
        prompt = body.get("input_ids")
        if prompt is None:
            prompt = body.get("text")
        is_batch = bool(prompt) and isinstance(prompt, list) and isinstance(prompt[0], list | str)
        prompts: Any = prompt if is_batch else [prompt]
        ids: list[list[int]] = []
        for one in prompts:
            ids.append(self.encode(one) if isinstance(one, str) else list(one or ()))
        return ids, is_batch

    async def _sampled_row(self, request: _Request) -> dict[str, Any]:
        generation = await self.sample(
            request.ids, request.sampling, routing_key=request.routing_key, where=request.where
        )
        return self._row(request, generation)

    async def _stream(self, http_request: web.Request, request: _Request) -> web.StreamResponse:
        """Stream a response. Each event has all tokens so far, as SGLang's events."""
        events = Events(http_request)

        async def send(partial: Generation) -> None:
            row = self._row(request._replace(routed_from=None), partial)
            row["meta_info"]["finish_reason"] = None
            await events.send(row)

        try:
            generation = await sample_streamed(
                lambda watch: self.sample(
                    request.ids,
                    request.sampling,
                    routing_key=request.routing_key,
                    watch=watch,
                    where=request.where,
                ),
                send,
            )
        except RlpipeError as error:
            return await events.failed(error)
        await events.send(self._row(request, generation))
        return await events.end()

    def _row(self, request: _Request, generation: Generation) -> dict[str, Any]:
        """Return a response in SGLang's format."""
        ids = generation.response_ids
        pairs = zip(generation.log_probs, ids, strict=True)
        meta = {
            "finish_reason": {"type": generation.finish_reason},
            "prompt_tokens": len(request.ids),
            "completion_tokens": len(ids),
            "cached_tokens": generation.cached_tokens,
            "output_token_logprobs": [[log_prob, token, None] for log_prob, token in pairs],
            "e2e_latency": time.time() - request.start_s,
        }
        if generation.weight_versions:
            meta["weight_version"] = generation.weight_versions[-1][1]
        experts = within(generation.routed_experts, len(request.ids) + len(ids))
        if experts is not None and request.routed_from is not None:
            meta["routed_experts"] = write_rows(experts[request.routed_from :])
        return {
            "text": self.text_of(generation, request.sampling),
            "output_ids": list(ids),
            "meta_info": meta,
        }

    async def _workers(self, request: web.Request) -> web.Response:
        # slime's functions read the engines from the router's list.
        worker = {"id": "gateway", "url": self.url, "is_healthy": True}
        return web.json_response({"workers": [worker]})


def as_list(stops: str | Sequence[str] | None) -> list[str]:
    """Return stop texts as a list; requests may have a single text."""
    return [stops] if isinstance(stops, str) else list(stops or ())


async def _healthy(request: web.Request) -> web.Response:
    return web.Response(text="OK")
