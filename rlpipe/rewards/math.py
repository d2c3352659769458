"""Compare the answer in a response with the label as mathematics.

The answer is the last box after the reasoning (`</think>`), else what the text there states, else
the same of the whole response. Numbers, units, tuples, sets and texts are compared by `equal`
itself, exactly; formulas by `math-verify`.

math-verify alone is not enough. It joins boxes that stand close together, reads `1e3` as e times 3
and `1 0 0 0` as 0, takes words for products of letters (`east` = `seat`), and finds `(1,2)` equal
to `\\{1,2\\}` and 5 cm to 5 m.

Its own time limit is a signal alarm, which works only in a main thread, so it is off: the deadline
is kept from outside, by ending the process (`workers`).
"""

from __future__ import annotations

import logging
import re

from math_verify import parse, verify

from rlpipe.errors import DataError
from rlpipe.rewards.answers import after_thinking, boxed, boxes, joined_boxes, stated
from rlpipe.rewards.notation import (
    Listed,
    is_worded,
    listed,
    plain_letters,
    quantity,
    tidy,
    words_of,
)
from rlpipe.types import Sample

for _name in (
    "math_verify.parser",
    "math_verify.grader",
):  # their only warnings are about the time limit we keep ourselves
    logging.getLogger(_name).setLevel(logging.ERROR)

LONGEST_STATEMENT = 80
"""Characters of a statement that is compared as a formula; a longer one is prose, from which
math-verify extracts."""

_NAME = re.compile(
    r"^(?:[A-Za-z](?:_\{?\w+\}?)?|\\[a-z]+|\([A-Za-z](?:\s*,\s*[A-Za-z])*\))\s*(?:(?<![<>!])=|\\in(?![a-z]))\s*(?=\S)"
)
_CHOICE = re.compile(r"^(?:\\text\{)?\(?([A-Ja-j])\)?(?:\}|\)|\.)*\s+(?:\\text\{)?(.+?)\}?$")


def reward(sample: Sample) -> dict[str, float]:
    """`{"reward": 1 or 0, "format": 1 if an answer was found}`.

    Raises: DataError if the label is missing or has nothing in it to compare; whatever math-verify
    raises while it compares.
    """
    label = sample.label or ""
    label = boxed(label) or label
    if not any(letter.isalnum() or letter in "\\∅∞√πθ" for letter in tidy(label)):
        raise DataError(
            "the label holds nothing to compare with",
            where="label",
            found=repr(sample.label),
            expected="such as 1/2, $x+1$",
        )
    for text in filter(None, (after_thinking(sample.response), sample.response)):
        right = _judged(text, label)
        if right is not None:
            return {"reward": float(right), "format": 1.0}
    return {"reward": 0.0, "format": 0.0}


def _judged(text: str, label: str) -> bool | None:
    """True if the answer that a text gives is right; None if it gives none."""
    if boxes(text):
        answer = boxed(text)
        if not answer:
            return None
        return equal(answer, label) or _several(text, label)
    for statement in stated(text):
        answer = tidy(statement)
        items = listed(answer)
        certain = quantity(answer) is not None or (items is not None and _certain(items))
        formula = len(answer) <= LONGEST_STATEMENT and not is_worded(answer)
        if (
            certain
            or words_of(answer) == words_of(tidy(label))
            or (formula and equal(answer, label))
        ):
            return equal(answer, label)
    answers = _parsed(_plain_numbers(text))
    return _verified(_gold(label), answers) if answers else None


def _several(text: str, label: str) -> bool:
    """True if the label is a list of answers, and the last boxes hold one each."""
    wanted = listed(tidy(label))
    answers = joined_boxes(text)
    return (
        wanted is not None and not wanted.ordered and answers is not None and equal(answers, label)
    )


def _certain(items: Listed) -> bool:
    """True if this is a list for sure, and no sentence with commas in it."""
    return bool(items.opening) or all(
        quantity(item) is not None for reading in items.readings for item in reading
    )


