"""The page of samples (rlpipe.observe.viewer)."""

from __future__ import annotations

from rlpipe.lineage.token_rows import pieces
from rlpipe.observe.viewer import ShownSample, render


def shown(**changes: object) -> ShownSample:
    values = {
        "group": "g",
        "index": 0,
        "prompt": "<b>p</b>",
        "texts": ["a", "<i>", "\n"],
        "ids": [1, 2, 3],
        **changes,
    }
    return ShownSample(**values)  # type: ignore[arg-type]


def test_tokens_are_coloured_relative_to_the_largest_value():
    page = render("t", "", [shown(advantages=[2.0, -1.0, 0.0], differences=[0.0, 0.0, 0.001])])
    assert '<i class="ap9" title="1 · engine − trainer 0 · advantage 2">a</i>' in page
    assert 'class="an4"' in page and 'class="dp9"' in page


def test_sampled_text_is_escaped():
    page = render("<t>", "<about>", [shown(label="<l>", error="<e>", parts={"<p>": 1.0})])
    assert not any(f"<{name}>" in page for name in ("t", "about", "l", "e"))
    assert "&lt;b&gt;p&lt;/b&gt;" in page and "⏎" in page


def test_tokens_outside_the_loss_are_marked():
    assert '<i class="masked" title="2 · not in the loss">' in render(
        "t", "", [shown(mask=[1, 0, 1])]
    )


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    raw = "é!".encode()
    assert pieces(list(raw), lambda ids: bytes(ids).decode(errors="replace")) == ["", "é", "!"]
    assert pieces(list(raw[:1]), lambda ids: bytes(ids).decode(errors="replace")) == ["\ufffd"]
    assert pieces([5, 6], None) == [" 5", " 6"]
