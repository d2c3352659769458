"""Serve OpenAI's chat completions to unmodified clients.

    {gateway}/sessions/<session id>/v1     one rollout: its replies become samples
    {gateway}/v1                           without a session

In training, the run's settings determine the sampling. Temperature, top_p and top_k of a request
are ignored, because the loss assumes the run's values; in an evaluation they apply. `max_tokens`,
`max_completion_tokens`, `stop`, `tools` and `logprobs` apply always. `n` above 1 and a
`tool_choice` that forces a call are refused. With `stream` the reply is sent while it is sampled.
The logprobs of a reply have the additional field `token_id`. Tool calls are read in the format of
Hermes and Qwen models.

Entry point: `ChatSessions`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from aiohttp import web
from jinja2 import TemplateError

from rlpipe.errors import ConfigError, DataError, RlpipeError
from rlpipe.rollout.agent.events import sample_streamed
from rlpipe.rollout.agent.gateway import Gateway, as_list
from rlpipe.rollout.agent.openai_stream import TOOL_CALL, ChatStream, with_sent_prefix
from rlpipe.rollout.agent.request_models import ChatRequest, read_body
from rlpipe.rollout.agent.sessions import Conversation, Reply, Turn
from rlpipe.rollout.generate import version_of
from rlpipe.rollout.generation import Generation
from rlpipe.rollout.tool_calls import read_hermes, without_calls
from rlpipe.types import Message, Sample

_APPLIED_IN_EVALUATION = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
)


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
                where="chat.completions",
                found=f"{type(error).__name__}: {error}",
            ) from error

    def encode(self, text: str) -> list[int]:
        """See `sessions.Text`."""
        return self._gateway.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `sessions.Text`."""
        return self._gateway.decode(ids, skip_special_tokens=skip_special_tokens)