def equal(answer: str, label: str) -> bool:
    """True if two answers, each without a box around it, are the same. Raises: whatever math-verify
    raises.

    | they are | right is |
    |---|---|
    | the same text | always; case, blanks, articles and `\\text{}` do not count |
    | two quantities | the same number, and no two different units (`notation.Quantity.equals`) |
    | two lists | equal items under equal brackets; in any order for sets and bare lists, in order for tuples and intervals |
    | a text and something else | never |
    | formulas | equal by math-verify |
    """
    label = boxed(label) or label
    return _equal(tidy(answer), tidy(label))


def _equal(answer: str, label: str) -> bool:
    if not answer or not label:
        return False
    if words_of(answer) == words_of(label):
        return True
    if len(words_of(label)) > 0 and (choice := _CHOICE.match(answer)) and not _CHOICE.match(label):
        # `\textbf{(B)}\ 12` answers both the question for the letter and the one for the value.
        return (
            words_of(label) == choice[1].lower()
            if re.fullmatch(r"\(?[A-Ja-j]\)?", label)
            else _equal(tidy(choice[2]), label)
        )
    answer, label = _without_names(answer, label)
    left = quantity(answer)
    right = quantity(label)
    if left is not None and right is not None:
        return left.equals(right)
    items = listed(answer)
    wanted = listed(label)
    if items is not None and wanted is not None:
        return _same_items(items, wanted)
    if (items is not None and right is not None) or (wanted is not None and left is not None):
        return False
    if words_of(answer) == words_of(label):
        return True
    if (
        is_worded(answer)
        or is_worded(label)
        or re.search(r"\d\s+\d", f"{answer}\n\n{label}".replace("\n", "|"))
    ):
        return False
    return _verified(
        _gold(right.text if right else label), _parsed(_in_box(left.text if left else answer))
    )


def _without_names(answer: str, label: str) -> tuple[str, str]:
    """Both without `x =`, where only one has it or both the same; the last side of an equation, if
    only the answer is one."""
    names = _NAME.match(answer), _NAME.match(label)
    if names[0] and names[1]:
        if words_of(names[0][0]) != words_of(names[1][0]):
            return answer, label
        return answer[names[0].end() :], label[names[1].end() :]
    if names[0]:
        answer = answer[names[0].end() :]
    if names[1] and not listed(label):
        label = label[names[1].end() :]
    if re.search(r"(?<![<>!])=", label) is None and listed(answer) is None:
        answer = re.split(r"(?<![<>!])=", answer)[-1].strip()
    return answer, label


def _same_items(items: Listed, wanted: Listed) -> bool:
    """True if two lists are equal under one of the readings of each."""
    brackets = (items.opening, items.closing), (wanted.opening, wanted.closing)
    if items.opening and wanted.opening and brackets[0] != brackets[1]:
        return False
    ordered = items.ordered or wanted.ordered
    return any(
        _match(a, b, ordered) for a in items.readings for b in wanted.readings if len(a) == len(b)
    )


def _match(items: tuple[str, ...], wanted: tuple[str, ...], ordered: bool) -> bool:
    if ordered:
        return all(_equal(item, other) for item, other in zip(items, wanted, strict=True))
    left = list(wanted)
    for item in items:
        found = next((position for position, other in enumerate(left) if _equal(item, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _gold(label: str) -> list:
    """The label's expressions. Text around `$...$` is a sentence, from which math-verify extracts
    the formula."""
    return _parsed(label if "$" in label else _in_box(label))


def _in_box(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _parsed(text: str) -> list:
    return parse(text, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]


def _verified(gold: list, answers: list) -> bool:
    return bool(gold) and verify(gold, answers, timeout_seconds=None, raise_on_error=True)


def _plain_numbers(text: str) -> str:
    """A text in which digits are ASCII and numbers with an exponent are written out, for
    math-verify's extraction."""

    def written(match: re.Match[str]) -> str:
        found = quantity(match[0])
        return found.text if found is not None and found.value.denominator == 1 else match[0]

    return re.sub(
        r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?![\w.]*\w)", written, plain_letters(text)
    )
