"""Turn an agent's chat conversation into samples, token for token.

A reply keeps its sampled tokens. If the next request repeats all messages so far, including the
reply as the client got it, then its prompt is the tokens of the conversation plus the tokens of the
new messages. Otherwise the request is rendered from the start and begins another sample: a message
was changed, the template rewrites earlier turns, or a second agent uses the session. Two requests
that continue the same reply begin one sample each. Every reply is trained in exactly one sample. A
text completion continues a reply if its prompt repeats the text or the tokens of prompt and reply.

    system user ─ reply 1 ─ tool ─ reply 2          sample 0: prompt │ reply 1 │ tool │ reply 2
                          └ user ─ reply 3          sample 1: prompt, with reply 1 │ reply 3

Entry point: `Conversation`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlpipe.errors import DataError
from rlpipe.rollout.generation import runs_of
from rlpipe.store.routed_experts import num_rows
from rlpipe.types import Message, Sample, Status

_STATUS_OF_REASON = {
    "stop": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
}
_COMPARED_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


class Text(Protocol):
    """Tokenizer with a chat template."""

    def render(self, messages: Sequence[Message], tools: Any, *, prompt: bool) -> str:
        """Return the messages as text; with `prompt` up to the beginning of the assistant's
        message. Raises: DataError if the template refuses the messages."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Reply:
    """Tokens that the engine sampled in one turn."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    """Weight version of each token."""
    finish_reason: str
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """Experts of the tokens from the turn's `routed_from` on."""


@dataclass
class Turn:
    """One request and its reply. Created by `Conversation.ask`."""

    messages: tuple[Message, ...]
    tools: Any
    prompt_ids: tuple[int, ...]
    before: Turn | None
    """The turn that this one continues: the prompt begins with its tokens."""
    prompt_text: str | None = None
    """The prompt of a text completion. None: the request has messages."""
    reply: Reply | None = None
    reply_message: Message | None = None
    """The reply as the client got it."""
    number: int = 0
    continued: bool = field(default=False)
    """True if a later turn continues this one in the same sample."""
    num_routed: int = 0
    """Number of leading tokens with known experts, after the reply."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens up to the end of the reply."""
        assert self.reply is not None
        return (*self.prompt_ids, *self.reply.ids)

    @property
    def routed_from(self) -> int:
        """First token without known experts before the reply."""
        return 0 if self.before is None else self.before.num_routed

    @property
    def routed_experts(self) -> np.ndarray | None:
        """Experts of all tokens that an engine read, over all earlier turns."""
        pieces: list[np.ndarray] = []
        turn: Turn | None = self
        while turn is not None:
            if turn.reply is not None and turn.reply.routed_experts is not None:
                pieces.insert(0, turn.reply.routed_experts[: turn.num_routed - turn.routed_from])
            turn = turn.before
        return np.concatenate(pieces) if pieces else None


