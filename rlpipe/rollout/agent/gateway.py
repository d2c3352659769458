"""The engines as a function of the user sees them: a server on the loopback, open while one rollout
runs.

    POST /generate                                 SGLang's, by `input_ids` or `text`, one or several, one also as a stream
    POST /v1/chat/completions                      OpenAI's, without memory
    POST /sessions/<id>/v1/chat/completions        OpenAI's, as one rollout: see `sessions`
    GET  …/v1/models, /workers, /health

What is asked goes through the run's own client: it waits while weights are pushed, goes on after an
abort, is asked again when an engine dies, and is refused when it would end an engine. What is
answered is in the journal. Each rollout has a port of its own, so it is known whose a request is.

Not here: the conversation behind a session (`sessions`), OpenAI's JSON (`openai_api`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from rlpipe.errors import DataError, DeadlineExceeded, EngineRejected, RlpipeError
from rlpipe.rollout.agent.events import Events, followed
from rlpipe.rollout.agent.requests import Generate, read_body
from rlpipe.rollout.client.generate_client import GenerateClient
from rlpipe.rollout.client.streaming import Watch
from rlpipe.rollout.generate import version_of
from rlpipe.rollout.generation import Generation
from rlpipe.rollout.hooks.journal import Answer, Journal
from rlpipe.store.routed_experts import within, write_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""
_LARGEST_REQUEST_BYTES = 256 * 1024**2
_ROUTING_HEADER = "X-SMG-Routing-Key"


class Gateway:
    """An async context manager. `address` is (host, port) while it is open; `stop` as in
    `GenerateClient.generate`."""

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
    ) -> None:
        """`affinity`: hand the callers' routing keys on to the router. `routed`: have the engines
        say which experts they routed tokens to. `routes`: further ones, beside those of SGLang."""
        self.client = client
        self.tokenizer = tokenizer
        self.context_len = context_len
        self.stop = stop
        self.affinity = affinity
        self.routed = routed
        self._routes = routes
        self.journal = Journal()
        self.address = ("127.0.0.1", 0)
        self._open = AsyncExitStack()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self.address[0]}:{self.address[1]}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_LARGEST_REQUEST_BYTES, middlewares=[_errors_as_json])
        app.add_routes([web.post("/generate", self._generate), web.get("/workers", self._workers)])
        app.add_routes([web.get("/health", _healthy), *self._routes(self)])
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        await runner.setup()
        self._open.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, self.address[0], 0)
        await site.start()
        self.address = runner.addresses[0]
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._open.aclose()

    async def sample(
        self,
        ids: Sequence[int],
        sampling: dict[str, Any],
        *,
        routing_key: str | None = None,
        routed_from: int = 0,
        watch: Watch | None = None,
        where: str = "generate",
    ) -> Generation:
        """One response, which is in the journal then. `routed_from`: first token whose experts are
        wanted, where any are. `watch`: told of it while it is sampled.

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
        wanted = sampling.get("max_new_tokens")
        params = {
            **sampling,
            "max_new_tokens": min(_DEFAULT_MAX_NEW_TOKENS if wanted is None else wanted, room),
        }
        keep: dict[str, Any] = {
            "stop": self.stop,
            "routing_key": routing_key if self.affinity else None,
        }
        if self.routed:
            keep["routed_from"] = routed_from
        if watch is not None:
            keep["watch"] = watch
        (generation,) = await self.client.generate(ids, params, **keep, where=where)
        runs = tuple(
            (tokens, version_of(stamp, where)) for tokens, stamp in generation.weight_versions
        )
        sampled = (tuple(generation.response_ids), tuple(generation.log_probs), runs)
        routed = generation.routed_experts
        self.journal.add(ids, Answer(*sampled, routed, routed_from))
        return generation

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands. Raises: DataError for half a character, which no
        tokenizer takes."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                "text with half a character", where="gateway", found=str(error)
            ) from error
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def text_of(self, generation: Generation, sampling: dict[str, Any]) -> str:
        """The text as SGLang gives it: without what stopped it, unless `no_stop_trim`."""
        ids = generation.response_ids
        keep = bool(sampling.get("no_stop_trim"))
        skip = sampling.get("skip_special_tokens", True)
        if (
            not keep
            and generation.finish_reason == "stop"
            and ids
            and ids[-1] in self._ends(sampling)
        ):
            ids = ids[:-1]
        text = self.decode(ids, skip_special_tokens=skip)
        stops = sampling.get("stop") or ()
        for stop in () if keep else [stops] if isinstance(stops, str) else stops:
            text = text.partition(stop)[0]
        return text

    def _ends(self, sampling: dict[str, Any]) -> set[int]:
        return {*self.client.end_ids, *(sampling.get("stop_token_ids") or ())}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body: Any = await read_body(request, Generate)
        if (named := bool(body.get("return_routed_experts"))) and not self.routed:
            do = "set train.use_rollout_routing_replay; an evaluation has none"
            raise DataError(
                "engines do not say their routing here",
                where="POST /generate",
                found="return_routed_experts",
                do=do,
            )
        given = body.get("input_ids") if body.get("input_ids") is not None else body.get("text")
        several = bool(given) and isinstance(given, list) and isinstance(given[0], list | str)
        prompts = given if several else [given]
        sampling = dict(body.get("sampling_params") or {})
        start_s = time.time()
        copies = int(sampling.pop("n", 1) or 1)
        key = request.headers.get(_ROUTING_HEADER)
        once: list[list[int]] = [
            self.encode(one) if isinstance(one, str) else list(one or ()) for one in prompts
        ]
        ids = [one for one in once for _ in range(copies)]
        first = int(body.get("routed_experts_start_len") or 0) if named else None
        if body.get("stream"):
            if len(ids) != 1:
                raise DataError(
                    "one response a stream",
                    where="POST /generate",
                    found=f"{len(ids)}, stream: true",
                    expected=1,
                )
            return await self._streamed(request, ids[0], sampling, key, first)
        answers = await asyncio.gather(
            *(
                self.sample(
                    one, sampling, routing_key=key, where=f"POST /generate with {len(one)} tokens"
                )
                for one in ids
            )
        )
        rows = [
            self._row(one, answer, sampling, start_s, first)
            for one, answer in zip(ids, answers, strict=True)
        ]
        return web.json_response(rows if several or copies > 1 else rows[0])

    async def _streamed(
        self,
        request: web.Request,
        ids: list[int],
        sampling: dict[str, Any],
        key: str | None,
        routed_from: int | None,
    ) -> web.StreamResponse:
        """Each event has all there is so far, as SGLang's have."""
        events = Events(request)
        start_s = time.time()

        async def tell(part: Generation) -> None:
            row = self._row(ids, part, sampling, start_s, None)
            row["meta_info"]["finish_reason"] = None
            await events.send(row)

        where = f"POST /generate with {len(ids)} tokens"
        try:
            answer = await followed(
                lambda watch: self.sample(ids, sampling, routing_key=key, watch=watch, where=where),
                tell,
            )
        except RlpipeError as error:
            return await events.failed(error)
        await events.send(self._row(ids, answer, sampling, start_s, routed_from))
        return await events.end()

    def _row(
        self,
        ids: list[int],
        answer: Generation,
        sampling: dict[str, Any],
        start_s: float,
        routed_from: int | None,
    ) -> dict[str, Any]:
        pairs = zip(answer.log_probs, answer.response_ids, strict=True)
        meta = {
            "finish_reason": {"type": answer.finish_reason},
            "prompt_tokens": len(ids),
            "completion_tokens": len(answer.response_ids),
            "cached_tokens": answer.cached_tokens,
            "output_token_logprobs": [[log_prob, token, None] for log_prob, token in pairs],
            "e2e_latency": time.time() - start_s,
        }
        if answer.weight_versions:
            meta["weight_version"] = answer.weight_versions[-1][1]
        routed = within(answer.routed_experts, len(ids) + len(answer.response_ids))
        if routed is not None and routed_from is not None:
            meta["routed_experts"] = write_rows(routed[routed_from:])
        return {
            "text": self.text_of(answer, sampling),
            "output_ids": list(answer.response_ids),
            "meta_info": meta,
        }

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"workers": [{"id": "gateway", "url": self.url, "is_healthy": True}]}
        )


async def _healthy(request: web.Request) -> web.Response:
    return web.Response(text="OK")


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Any]
) -> web.StreamResponse:
    """400 for what was asked wrongly, 504 and 503 for engines that do not answer; the body is
    shaped as OpenAI's is."""
    try:
        return await handler(request)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        EngineRejected,
    ) as error:
        return _problem(400, error)
    except DeadlineExceeded as error:
        return _problem(504, error)
    except RlpipeError as error:
        return _problem(503, error)


def _problem(status: int, error: Exception) -> web.Response:
    message = str(error) if isinstance(error, RlpipeError) else f"{type(error).__name__}: {error}"
    return web.json_response(
        {"error": {"message": message, "type": type(error).__name__, "code": status}}, status=status
    )
