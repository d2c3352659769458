"""OpenAI's chat completions over the engines: what an unmodified client sends and reads.

    {gateway}/sessions/<session id>/v1     one rollout: its replies become samples (`sessions`)
    {gateway}/v1                           without memory

In training the run decides how it is sampled: temperature, top_p and top_k of a request are left
aside, because the loss reckons with the run's. In an evaluation they count. `max_tokens`,
`max_completion_tokens`, `stop`, `tools` and `logprobs` are honoured; `n` above 1 and a
`tool_choice` that forces a call are refused. With `stream` the reply comes as it is sampled. A
reply's logprobs carry `token_id`. Tool calls are read as Hermes and Qwen models write them.

Not here: the conversation (`sessions`), requests to the engines (`gateway`), what of a stream goes
out when (`openai_stream`).
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
from rlpipe.rollout.agent.events import followed
from rlpipe.rollout.agent.gateway import Gateway
from rlpipe.rollout.agent.openai_stream import TOOL_CALL, ChatStream, begun_with
from rlpipe.rollout.agent.requests import Chat, read_body
from rlpipe.rollout.agent.sessions import Conversation, Reply, Turn
from rlpipe.rollout.generate import version_of
from rlpipe.rollout.generation import Generation
from rlpipe.rollout.tool_calls import read_hermes, without_calls
from rlpipe.types import Message, Sample

_TAKEN_IN_EVALUATION = (
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
            do = "use a model with one, or ask POST /generate"
            raise ConfigError(
                "the tokenizer has no chat template",
                where="model.source",
                found=tokenizer.name_or_path,
                do=do,
            )
        options = {
            **self._options,
            **({"tools": tools} if tools else {}),
            "add_generation_prompt": prompt,
        }
        try:
            return str(
                tokenizer.apply_chat_template(
                    [dict(one) for one in messages], tokenize=False, **options
                )
            )
        except (TemplateError, TypeError, LookupError, ValueError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise DataError(
                "the chat template refuses the messages", where="chat.completions", found=found
            ) from error

    def encode(self, text: str) -> list[int]:
        """See `sessions.Text`."""
        return self._gateway.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `sessions.Text`."""
        return self._gateway.decode(ids, skip_special_tokens=skip_special_tokens)