class Conversation:
    """One session: `ask` for a prompt, sample, store the `answer`; finally read the `samples`."""

    def __init__(self, text: Text, *, skip_special_tokens: bool = True) -> None:
        """`skip_special_tokens` leaves special tokens out of the samples' `response`. Replies never
        have them."""
        self._text = text
        self._skip_special_tokens = skip_special_tokens
        self._turns: list[Turn] = []

    def __len__(self) -> int:
        """Number of replies so far."""
        return len(self._turns)

    def ask(self, messages: Sequence[Message], tools: Any = None) -> Turn:
        """Return the turn with the prompt tokens for these messages. Raises: DataError."""
        wanted = tuple(_comparable(message) for message in messages)
        # The longest matching conversation first: it has the most sampled tokens.
        for before in sorted(self._turns, key=lambda turn: len(turn.messages), reverse=True):
            held = (*before.messages, before.reply_message)
            if before.prompt_text is not None:
                continue
            if len(held) <= len(wanted) and wanted[: len(held)] == held and before.tools == tools:
                new_text = self._text_after(before, wanted, tools)
                if new_text is not None:
                    ids = (*before.ids, *self._text.encode(new_text))
                    return Turn(wanted, tools, ids, before)
        return Turn(wanted, tools, self._rendered_ids(wanted, tools), None)

    def ask_to_complete(self, prompt: str | Sequence[int]) -> Turn:
        """Return the turn that completes a text or tokens. Raises: DataError without tokens."""
        is_text = isinstance(prompt, str)
        text = prompt if isinstance(prompt, str) else self._decoded(prompt)
        completions = [turn for turn in self._turns if turn.prompt_text is not None]
        for before in sorted(completions, key=lambda turn: len(turn.ids), reverse=True):
            assert before.prompt_text is not None and before.reply is not None
            if is_text:
                held_text = before.prompt_text + self._decoded(before.reply.ids)
                if text.startswith(held_text):
                    ids = (*before.ids, *self._text.encode(text[len(held_text) :]))
                    return Turn((), None, ids, before, text)
            elif tuple(prompt[: len(before.ids)]) == before.ids:
                return Turn((), None, tuple(prompt), before, text)
        ids = tuple(self._text.encode(prompt) if isinstance(prompt, str) else prompt)
        if not ids:
            raise DataError("the prompt has no tokens", where="completions", found=prompt)
        return Turn((), None, ids, None, text)

    def answer(self, turn: Turn, reply: Reply, message: Message) -> None:
        """Store the reply of a turn, and the message that the client gets."""
        turn.reply = reply
        turn.reply_message = _comparable(message)
        turn.number = len(self._turns)
        turn.num_routed = min(turn.routed_from + num_rows(reply.routed_experts), len(turn.ids) - 1)
        self._turns.append(turn)

    def samples(self, template: Callable[[], Sample]) -> list[Sample]:
        """Return the samples, in the order of their last replies. `template` makes a sample without
        tokens."""
        for turn in self._turns:
            turn.continued = False
        chains: list[list[Turn]] = []
        chain_of: dict[int, list[Turn]] = {}
        for turn in self._turns:
            before = turn.before
            chain = None
            if before is not None and not before.continued:
                chain = chain_of.get(id(before))
            if chain is None:
                # First turn, or a second continuation of one reply.
                chain = []
                chains.append(chain)
            elif before is not None:
                before.continued = True
            chain.append(turn)
            chain_of[id(turn)] = chain
        chains.sort(key=lambda chain: chain[-1].number)
        return [self._sample(chain, template()) for chain in chains]

    def _rendered_ids(self, messages: Sequence[Message], tools: Any) -> tuple[int, ...]:
        ids = tuple(self._text.encode(self._text.render(messages, tools, prompt=True)))
        if not ids:
            raise DataError("the messages have no tokens", where="chat.completions", found=messages)
        return ids

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._text.decode(ids, skip_special_tokens=False)

    def _text_after(self, before: Turn, messages: Sequence[Message], tools: Any) -> str | None:
        """Return the text between a turn's reply and the next reply.

        None: the template does not only append to the earlier text.
        """
        assert before.reply_message is not None and before.reply is not None
        held = [*before.messages, before.reply_message]
        prompt = self._text.render(before.messages, tools, prompt=True)
        with_reply = self._text.render(held, tools, prompt=False)
        whole = self._text.render(messages, tools, prompt=True)
        if not (whole.startswith(with_reply) and with_reply.startswith(prompt)):
            return None
        rendered_reply = with_reply[len(prompt) :]
        after_reply = whole[len(with_reply) :]
        sampled = self._decoded(before.reply.ids)
        if rendered_reply.startswith(sampled):
            return rendered_reply[len(sampled) :] + after_reply
        # The template changed the reply, for example trimmed it. The sampled tokens stay; only the
        # template's end of a message may be missing, completely or in part.
        ending = self._message_ending(rendered_reply)
        if ending is None:
            return None
        overlaps = (size for size in range(len(ending), 0, -1) if sampled.endswith(ending[:size]))
        return ending[next(overlaps, 0) :] + after_reply

    def _message_ending(self, rendered_reply: str) -> str | None:
        """Return the text that the template writes after the content of a message."""
        marker = "\x00"
        messages = [{"role": "user", "content": marker}, {"role": "assistant", "content": marker}]
        ending = self._text.render(messages, None, prompt=False).rpartition(marker)[2]
        return ending if rendered_reply.endswith(ending) else None

    def _sample(self, chain: list[Turn], sample: Sample) -> Sample:
        """Fill a sample with the tokens of consecutive turns."""
        log_probs: list[float] = []
        versions: list[int] = []
        loss_mask: list[int] = []
        num_prompt = len(chain[0].prompt_ids)
        for turn in chain:
            assert turn.reply is not None
            # Tokens between two replies: of tools, users and the template.
            num_given = len(turn.prompt_ids) - num_prompt - len(loss_mask)
            log_probs += [*([0.0] * num_given), *turn.reply.log_probs]
            given_versions = [versions[-1]] * num_given if versions else []
            versions += [*given_versions, *turn.reply.versions]
            loss_mask += [*([0] * num_given), *([1] * len(turn.reply.ids))]
        last = chain[-1]
        assert last.reply is not None
        reason = last.reply.finish_reason
        sample.prompt_ids = list(chain[0].prompt_ids)
        sample.response_ids = list(last.ids[num_prompt:])
        sample.rollout_log_probs = log_probs
        sample.loss_mask = loss_mask
        sample.weight_versions = runs_of(versions)
        sample.rollout_routed_experts = last.routed_experts
        sample.prompt = [dict(message) for message in chain[0].messages]
        if chain[0].prompt_text is not None:
            sample.prompt = chain[0].prompt_text
        sample.response = self._text.decode(
            sample.response_ids, skip_special_tokens=self._skip_special_tokens
        )
        sample.finish_reason = reason
        sample.num_turns = len(chain)
        sample.status = _STATUS_OF_REASON.get(reason, Status.COMPLETED)
        return sample


def _comparable(message: Message) -> Message:
    """Return a message in the form in which messages are compared.

    Clients add empty fields, split text into parts and space the JSON of calls differently.
    """
    fields = {
        key: value
        for key, value in message.items()
        if value not in (None, [], {}) and key in _COMPARED_KEYS
    }
    fields.setdefault("content", "")
    if isinstance(fields["content"], list):
        parts = [part for part in fields["content"] if isinstance(part, dict)]
        fields["content"] = "".join(part.get("text", "") for part in parts)
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_comparable_call(call) for call in calls]
    return fields


def _comparable_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise DataError(
            "the arguments of a call are not JSON", where="chat.completions", found=arguments[:200]
        ) from error
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": parsed},
    }
