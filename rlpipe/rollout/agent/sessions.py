"""A conversation in messages, kept in tokens: what an agent says through chat completions becomes
samples, token for token.

A reply's tokens are kept as they were sampled. When the next request repeats the messages so far,
with that reply as it was given out, its prompt is the tokens held plus those of what is new. A
request whose messages do not continue what is held (a message was changed, a template that rewrites
earlier turns, a second agent in the session) is rendered from the start and begins another sample;
two requests that continue the same reply begin one each. Every reply is trained in exactly one
sample.

    system user ─ reply 1 ─ tool ─ reply 2          sample 0: prompt │ reply 1 │ tool │ reply 2
                          └ user ─ reply 3          sample 1: prompt with reply 1 in it │ reply 3

Not here: HTTP and OpenAI's JSON (`openai_api`), what the engine is asked (`gateway`).
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

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


class Text(Protocol):
    """The tokenizer and its chat template."""

    def render(self, messages: Sequence[Message], tools: Any, *, prompt: bool) -> str:
        """The messages as text; `prompt`: up to where the assistant speaks. Raises: DataError if
        the template refuses them."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Reply:
    """What the engine sampled in one turn."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    """One a token."""
    finish_reason: str
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """Of the tokens from its turn's `routed_from` on."""


@dataclass
class Turn:
    """A request that is asked or answered. Make it with `Conversation.ask`."""

    messages: tuple[Message, ...]
    tools: Any
    prompt_ids: tuple[int, ...]
    before: Turn | None
    """The turn whose tokens the prompt begins with."""
    reply: Reply | None = None
    said: Message | None = None
    """The reply as a message, as it was given out."""
    number: int = 0
    continued: bool = field(default=False)
    """Is there a later turn in the same sample?"""
    num_routed: int = 0
    """Tokens, from the first on, whose experts are known after its reply."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens up to the end of the reply."""
        assert self.reply is not None
        return (*self.prompt_ids, *self.reply.ids)

    @property
    def routed_from(self) -> int:
        """The first token whose experts no turn before has named."""
        return 0 if self.before is None else self.before.num_routed

    @property
    def routed_experts(self) -> np.ndarray | None:
        """Of all its tokens, as far as an engine read them."""
        pieces: list[np.ndarray] = []
        turn: Turn | None = self
        while turn is not None:
            if turn.reply is not None and turn.reply.routed_experts is not None:
                pieces.insert(0, turn.reply.routed_experts[: turn.num_routed - turn.routed_from])
            turn = turn.before
        return np.concatenate(pieces) if pieces else None


