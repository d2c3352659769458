"""Comparison of old and new columns (rlpipe.observe.comparison)."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rlpipe.observe.comparison import (
    AGREEMENT,
    Comparison,
    Example,
    IterationRow,
    agreement,
    figures,
    summary,
    write_page,
    write_picture,
)

NAN = float("nan")


def comparison(before: list[float], after: list[float], **others: object) -> Comparison:
    """Return a comparison of groups of two samples."""
    rows = [
        IterationRow(0, (0.5, 0.25), (2, 1), (0, 1), "the <reason>"),
        IterationRow(1, (None, 0.5), (0, 1), (0, 0)),
    ]
    sides = np.array(before), np.array(after)
    group = np.arange(len(before)) // 2
    return Comparison("new", "old", group, sides, (sides[0] - 1, sides[1]), rows, **others)  # type: ignore[arg-type]


def test_agreement_counts_kept_tied_and_turned_pairs():
    measures = agreement(
        comparison([0, 1, 0, 1, 0, 1, 1, 1, 0, NAN], [0, 2, 1, 1, 3, 2, 5, 4, 0, 1])
    )
    assert (
        measures["pairs_kept"]
        == measures["pairs_tied"]
        == measures["pairs_turned"]
        == pytest.approx(1 / 3)
    )
    assert measures["reward_changed"] == pytest.approx(6 / 9)
    assert -1 <= measures["correlation"] <= 1


def test_figures_exclude_missing_values():
    values = {
        row["what"]: (row["before"], row["after"])
        for row in figures(comparison([1, 0, 1, NAN], [NAN] * 4))
    }
    assert values["samples with a reward"] == (3, 0)
    assert values["reward: mean"] == (pytest.approx(2 / 3), None)
    assert values["share of groups whose rewards are equal"] == (0.5, None)
    assert values["rows with an error"] == (0, 1)
    assert values["groups in batches"] == (2, 2)


class Tags(HTMLParser):
    """Checks that every tag is closed and that no attribute loads a resource."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {name for name, _ in attrs} & {"src", "href"}
        if tag not in ("meta", "rect", "path", "line", "circle", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


@pytest.mark.parametrize("after", [[0.5, 2.0, 1.0, 1.0], [NAN] * 4])
def test_page_and_picture_are_written_even_without_values_after(tmp_path: Path, after: list[float]):
    examples = [Example("g", "<script>alert(1)</script>", "a & b", 0.0, 2.0)]
    compared = comparison(
        [0, 1, 1, 1], after, examples=examples, changed={"reward.function": "a → <b>"}
    )
    page = write_page(compared, tmp_path / "new" / "page.html").read_text()
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "the &lt;reason&gt;" in page
    assert ("pairs in the same order" in page) == bool(agreement(compared))
    assert ("A pair is two responses to one prompt" in page) == bool(agreement(compared))
    assert not set(agreement(compared)) - set(AGREEMENT), "every measure has a label"
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert (
        write_picture(compared, tmp_path / "new" / "page.png").read_bytes().startswith(b"\x89PNG")
    )
    assert summary(compared)["without_advantages"] == {"0": "the <reason>"}
