"""Find the answer in a response, and compare it as text.

Not here: comparing as mathematics (`math`), what an answer is worth (`rules`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rlpipe.rewards.notation import quantity, tidy

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_STATED = re.compile(r"(?i)\banswer\b(?:\s+(?:is|are)\b)?\s*[*_`]*\s*[:=]?\s*[*_`]*\s*([^\n]+)")
UNITS = (
    "square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|meters|meals|"
    "edges|students|multiples"
)
_UNIT = re.compile(rf"\b(?:{UNITS})\b")
_WORDS = re.compile(r"\\(?:text|textbf|mbox|mathrm|overline)\s*\{(.*?)\}")
_THOUSANDS = re.compile(
    r"(?<![\d.,])(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+)(?![\d,]|\s\d)"
)
_NOISE = re.compile(r"\\[,;! ]|\^\{?\\circ\}?|\\l?dots|\\\$|[\"$]|<\|\w+\|>|\{,\}")


_END = re.compile(r"(?:\s*(?:<\|\w+\|>|<｜[^｜>]{1,60}｜>|</s>|<eos>|<end_of_turn>))+\s*\Z")
"""Special tokens at the end of a response, as Qwen, Llama 3, DeepSeek, Llama 2 and Gemma write
them."""


class Box(NamedTuple):
    """One `\\boxed{...}` or `\\fbox{...}` of a text."""

    start: int
    end: int
    content: str | None
    """What it holds, without boxes in it; None if it is not closed."""


def without_end(response: str) -> str:
    """A response without the special tokens that end it, where
    `rollout.rollout_skip_special_tokens: false` keeps them."""
    return _END.sub("", response)


def boxes(text: str) -> list[Box]:
    """The boxes of a text that are not inside another closed one, braces matched as TeX does."""
    found: list[Box] = []
    position = 0
    while match := _BOX.search(text, position):
        end = _closing(text, match.end())
        content = None if end is None else _BOX.sub("{", text[match.end() : end]).strip()
        found.append(Box(match.start(), match.end() if end is None else end + 1, content))
        position = found[-1].end
    return found


def boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` (or `\\fbox`) of a text holds; None if there is none, or it is
    not closed."""
    found = boxes(text)
    return found[-1].content if found else None


def _closing(text: str, start: int) -> int | None:
    """Where the brace is that closes a group whose content starts here; escaped braces do not
    count."""
    depth = 1
    position = start
    while position < len(text):
        letter = text[position]
        if letter == "\\":
            position += 1
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return position
        position += 1
    return None


def joined_boxes(text: str) -> str | None:
    """The last boxes that only `and`, `or`, commas and `x =` separate, as one list; None if there
    is only one.

    A question with several answers is often answered by as many boxes.
    """
    found = boxes(text)
    run = found[-1:]
    for before in found[-2::-1]:
        between = re.sub(
            r"\$|\\[()\[\]]|\\text\s*\{|\}|[A-Za-z](?:_\{?\d\}?)?\s*=",
            " ",
            text[before.end : run[0].start],
        )
        if re.fullmatch(r"[\s,;]*(?:and|or)?\s*", between) is None:
            break
        run.insert(0, before)
    contents = [box.content for box in run]
    return ", ".join(filter(None, contents)) if len(run) > 1 and all(contents) else None


def stated(text: str) -> list[str]:
    """Candidates for the answer of a text without boxes: after its last `answer is` or `answer:`,
    and all of a single line."""
    found = [match[1] for match in _STATED.finditer(text)][-1:]
    line = text.strip()
    return [*found, *([line] if line and "\n" not in line else [])]


def after_thinking(text: str) -> str | None:
    """What follows the last `</think>`, else the first `###Response`; None if there is neither."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    _, mark, rest = text.partition("###Response")
    return rest if mark else None


def plain(answer: str) -> str:
    """An answer without the words, units and spacing that do not change what it is.

    Only what follows the last `=` counts; in `... $x$ ...` only x. `\\frac12` is `\\frac{1}{2}`,
    `\\sqrt2` is `\\sqrt{2}`. Source: the normalisation of Minerva (arXiv 2206.14858, appendix D.1),
    which DAPO's reward uses too. Differs: units are removed as whole words only, so that `ways`
    does not eat a part of another word. Digits are joined only where commas or spaces separate
    thousands: `10,00` and `1 0 0 0` are not 1000.
    """
    text = answer.rpartition("=")[2]
    if dollars := re.search(r"\$(.+?)\$", text):
        text = dollars.group(1)
    text = _WORDS.sub(r" \1 ", boxed(text) or text)
    text = _UNIT.sub(" ", _NOISE.sub("", text))
    text = re.sub(r"\b(?:an?|and|the)\s", "", text)
    text = re.sub(
        r"(?<=\d)\s+(?=\d)",
        "_",
        _THOUSANDS.sub(lambda found: re.sub(r"[, ]", "", found[0]), text.strip()),
    )
    text = re.sub(r"\s+", "", text).rstrip(".")
    text = re.sub(r"frac(\w)(\w)", r"frac{\1}{\2}", text)
    return re.sub(r"sqrt(\w)", r"sqrt{\1}", text)


def same(answer: str, label: str) -> bool:
    """True if two answers are the same text, or exactly the same number, once they are plain."""
    left = plain(answer)
    right = plain(label)
    if left == right:
        return bool(left)
    numbers = quantity(tidy(left)), quantity(tidy(right))
    return numbers[0] is not None and numbers[1] is not None and numbers[0].equals(numbers[1])
