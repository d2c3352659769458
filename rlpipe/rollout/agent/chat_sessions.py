"""Sample the replies of agents, independent of the API that a request uses.

    request ──▶ ReplyRequest ──▶ ChatSessions.replies ──▶ FinishedReply ──▶ answer of the API
                                 │ prompt tokens: Conversation
                                 │ sampled tokens: Gateway
                                 └ reasoning, content, calls: ReplyFormat

In training, the run's settings determine the sampling. Temperature, top_p, top_k and seed of a
request are not applied, because the loss assumes the run's values; in an evaluation they apply.
Headers of each answer say so: `X-RLPipe-Fixed-Sampling` has the run's values and
`X-RLPipe-Not-Applied` the parameters of the request without effect.

Entry point: `ChatSessions`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from aiohttp import web
from jinja2 import TemplateError

from rlpipe.errors import ConfigError, DataError
from rlpipe.rollout.agent.events import sample_streamed
from rlpipe.rollout.agent.gateway import Gateway, as_list
from rlpipe.rollout.agent.replies import (
    GrowingReply,
    PlainReader,
    ReplyFormat,
    ReplyReader,
    ReplyText,
    ToolOffer,
)
from rlpipe.rollout.agent.sessions import Conversation, Reply, Turn
from rlpipe.rollout.client.streaming import Watch
from rlpipe.rollout.generate import version_of
from rlpipe.rollout.generation import Generation
from rlpipe.types import Message, Sample

FIXED_SAMPLING = "X-RLPipe-Fixed-Sampling"
"""Header with the run's sampling parameters, in training."""
NOT_APPLIED = "X-RLPipe-Not-Applied"
"""Header with the parameters of a request that have no effect."""
_FIXED_IN_TRAINING = ("temperature", "top_p", "top_k", "seed")
_NEUTRAL = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Parameters without a value in the run, with the value that changes nothing."""
_NUM_PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt that show if the reply begins inside the reasoning."""


@dataclass(frozen=True)
class ReplyRequest:
    """A request for replies to messages, or for completions of a text."""

    where: str
    """Method and path, for errors."""
    sampling: dict[str, Any]
    """SGLang's sampling parameters."""
    messages: Sequence[Message] = ()
    prompt: str | Sequence[int] | None = None
    """Text or tokens to complete, in place of messages."""
    offer: ToolOffer = field(default_factory=ToolOffer)
    n: int = 1
    num_top_log_probs: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of the answer."""


@dataclass(frozen=True)
class FinishedReply:
    """A complete reply, as the client gets it."""

    text: ReplyText
    reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_text: str | None
    """The stop text that ended the reply."""
    num_prompt_tokens: int
    generation: Generation
    sent: tuple[str, str] = ("", "")
    """Reasoning and content that a stream sent already."""

    @property
    def rest(self) -> tuple[str, str]:
        """Reasoning and content that a stream must still send."""
        reasoning, content = self.sent
        return self.text.reasoning[len(reasoning) :], self.text.content[len(content) :]


class ReplyStream(Protocol):
    """The stream of one reply in the format of an API."""

    async def send(self, reasoning: str, content: str, partial: Generation) -> None:
        """Send new text of an unfinished reply."""
        ...


@dataclass
class Session:
    """The conversations of one rollout."""

    name: str | None
    """None: a request without a session."""
    conversation: Conversation
    responses: dict[str, list[Message]] = field(default_factory=dict)
    """All messages up to a reply of the Responses API, by the reply's id."""