class ChatSessions:
    """The sessions of one rollout stage, and their HTTP routes."""

    def __init__(
        self,
        gateway: Gateway,
        sampling: dict[str, Any],
        options: dict[str, Any],
        *,
        model: str,
        evaluation: bool,
        skip_special_tokens: bool = True,
    ) -> None:
        """Create the routes' handlers.

        sampling: the rollout's sampling parameters.
        options: the run's `data.apply_chat_template_kwargs`.
        model: the name that the endpoint reports.
        skip_special_tokens: leave special tokens out of the samples' `response`.
        """
        self._gateway = gateway
        self._sampling = sampling
        self._model = model
        self._evaluation = evaluation
        self._text = ChatText(gateway, options)
        self._skip_special_tokens = skip_special_tokens
        self._open: dict[str, Conversation] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes to add to the gateway."""
        return [
            web.post("/v1/chat/completions", self._complete),
            web.post("/sessions/{session}/v1/chat/completions", self._complete),
            web.get("/v1/models", self._models),
            web.get("/sessions/{session}/v1/models", self._models),
        ]

    def begin(self, sample: Sample) -> None:
        """Open the session of a sample."""
        assert sample.session_id is not None
        self._open[sample.session_id] = Conversation(
            self._text, skip_special_tokens=self._skip_special_tokens
        )

    def samples(self, sample: Sample) -> list[Sample]:
        """Close the session of a sample and return its samples; empty if it has no replies."""
        conversation = self._open.pop(sample.session_id or "", None)
        if not conversation:
            return []
        return conversation.samples(lambda: Sample(session_id=sample.session_id))

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "rlpipe"}
        return web.json_response({"object": "list", "data": [entry]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, ChatRequest)
        session = request.match_info.get("session")
        conversation = Conversation(self._text) if session is None else self._open.get(session)
        if conversation is None:
            raise DataError(
                "the session does not exist",
                where=str(request.path),
                found=session,
                expected="a sample's session_id",
            )
        _refuse_unsupported(body)
        sampling = self._parameters(body)
        turn = conversation.ask(body["messages"], body.get("tools") or None)
        sample = partial(
            self._gateway.sample,
            turn.prompt_ids,
            sampling,
            routing_key=session,
            routed_from=turn.routed_from if self._gateway.routed else 0,
            where=f"session {session or '(none)'}, turn {len(conversation)}",
        )
        head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": body.get("model") or self._model,
        }
        answer = partial(self._answer, conversation, turn, sampling, body)
        if not body.get("stream"):
            generation = await sample()
            message, reason = answer(generation, "")
            return self._completion(head, body, turn, generation, message, reason)
        stream = self._stream(request, head, sampling, body)
        try:
            generation = await sample_streamed(lambda watch: sample(watch=watch), stream.send)
        except RlpipeError as error:
            return await stream.events.failed(error)
        message, reason = answer(generation, stream.sent)
        wants_usage = (body.get("stream_options") or {}).get("include_usage")
        usage = _usage(turn, generation) if wants_usage else None
        return await stream.finish(
            message, generation.response_ids, generation.log_probs, reason, usage
        )

    def _completion(
        self,
        head: dict[str, Any],
        body: dict[str, Any],
        turn: Turn,
        generation: Generation,
        message: Message,
        reason: str,
    ) -> web.Response:
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": reason,
            "logprobs": None,
        }
        if body.get("logprobs"):
            pairs = zip(generation.response_ids, generation.log_probs, strict=True)
            entries = [self._log_prob(token, log_prob) for token, log_prob in pairs]
            choice["logprobs"] = {"content": entries}
        completion = {
            **head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(turn, generation),
        }
        return web.json_response(completion)

    def _stream(
        self,
        request: web.Request,
        head: dict[str, Any],
        sampling: dict[str, Any],
        body: dict[str, Any],
    ) -> ChatStream:
        return ChatStream(
            request,
            head,
            self._gateway.decode,
            stops=as_list(sampling.get("stop")),
            with_tools=bool(body.get("tools")),
            log_prob=self._log_prob if body.get("logprobs") else None,
        )

    def _parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return SGLang's sampling parameters for a request."""
        sampling = dict(self._sampling)
        if self._evaluation:
            sampling |= {
                name: body[name] for name in _APPLIED_IN_EVALUATION if body.get(name) is not None
            }
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        if max_tokens is not None:
            sampling["max_new_tokens"] = min(int(max_tokens), sampling["max_new_tokens"])
        if stops := as_list(body.get("stop")):
            sampling["stop"] = [*(sampling.get("stop") or ()), *stops]
        # OpenAI's replies do not contain the stop text.
        sampling.pop("no_stop_trim", None)
        return sampling

    def _answer(
        self,
        conversation: Conversation,
        turn: Turn,
        sampling: dict[str, Any],
        body: dict[str, Any],
        generation: Generation,
        sent: str,
    ) -> tuple[Message, str]:
        """Store a reply in its session; return the message and OpenAI's finish reason.

        `sent` is the text that a stream sent already.
        """
        text = self._gateway.text_of(generation, {**sampling, "skip_special_tokens": True})
        with_tools = bool(body.get("tools"))
        message, reason = _message(text, generation.finish_reason, with_tools=with_tools)
        message = with_sent_prefix(message, sent)
        versions = [
            version_of(stamp, "session")
            for tokens, stamp in generation.weight_versions
            for _ in range(tokens)
        ]
        reply = Reply(
            ids=tuple(generation.response_ids),
            log_probs=tuple(generation.log_probs),
            versions=tuple(versions),
            finish_reason=generation.finish_reason,
            routed_experts=generation.routed_experts,
        )
        conversation.answer(turn, reply, message)
        return message, reason

    def _log_prob(self, token: int, log_prob: float) -> dict[str, Any]:
        text = self._gateway.decode([token], skip_special_tokens=False)
        return {
            "token": text,
            "token_id": token,
            "logprob": log_prob,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }


def _message(text: str, reason: str, *, with_tools: bool) -> tuple[Message, str]:
    """Return the assistant's message and OpenAI's finish reason.

    If a tool call cannot be read, the message has the text of all calls.
    """
    call_texts = text.split(TOOL_CALL)[1:] if with_tools else []
    calls = [read_hermes(part.partition("</tool_call>")[0].strip()) for part in call_texts]
    if not calls or any(call.error is not None for call in calls):
        message = {"role": "assistant", "content": text}
        # OpenAI has no `abort`; the reply ends before its end as with `length`.
        return message, "length" if reason == "abort" else reason
    tool_calls = [
        {
            "id": f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in calls
    ]
    content = without_calls(text) or None
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}, "tool_calls"


def _refuse_unsupported(body: dict[str, Any]) -> None:
    where = "chat.completions"
    if (body.get("n") or 1) != 1:
        raise DataError(
            "a request has one reply",
            where=where,
            found=f"n: {body['n']}",
            expected="n: 1, or several requests",
        )
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise DataError(
            "tool_choice cannot force a call",
            where=where,
            found=body["tool_choice"],
            expected="auto or none",
        )
    if body.get("response_format") not in (None, {"type": "text"}):
        raise DataError(
            "response_format must be text",
            where=where,
            found=body["response_format"],
            expected="type: text",
        )


def _usage(turn: Turn, generation: Generation) -> dict[str, int]:
    prompt_tokens = len(turn.prompt_ids)
    completion_tokens = len(generation.response_ids)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
