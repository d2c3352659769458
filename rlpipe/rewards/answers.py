"""Finding the answer in a response, and comparing it as text: what several of the rules share.

Not here: comparing as mathematics (`math`), what an answer is worth (`rules`).
"""

from __future__ import annotations

import re

BOXES = ("\\boxed{", "\\fbox{")
UNITS = (
    "square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|meters|meals|"
    "edges|students|multiples"
)
_UNIT = re.compile(rf"\b(?:{UNITS})\b")
_WORDS = re.compile(r"\\(?:text|textbf|mbox|mathrm|overline)\s*\{(.*?)\}")
_NOISE = re.compile(r"\\[,;! ]|\^\{?\\circ\}?|\\l?dots|\\\$|[\"$]|<\|\w+\|>|\{,\}")


def boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` (or `\\fbox`) of a text holds, braces matched; None if there is none, or it is not closed."""
    start, box = max((text.rfind(box), box) for box in BOXES)
    if start < 0:
        return None
    depth = 0
    for position in range(start + len(box) - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len(box) : position].strip()
    return None


def after_thinking(text: str) -> str | None:
    """What follows the last `</think>`, else the first `###Response`; None if there is neither."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    _, mark, rest = text.partition("###Response")
    return rest if mark else None


def plain(answer: str) -> str:
    """An answer without the words, units and spacing that do not change what it is.

    Only what follows the last `=` counts; in `... $x$ ...` only x. `\\frac12` is `\\frac{1}{2}`, `\\sqrt2` is `\\sqrt{2}`.
    Source: the normalisation of Minerva (arXiv 2206.14858, appendix D.1), which DAPO's reward uses too. Differs: units are
    removed as whole words only, so that `ways` does not eat a part of another word.
    """
    text = answer.rpartition("=")[2]
    if dollars := re.search(r"\$(.+?)\$", text):
        text = dollars.group(1)
    text = _WORDS.sub(r" \1 ", boxed(text) or text)
    text = _UNIT.sub(" ", _NOISE.sub("", text))
    text = re.sub(r"\b(?:an?|and|the)\s", "", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    text = re.sub(r"frac(\w)(\w)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt(\w)", r"sqrt{\1}", text)
    return text.replace(",", "") if text.replace(",", "").isdigit() else text


def same(answer: str, label: str) -> bool:
    """Are two answers the same text, or the same number, once they are plain?"""
    left, right = plain(answer), plain(label)
    if left == right:
        return bool(left)
    try:
        return float(left) == float(right)
    except ValueError:
        return False