class ChatText:
    """The gateway's tokenizer as `sessions.Text`. `options` are the run's
    `data.apply_chat_template_kwargs`."""

    def __init__(self, gateway: Gateway, options: dict[str, Any]) -> None:
        self._gateway = gateway
        self._options = options

    def render(self, messages: Sequence[Message], tools: Any, *, prompt: bool) -> str:
        """See `sessions.Text`. Raises: ConfigError without a chat template."""
        tokenizer = self._gateway.tokenizer
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template",
                where="model.source",
                found=tokenizer.name_or_path,
                do="use a model with a chat template, or call POST /generate",
            )
        options = {**self._options, "add_generation_prompt": prompt}
        if tools:
            options["tools"] = tools
        # Copied: a template may change the messages.
        copies = [dict(message) for message in messages]
        try:
            return str(tokenizer.apply_chat_template(copies, tokenize=False, **options))
        except (TemplateError, TypeError, LookupError, ValueError, AttributeError) as error:
            raise DataError(
                "the chat template refuses the messages",
                where="chat template",
                found=f"{type(error).__name__}: {error}",
            ) from error

    def encode(self, text: str) -> list[int]:
        """See `sessions.Text`."""
        return self._gateway.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `sessions.Text`."""
        return self._gateway.decode(ids, skip_special_tokens=skip_special_tokens)


class ChatSessions:
    """The sessions of one rollout stage."""

    def __init__(
        self,
        gateway: Gateway,
        sampling: dict[str, Any],
        options: dict[str, Any],
        *,
        model: str,
        evaluation: bool,
        reply_format: ReplyFormat | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        """Create the sessions of a gateway.

        sampling: the rollout's sampling parameters.
        options: the run's `data.apply_chat_template_kwargs`.
        model: the name that the endpoint reports.
        reply_format: None reads no tool calls.
        skip_special_tokens: leave special tokens out of the samples' `response`.
        """
        self.model = model
        self.evaluation = evaluation
        self.gateway = gateway
        self._sampling = sampling
        self._text = ChatText(gateway, options)
        self._format = reply_format
        self._skip_special_tokens = skip_special_tokens
        self._open: dict[str, Session] = {}

    @property
    def has_reasoning(self) -> bool:
        """True if the reasoning of replies is separated from their content."""
        return self._format is not None and self._format.has_reasoning

    def begin(self, sample: Sample) -> None:
        """Open the session of a sample."""
        assert sample.session_id is not None
        conversation = Conversation(self._text, skip_special_tokens=self._skip_special_tokens)
        self._open[sample.session_id] = Session(sample.session_id, conversation)

    def samples(self, sample: Sample) -> list[Sample]:
        """Close the session of a sample and return its samples; empty if it has no replies."""
        session = self._open.pop(sample.session_id or "", None)
        if session is None:
            return []
        return session.conversation.samples(lambda: Sample(session_id=sample.session_id))

    def session_of(self, request: web.Request) -> Session:
        """Return the session of a request. Raises: DataError if it does not exist."""
        name = request.match_info.get("session")
        if name is None:
            return Session(None, Conversation(self._text))
        return self.session(name, request.path)

    def session(self, name: str | None, where: str = "session") -> Session:
        """Return an open session by its name. Raises: DataError if it does not exist."""
        session = self._open.get(name or "")
        if session is None:
            raise DataError(
                "the session does not exist",
                where=where,
                found=name,
                expected="a sample's session_id",
            )
        return session

    def sampling(
        self, where: str, body: dict[str, Any], max_tokens: int | None, stops: Any
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return SGLang's sampling parameters for a request, and headers of the answer.

        Raises: DataError for a parameter that changes the distribution in training.
        """
        sampling = dict(self._sampling)
        wanted = {
            name: body[name]
            for name in (*_FIXED_IN_TRAINING, *_NEUTRAL)
            if body.get(name) is not None
        }
        seed = wanted.pop("seed", None)
        not_applied = [] if seed is None else ["seed"]
        headers: dict[str, str] = {}
        if self.evaluation:
            sampling |= wanted
        else:
            for name, neutral in _NEUTRAL.items():
                if wanted.get(name, neutral) != neutral:
                    raise DataError(
                        "the parameter changes the distribution that training assumes",
                        where=f"{where}: {name}",
                        found=wanted[name],
                        expected=neutral,
                        do="remove it; evaluations apply it",
                    )
            changed = [name for name in wanted if wanted[name] != sampling.get(name, 0.0)]
            not_applied = [*changed, *not_applied]
            fixed = ("temperature", "top_p", "top_k", "max_new_tokens")
            headers[FIXED_SAMPLING] = ", ".join(
                f"{name}={sampling[name]}" for name in fixed if name in sampling
            )
        if not_applied:
            headers[NOT_APPLIED] = ", ".join(not_applied)
        if max_tokens is not None:
            sampling["max_new_tokens"] = min(max_tokens, sampling["max_new_tokens"])
        if stop_texts := as_list(stops):
            sampling["stop"] = [*(sampling.get("stop") or ()), *stop_texts]
        # Replies do not contain the stop text.
        sampling.pop("no_stop_trim", None)
        return sampling, headers

    def count_tokens(self, session: Session, request: ReplyRequest) -> int:
        """Return the number of tokens of the prompt."""
        return len(self._turn(session, request).prompt_ids)

    async def replies(
        self,
        session: Session,
        request: ReplyRequest,
        streams: Sequence[ReplyStream] | None = None,
    ) -> list[FinishedReply]:
        """Sample the replies, store them in the session and return them.

        streams: get the text of one reply each while it is sampled.
        Raises: as `Gateway.sample`. Then the session has no new reply.
        """
        turn = self._turn(session, request)
        # In a thread: the first call imports SGLang's parsers, which takes seconds.
        grammar = await asyncio.to_thread(self._grammar, request)
        request = replace(request, sampling={**request.sampling, **grammar})
        reader_of = await self._reader_of(request, turn, constrained=bool(grammar))
        growing = [self._growing_reply(request, reader_of()) for _ in range(request.n)]
        generations = await _all_or_none(
            self._sampled(
                session, request, turn, growing[index], streams[index] if streams else None
            )
            for index in range(request.n)
        )
        finished: list[FinishedReply] = []
        for generation, grown in zip(generations, growing, strict=True):
            reply = self._finished(request, turn, generation, reader_of(), grown)
            stored = _stored_reply(generation)
            session.conversation.answer(replace(turn), stored, reply.text.message())
            finished.append(reply)
        return finished

    def _turn(self, session: Session, request: ReplyRequest) -> Turn:
        if request.prompt is not None:
            return session.conversation.ask_to_complete(request.prompt)
        messages = [
            # Chat templates have no other name for the developer's messages.
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in request.messages
        ]
        return session.conversation.ask(messages, list(request.offer.tools) or None)

    def _grammar(self, request: ReplyRequest) -> dict[str, Any]:
        """Return the sampling parameters that force the calls of a request."""
        offer = request.offer
        if not offer.reads_calls:
            return {}
        if self._format is None:
            raise ConfigError("the format of tool calls is not set", where=request.where)
        strict = any(tool["function"].get("strict") for tool in offer.tools)
        if offer.choice != "required":
            # As with the temperature: training does not assume a grammar.
            return self._format.grammar(offer) if strict and self.evaluation else {}
        if "json_schema" in request.sampling:
            raise DataError(
                "a reply cannot be a forced call and have a format",
                where=f"{request.where}: tool_choice",
                found=f"{offer.function or offer.choice} with a JSON format",
                expected="one of them",
            )
        return self._format.grammar(offer)

    async def _reader_of(
        self, request: ReplyRequest, turn: Turn, *, constrained: bool
    ) -> Callable[[], ReplyReader]:
        """Return the function that makes a reader for a reply."""
        constrained = constrained or "json_schema" in request.sampling
        offer = request.offer
        reply_format = self._format
        plain = not (offer.reads_calls or self.has_reasoning)
        if reply_format is None or plain or request.prompt is not None:
            return PlainReader
        prompt_end = self.gateway.decode(
            turn.prompt_ids[-_NUM_PROMPT_END_TOKENS:], skip_special_tokens=False
        )

        num_calls = sum(len(message.get("tool_calls") or ()) for message in request.messages)

        def reader() -> ReplyReader:
            return reply_format.reader(
                offer, prompt_end, num_earlier_calls=num_calls, constrained=constrained
            )

        # In a thread: see `replies`.
        await asyncio.to_thread(reader)
        return reader

    def _growing_reply(self, request: ReplyRequest, reader: ReplyReader) -> GrowingReply:
        skip = self._skips_special_tokens(request)
        return GrowingReply(
            lambda ids: self.gateway.decode(ids, skip_special_tokens=skip),
            as_list(request.sampling.get("stop")),
            reader,
            with_tools=request.offer.reads_calls,
        )

    def _skips_special_tokens(self, request: ReplyRequest) -> bool:
        # Some models write calls and reasoning with special tokens.
        return not (request.offer.reads_calls or self.has_reasoning)

    async def _sampled(
        self,
        session: Session,
        request: ReplyRequest,
        turn: Turn,
        growing: GrowingReply,
        stream: ReplyStream | None,
    ) -> Generation:
        async def sample(watch: Watch | None = None) -> Generation:
            return await self.gateway.sample(
                turn.prompt_ids,
                request.sampling,
                routing_key=session.name,
                routed_from=turn.routed_from if self.gateway.routed else 0,
                watch=watch,
                num_top_log_probs=request.num_top_log_probs,
                where=f"session {session.name or '(none)'}, turn {len(session.conversation)}",
            )

        if stream is None:
            return await sample()

        async def send(partial: Generation) -> None:
            reasoning, content = growing.grow(partial.response_ids)
            if reasoning or content:
                await stream.send(reasoning, content, partial)

        return await sample_streamed(sample, send)

    def _finished(
        self,
        request: ReplyRequest,
        turn: Turn,
        generation: Generation,
        reader: ReplyReader,
        growing: GrowingReply,
    ) -> FinishedReply:
        sampling = {
            **request.sampling,
            "skip_special_tokens": self._skips_special_tokens(request),
        }
        text = self.gateway.text_of(generation, sampling)
        whole = self.gateway.text_of(generation, {**sampling, "no_stop_trim": True})
        stops = (stop for stop in as_list(sampling.get("stop")) if stop in whole)
        reply = growing.complete(reader.read(text))
        reason = generation.finish_reason
        if reply.calls:
            reason = "tool_calls"
        elif reason == "abort":
            # The APIs have no `abort`; the reply ends before its end as with `length`.
            reason = "length"
        return FinishedReply(
            reply,
            reason,
            next(stops, None) if generation.finish_reason == "stop" else None,
            len(turn.prompt_ids),
            generation,
            (growing.reasoning, growing.content),
        )


def json_schema_parameters(where: str, kind: str, schema: dict[str, Any] | None) -> dict[str, str]:
    """Return SGLang's sampling parameters for a format of replies: `text`, `json_object` or
    `json_schema`. Raises: DataError if the schema is missing."""
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if schema is None:
        raise DataError("the format has no schema", where=where, expected="a JSON schema")
    return {"json_schema": json.dumps(schema)}


async def _all_or_none(samples: Iterable[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """Return all generations; after an error no sampling continues."""
    tasks = [asyncio.create_task(sample) for sample in samples]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _stored_reply(generation: Generation) -> Reply:
    versions = [
        version_of(stamp, "session")
        for tokens, stamp in generation.weight_versions
        for _ in range(tokens)
    ]
    return Reply(
        ids=tuple(generation.response_ids),
        log_probs=tuple(generation.log_probs),
        versions=tuple(versions),
        finish_reason=generation.finish_reason,
        routed_experts=generation.routed_experts,
    )