class Conversation:
    """One session. `ask`, sample, `answer`; then `samples`."""

    def __init__(self, text: Text, *, skip_special_tokens: bool = True) -> None:
        """`skip_special_tokens`: leave them out of the samples' `response`; replies never show
        them."""
        self._text = text
        self._skip_special_tokens = skip_special_tokens
        self._turns: list[Turn] = []

    def __len__(self) -> int:
        """Replies so far."""
        return len(self._turns)

    def ask(self, messages: Sequence[Message], tools: Any = None) -> Turn:
        """The tokens to sample from for these messages. Raises: DataError."""
        wanted = tuple(_plain(message) for message in messages)
        for before in sorted(self._turns, key=lambda turn: len(turn.messages), reverse=True):
            held = (*before.messages, before.said)
            if len(held) <= len(wanted) and wanted[: len(held)] == held and before.tools == tools:
                glue = self._glue(before, wanted, tools)
                if glue is not None:
                    return Turn(wanted, tools, (*before.ids, *self._text.encode(glue)), before)
        return Turn(wanted, tools, self._fresh(wanted, tools), None)

    def answer(self, turn: Turn, reply: Reply, said: Message) -> None:
        """Keep what was sampled for a turn, and the message it was given out as."""
        turn.reply, turn.said, turn.number = reply, _plain(said), len(self._turns)
        turn.num_routed = min(turn.routed_from + num_rows(reply.routed_experts), len(turn.ids) - 1)
        self._turns.append(turn)

    def samples(self, template: Callable[[], Sample]) -> list[Sample]:
        """The samples, in the order their last replies came. `template` makes one without
        tokens."""
        for turn in self._turns:
            turn.continued = False
        chains: list[list[Turn]] = []
        of_turn: dict[int, list[Turn]] = {}
        for turn in self._turns:
            chain = (
                of_turn.get(id(turn.before))
                if turn.before is not None and not turn.before.continued
                else None
            )
            if chain is None:
                chain = []
                chains.append(chain)
            elif turn.before is not None:
                turn.before.continued = True
            chain.append(turn)
            of_turn[id(turn)] = chain
        chains.sort(key=lambda chain: chain[-1].number)
        return [self._sample(chain, template()) for chain in chains]

    def _fresh(self, messages: Sequence[Message], tools: Any) -> tuple[int, ...]:
        ids = tuple(self._text.encode(self._text.render(messages, tools, prompt=True)))
        if not ids:
            raise DataError("the messages have no tokens", where="chat.completions", found=messages)
        return ids

    def _glue(self, before: Turn, messages: Sequence[Message], tools: Any) -> str | None:
        """The text between a reply and the next one. None: the template does not just append."""
        assert before.said is not None and before.reply is not None
        held = [*before.messages, before.said]
        through = self._text.render(held, tools, prompt=False)
        whole = self._text.render(messages, tools, prompt=True)
        start = self._text.render(before.messages, tools, prompt=True)
        if not (whole.startswith(through) and through.startswith(start)):
            return None
        written = through[len(start) :]
        sampled = self._text.decode(before.reply.ids, skip_special_tokens=False)
        if written.startswith(sampled):
            return written[len(sampled) :] + whole[len(through) :]
        ending = self._ending(written, before.said)
        if ending is None:
            return None
        overlap = next(
            (size for size in range(len(ending), 0, -1) if sampled.endswith(ending[:size])), 0
        )
        return ending[overlap:] + whole[len(through) :]

    def _ending(self, written: str, said: Message) -> str | None:
        """What the template writes after a message: the same as after one that only says a mark."""
        mark = "\x00"
        bare = [{"role": "user", "content": mark}, {"role": "assistant", "content": mark}]
        shown = self._text.render(bare, None, prompt=False)
        ending = shown.rpartition(mark)[2]
        return ending if written.endswith(ending) else None

    def _sample(self, chain: list[Turn], sample: Sample) -> Sample:
        sample.prompt_ids = list(chain[0].prompt_ids)
        log_probs: list[float] = []
        versions: list[int] = []
        mask: list[int] = []
        begin = len(sample.prompt_ids)
        for turn in chain:
            assert turn.reply is not None
            given = len(turn.prompt_ids) - begin - len(mask)
            log_probs += [*([0.0] * given), *turn.reply.log_probs]
            versions += [*([versions[-1]] * given if versions else []), *turn.reply.versions]
            mask += [*([0] * given), *([1] * len(turn.reply.ids))]
        last = chain[-1]
        assert last.reply is not None
        sample.response_ids = list(last.ids[begin:])
        sample.rollout_log_probs, sample.loss_mask, sample.weight_versions = (
            log_probs,
            mask,
            runs_of(versions),
        )
        sample.rollout_routed_experts = last.routed_experts
        sample.prompt = [dict(message) for message in chain[0].messages]
        sample.response = self._text.decode(
            sample.response_ids, skip_special_tokens=self._skip_special_tokens
        )
        sample.finish_reason, sample.num_turns = last.reply.finish_reason, len(chain)
        sample.status = STATUS.get(last.reply.finish_reason, Status.COMPLETED)
        return sample


def _plain(message: Message) -> Message:
    """A message as it is compared: only what says something, and a tool call's arguments as JSON,
    whatever its spacing."""
    kept = {
        key: value for key, value in message.items() if value not in (None, [], {}) and key in _KEYS
    }
    kept.setdefault("content", "")
    if isinstance(kept["content"], list):
        kept["content"] = "".join(
            part.get("text", "") for part in kept["content"] if isinstance(part, dict)
        )
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [_plain_call(call) for call in calls]
    return kept


_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
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
