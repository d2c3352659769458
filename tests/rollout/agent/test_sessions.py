"""A conversation in messages becomes samples, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rlpipe.rollout.agent.sessions import Conversation, Reply
from rlpipe.types import Message, Sample, Status

END = "#"


class _Letters:
    """One token per letter, and a template like ChatML, `u:hello#a:`, that trims contents."""

    def __init__(self, *, forgets: bool = False) -> None:
        self.forgets = forgets

    def render(self, messages: Sequence[Message], tools: Any, *, prompt: bool) -> str:
        text = ""
        for number, message in enumerate(messages):
            earlier = self.forgets and message["role"] == "assistant" and number < len(messages) - 1
            content = message["content"].rpartition(")")[2] if earlier else message["content"]
            text += f"{message['role'][0]}:{content.strip()}{END}\n"
        return text + ("a:" if prompt else "")

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = "".join(map(chr, ids))
        return text.replace(END, "") if skip_special_tokens else text


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


class _Agent:
    """An agent that chats in one session."""

    def __init__(self, text: _Letters) -> None:
        self.text, self.conversation, self.version = text, Conversation(text), 0

    def say(
        self,
        messages: list[Message],
        sampled: str,
        given_out: str | None = None,
        reason: str = "stop",
    ) -> str:
        turn = self.conversation.ask(messages)
        ids = tuple(map(ord, sampled))
        self.version += 1
        experts = (
            np.stack([np.arange(len(turn.prompt_ids) + len(ids) - 1)] * 2, 1).astype(np.uint16)
            + 1000 * self.version
        )
        reply = Reply(
            ids,
            (-float(self.version),) * len(ids),
            (self.version,) * len(ids),
            reason,
            experts[turn.routed_from :],
        )
        self.conversation.answer(
            turn, reply, _said(sampled.replace(END, "") if given_out is None else given_out)
        )
        return "".join(map(chr, turn.prompt_ids))

    def samples(self) -> list[Sample]:
        return self.conversation.samples(Sample)


def _shown(sample: Sample) -> tuple[str, str]:
    assert sample.loss_mask is not None and sample.rollout_log_probs is not None
    assert (
        sum(tokens for tokens, _ in sample.weight_versions)
        == len(sample.response_ids)
        == len(sample.rollout_log_probs)
    )
    pairs = zip(sample.response_ids, sample.loss_mask, strict=True)
    return "".join(map(chr, sample.prompt_ids)), "".join(
        chr(token) if counts else "." for token, counts in pairs
    )


def test_a_continued_conversation_is_one_sample():
    agent = _Agent(_Letters())
    first = agent.say([_user("hi")], "yes#")
    second = agent.say([_user("hi"), _said("yes"), _user("so")], "ok#")
    assert (first, second) == ("u:hi#\na:", "u:hi#\na:yes#\nu:so#\na:")
    (sample,) = agent.samples()
    assert _shown(sample) == ("u:hi#\na:", "yes#" + "." * 9 + "ok#")
    assert (
        sample.weight_versions == [(4 + 9, 1), (3, 2)]
        and sample.num_turns == 2
        and sample.status is Status.COMPLETED
    )
    assert [value for value in sample.rollout_log_probs or [] if value] == [-1.0] * 4 + [-2.0] * 3


@pytest.mark.parametrize(
    ("sampled", "given_out", "reason", "glue"),
    [
        (" yes #", " yes ", "stop", "\nu:so#\na:"),
        ("yes", "yes", "length", "#\nu:so#\na:"),
        ("yes STOP", "yes ", "stop", "#\nu:so#\na:"),
    ],
)
def test_sampled_tokens_are_kept_if_the_template_changes_their_text(
    sampled, given_out, reason, glue
):
    agent = _Agent(_Letters())
    agent.say([_user("hi")], sampled, given_out, reason)
    assert (
        agent.say([_user("hi"), _said(given_out), _user("so")], "ok#")
        == "u:hi#\na:" + sampled + glue
    )


def test_a_reply_that_the_template_rewrites_begins_another_sample():
    agent = _Agent(_Letters(forgets=True))
    agent.say([_user("hi")], "(hm)yes#")
    assert (
        agent.say([_user("hi"), _said("(hm)yes"), _user("so")], "ok#") == "u:hi#\na:yes#\nu:so#\na:"
    )
    assert [_shown(sample) for sample in agent.samples()] == [
        ("u:hi#\na:", "(hm)yes#"),
        ("u:hi#\na:yes#\nu:so#\na:", "ok#"),
    ]


def test_a_request_with_other_tools_does_not_continue_a_reply():
    agent = _Agent(_Letters())
    agent.say([_user("hi")], "yes#")
    messages = [_user("hi"), _said("yes"), _user("so")]
    assert agent.conversation.ask(messages).before is not None
    assert agent.conversation.ask(messages, [{"type": "function"}]).before is None


def test_two_continuations_of_one_reply_are_two_samples_with_the_same_first_tokens():
    agent = _Agent(_Letters())
    agent.say([_user("hi")], " yes#", " yes")
    agent.say([_user("hi"), _said(" yes"), _user("a")], "1#")
    agent.say([_user("hi"), _said(" yes"), _user("b")], "2#")
    agent.say([_user("hi"), _said(" yes"), _user("a"), _said("1"), _user("c")], "3#")
    shown = [_shown(sample) for sample in agent.samples()]
    assert shown == [
        ("u:hi#\na: yes#\nu:b#\na:", "2#"),
        ("u:hi#\na:", " yes#" + "." * 8 + "1#" + "." * 8 + "3#"),
    ]


def test_a_branched_sample_has_the_experts_of_the_tokens_before_the_branch():
    agent = _Agent(_Letters())
    hello = [_user("one")]
    agent.say(hello, "two#")
    agent.say([*hello, _said("two"), _user("three")], "four#")
    agent.say([*hello, _said("two"), _user("other")], "five#")
    first, second = agent.samples()
    held = len("u:one#\na:two#") - 1
    for sample, version in ((first, 2), (second, 3)):
        tokens = len(sample.prompt_ids) + len(sample.response_ids)
        wanted = [place + 1000 * (1 if place < held else version) for place in range(tokens - 1)]
        assert sample.rollout_routed_experts[:, 1].tolist() == wanted


def test_changed_messages_begin_another_sample():
    agent = _Agent(_Letters())
    agent.say([_user("hi")], "yes#")
    assert agent.say([_user("hi"), _said("no"), _user("so")], "ok#") == "u:hi#\na:no#\nu:so#\na:"
    assert len(agent.samples()) == 2


def test_additional_fields_of_a_clients_messages_are_ignored():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    conversation = Conversation(_Letters())
    turn = conversation.ask([_user("hi")])
    conversation.answer(
        turn,
        Reply((1,), (-1.0,), (0,), "stop"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
    )
    spaced = {**call, "function": {"name": "f", "arguments": '{"a": 1}'}}
    echoed = {
        "role": "assistant",
        "content": "",
        "tool_calls": [spaced],
        "refusal": None,
        "audio": None,
        "annotations": [],
    }
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert conversation.ask([parts, echoed, _user("so")]).before is turn