class ChatSessions:
    """The sessions of one rollout, and the routes that lead to them."""

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
        """`sampling` are the rollout's own parameters, `model` is what the endpoint says it serves.
        `skip_special_tokens`: leave them out of the samples' `response`."""
        self._gateway = gateway
        self._sampling = sampling
        self._model = model
        self._evaluation = evaluation
        self._text = ChatText(gateway, options)
        self._skip_special_tokens = skip_special_tokens
        self._open: dict[str, Conversation] = {}

    def routes(self) -> list[web.RouteDef]:
        """To be added to the gateway's."""
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
        """What was said in a sample's session, which is over then; empty if nothing was."""
        conversation = self._open.pop(sample.session_id or "", None)
        return (
            conversation.samples(lambda: Sample(session_id=sample.session_id))
            if conversation
            else []
        )

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "rlpipe"}
        return web.json_response({"object": "list", "data": [entry]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, Chat)
        session = request.match_info.get("session")
        conversation = Conversation(self._text) if session is None else self._open.get(session)
        if conversation is None:
            raise DataError(
                "there is no such session",
                where=str(request.path),
                found=session,
                expected="a sample's session_id",
            )
        _refuse_what_is_not_there(body)
        sampling = self._parameters(body)
        turn = conversation.ask(body["messages"], body.get("tools") or None)
        where = f"session {session or 'of none'}, turn {len(conversation)}"
        known = turn.routed_from if self._gateway.routed else 0
        keep: dict[str, Any] = {"routing_key": session, "routed_from": known, "where": where}
        sample = partial(self._gateway.sample, turn.prompt_ids, sampling, **keep)
        head = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": body.get("model") or self._model,
        }
        if body.get("stream"):
            stream = self._stream(request, head, sampling, body)
            try:
                generation = await followed(lambda watch: sample(watch=watch), stream.tell)
            except RlpipeError as error:
                return await stream.events.failed(error)
            message, reason = self._keep(
                conversation, turn, generation, sampling, body, stream.sent
            )
            wanted = (body.get("stream_options") or {}).get("include_usage")
            usage = _usage(turn, generation) if wanted else None
            return await stream.finish(
                message, generation.response_ids, generation.log_probs, reason, usage
            )
        generation = await sample()
        message, reason = self._keep(conversation, turn, generation, sampling, body, "")
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": reason,
            "logprobs": None,
        }
        if body.get("logprobs"):
            pairs = zip(generation.response_ids, generation.log_probs, strict=True)
            choice["logprobs"] = {
                "content": [self._log_prob(token, value) for token, value in pairs]
            }
        answer = {
            **head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(turn, generation),
        }
        return web.json_response(answer)

    def _stream(
        self,
        request: web.Request,
        head: dict[str, Any],
        sampling: dict[str, Any],
        body: dict[str, Any],
    ) -> ChatStream:
        given = sampling.get("stop") or ()
        return ChatStream(
            request,
            head,
            self._gateway.decode,
            stops=[given] if isinstance(given, str) else list(given),
            with_tools=bool(body.get("tools")),
            log_prob=self._log_prob if body.get("logprobs") else None,
        )

    def _parameters(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = dict(self._sampling)
        if self._evaluation:
            sampling |= {
                name: body[name] for name in _TAKEN_IN_EVALUATION if body.get(name) is not None
            }
        longest = body.get("max_completion_tokens") or body.get("max_tokens")
        if longest is not None:
            sampling["max_new_tokens"] = min(int(longest), sampling["max_new_tokens"])
        stops = body.get("stop") or []
        if stops:
            sampling["stop"] = [
                *(sampling.get("stop") or ()),
                *([stops] if isinstance(stops, str) else stops),
            ]
        sampling.pop("no_stop_trim", None)
        return sampling

    def _keep(
        self,
        conversation: Conversation,
        turn: Turn,
        generation: Generation,
        sampling: dict[str, Any],
        body: dict[str, Any],
        sent: str,
    ) -> tuple[Message, str]:
        """The reply as it is given out and kept, and OpenAI's finish reason. `sent`: what of its
        text is out already."""
        text = self._gateway.text_of(generation, {**sampling, "skip_special_tokens": True})
        message, reason = _message(
            text, generation.finish_reason, with_tools=bool(body.get("tools"))
        )
        message = begun_with(message, sent)
        versions = [
            version_of(stamp, "session")
            for tokens, stamp in generation.weight_versions
            for _ in range(tokens)
        ]
        ids = tuple(generation.response_ids)
        log_probs = tuple(generation.log_probs)
        reply = Reply(
            ids, log_probs, tuple(versions), generation.finish_reason, generation.routed_experts
        )
        conversation.answer(turn, reply, message)
        return message, reason

    def _log_prob(self, token: int, value: float) -> dict[str, Any]:
        text = self._gateway.decode([token], skip_special_tokens=False)
        return {
            "token": text,
            "token_id": token,
            "logprob": value,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }


def _message(text: str, reason: str, *, with_tools: bool) -> tuple[Message, str]:
    """The assistant's message, and OpenAI's finish reason. A call that cannot be read stays
    text."""
    calls = (
        [
            read_hermes(part.partition("</tool_call>")[0].strip())
            for part in text.split(TOOL_CALL)[1:]
        ]
        if with_tools
        else []
    )
    if calls and all(call.error is None for call in calls):
        said = [
            {
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in calls
        ]
        return {
            "role": "assistant",
            "content": without_calls(text) or None,
            "tool_calls": said,
        }, "tool_calls"
    return {"role": "assistant", "content": text}, "length" if reason == "abort" else reason


def _refuse_what_is_not_there(body: dict[str, Any]) -> None:
    if (body.get("n") or 1) != 1:
        raise DataError(
            "one reply a request",
            where="chat.completions",
            found=f"n: {body['n']}",
            expected="n: 1, or more requests",
        )
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise DataError(
            "a call cannot be forced",
            where="chat.completions",
            found=body["tool_choice"],
            expected="auto or none",
        )
    if body.get("response_format") not in (None, {"type": "text"}):
        raise DataError(
            "replies are free text",
            where="chat.completions",
            found=body["response_format"],
            expected="type: text",
        )


def _usage(turn: Turn, generation: Generation) -> dict[str, int]:
    prompt = len(turn.prompt_ids)
    completion = len(generation.response_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
