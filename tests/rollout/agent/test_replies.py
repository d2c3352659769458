"""Text of an unfinished reply that is sent is the beginning of the finished reply."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.rollout.agent.replies import (
    GrowingReply,
    GrowingText,
    PlainReader,
    ReplyText,
    ToolCall,
    stable_prefix,
    with_sent_prefix,
)


@given(st.text(alphabet="ab é€😀\n<tol_c>", max_size=30), st.data())
def test_sent_text_of_a_growing_text_is_never_changed(text: str, data):
    """A token is a byte here, so characters are split."""
    ids = list(text.encode())
    growing = GrowingText(lambda some: bytes(some).decode(errors="replace"))
    sent = ""
    place = 0
    whole = text.partition("a<")[0]
    while place < len(ids):
        place += data.draw(st.integers(1, 4))
        now = stable_prefix(growing.of(ids[:place]), ["a<"])
        assert now.startswith(sent) and whole.startswith(now)
        sent = now
    assert with_sent_prefix(whole, sent) == whole


@given(st.text(alphabet="ab \n<S", max_size=30), st.data(), st.booleans())
def test_parts_of_a_growing_reply_add_up_to_the_reply(text: str, data, with_tools: bool):
    ids = list(text.encode())
    reply = GrowingReply(
        lambda some: bytes(some).decode(), ["<S"], PlainReader(), with_tools=with_tools
    )
    sent = ""
    place = 0
    while place < len(ids):
        place += data.draw(st.integers(1, 4))
        _, content = reply.grow(ids[:place])
        sent += content
    whole = ReplyText(text.partition("<S")[0])
    assert sent == reply.content and whole.content.startswith(sent)
    assert not with_tools or sent == sent.rstrip()
    assert reply.complete(whole) == whole


@pytest.mark.parametrize(
    ("text", "sent"),
    [("yes", "yes"), ("yes ST", "yes "), ("yes STOP no", "yes "), ("yes SSTOP", "yes S")],
)
def test_text_that_may_become_a_stop_text_is_held_back(text, sent):
    assert stable_prefix(text, ["STOP"]) == sent


def test_a_text_begins_with_the_part_that_was_sent():
    assert with_sent_prefix("find it", "\n\nfind") == "\n\nfind it"
    assert with_sent_prefix("find it", "fund") == "fund it", (
        "the tokenizer changed the beginning of the text"
    )
    assert with_sent_prefix("", "") == ""


def test_a_message_with_only_calls_has_no_content():
    message = ReplyText("", "so", (ToolCall("c", "look", "{}"),)).message()
    assert message["content"] is None and message["reasoning_content"] == "so"
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert ReplyText("").message() == {"role": "assistant", "content": ""}
