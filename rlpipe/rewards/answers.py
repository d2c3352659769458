"""Find the answer in a response, and compare answers as text.

`boxes`, `boxed`, `joined_boxes`, `stated` and `after_thinking` find answers; `plain` normalises
them and `same` compares them. `math` compares as mathematics.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rlpipe.errors import DataError
from rlpipe.rewards.notation import quantity, tidy
from rlpipe.types import Sample

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_STATED = re.compile(r"(?i)\banswer\b(?:\s+(?:is|are)\b)?\s*[*_`]*\s*[:=]?\s*[*_`]*\s*([^\n]+)")
UNITS = (
    "square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|"
    "degrees|cm|gm|pounds|meters|meals|edges|students|multiples"
)
"""Words that Minerva's normalisation removes, as a regular expression."""
_UNIT = re.compile(rf"\b(?:{UNITS})\b")
_WORDS = re.compile(r"\\(?:text|textbf|mbox|mathrm|overline)\s*\{(.*?)\}")
_THOUSANDS = re.compile(
    r"(?<![\d.,])(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+)(?![\d,]|\s\d)"
)
_IGNORED = re.compile(r"\\[,;! ]|\^\{?\\circ\}?|\\l?dots|\\\$|[\"$]|<\|\w+\|>|\{,\}")

_END_TOKENS = re.compile(r"(?:\s*(?:<\|\w+\|>|<｜[^｜>]{1,60}｜>|</s>|<eos>|<end_of_turn>))+\s*\Z")
"""Special tokens at the end of a response, of Qwen, Llama 3, DeepSeek, Llama 2 and Gemma."""


class Box(NamedTuple):
    """One `\\boxed{...}` or `\\fbox{...}` of a text."""

    start: int
    end: int
    content: str | None
    """Its content, without boxes in it; None if the box is not closed."""


def text_label(sample: Sample) -> str:
    """Return the label of a sample, empty without one. Raises: DataError unless it is text."""
    return require_text_label(sample.label, "label") or ""


def require_text_label(label: object, where: str) -> str | None:
    """Return a label that is text, or None. Raises: DataError for an object or a list."""
    if not isinstance(label, str | None):
        raise DataError(
            "the label is not text, which the named rewards compare",
            where=where,
            found=f"{type(label).__name__} {label!r}"[:200],
            expected="a string",
            do="set data.prompts.label_key to a column of text, or write a reward function",
        )
    return label


def without_end(response: str) -> str:
    """Return the response without special tokens at its end.

    Responses have them with `rollout.rollout_skip_special_tokens: false`.
    """
    return _END_TOKENS.sub("", response)


def boxes(text: str) -> list[Box]:
    """Return the outermost boxes of a text, with braces matched as in TeX."""
    result: list[Box] = []
    position = 0
    while match := _BOX.search(text, position):
        end = _closing_brace(text, match.end())
        content = None if end is None else _BOX.sub("{", text[match.end() : end]).strip()
        result.append(Box(match.start(), match.end() if end is None else end + 1, content))
        position = result[-1].end
    return result


def boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` of a text.

    None without a box, or if the last box is not closed.
    """
    all_boxes = boxes(text)
    return all_boxes[-1].content if all_boxes else None


def _closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes the group with content from `start`.

    Escaped braces do not count. None if the group is not closed.
    """
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
    """Return the contents of adjacent boxes at the end of a text as one comma-separated list.

    Adjacent boxes have only `and`, `or`, commas and `x =` between them. None with fewer than two.
    """
    # Models often answer a question with several answers by several boxes.
    all_boxes = boxes(text)
    run = all_boxes[-1:]
    for before in all_boxes[-2::-1]:
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
    """Return candidates for the answer of a text without boxes.

    The candidates are the text after the last `answer is` or `answer:`, and a text of one line.
    """
    candidates = [match[1] for match in _STATED.finditer(text)][-1:]
    line = text.strip()
    if line and "\n" not in line:
        candidates.append(line)
    return candidates


def after_thinking(text: str) -> str | None:
    """Return the text after the last `</think>`, else after the first `###Response`, else None."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    _, mark, rest = text.partition("###Response")
    return rest if mark else None


def plain(answer: str) -> str:
    """Return an answer without words, units and spacing that do not change its meaning.

    The result starts after the last `=`; of `... $x$ ...` only x remains. `\\frac12` becomes
    `\\frac{1}{2}`, `\\sqrt2` becomes `\\sqrt{2}`.

    Source: the normalisation of Minerva (arXiv 2206.14858, appendix D.1), which DAPO's reward uses
    too. Two differences: units are removed as whole words only, so that `ways` does not remove a
    part of another word; digits are joined only where commas or spaces separate thousands, so that
    `10,00` and `1 0 0 0` are not 1000.
    """
    text = answer.rpartition("=")[2]
    if dollars := re.search(r"\$(.+?)\$", text):
        text = dollars.group(1)
    text = _WORDS.sub(r" \1 ", boxed(text) or text)
    text = _UNIT.sub(" ", _IGNORED.sub("", text))
    text = re.sub(r"\b(?:an?|and|the)\s", "", text)
    text = _THOUSANDS.sub(lambda match: re.sub(r"[, ]", "", match[0]), text.strip())
    # Digits that a space separates must not become one number.
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    text = re.sub(r"frac(\w)(\w)", r"frac{\1}{\2}", text)
    return re.sub(r"sqrt(\w)", r"sqrt{\1}", text)


def same(answer: str, label: str) -> bool:
    """True if two answers are equal after `plain`, as text or exactly as numbers."""
    left = plain(answer)
    right = plain(label)
    if left == right:
        return bool(left)
    left_number = quantity(tidy(left))
    right_number = quantity(tidy(right))
    if left_number is None or right_number is None:
        return False
    return left_number.equals(right_number)
