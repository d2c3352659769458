"""Compare the answer in a response with the label as mathematics.

The answer is the last box after the reasoning (`</think>`), else a statement there, else the same
of the whole response. `equal` compares numbers, units, tuples, sets and texts exactly, and formulas
by `math-verify`. Entry points: `reward`, `equal`.

math-verify alone is not enough:

- It joins boxes that are close together.
- It reads `1e3` as e times 3, and `1 0 0 0` as 0.
- It reads words as products of letters (`east` = `seat`).
- It finds `(1,2)` equal to `\\{1,2\\}`, and 5 cm equal to 5 m.
"""

from __future__ import annotations

import logging
import re

from math_verify import parse, verify

from rlpipe.errors import DataError
from rlpipe.rewards.answers import after_thinking, boxed, boxes, joined_boxes, stated, text_label
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

# Their only warnings are about the time limit, which `workers` enforces.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)

MAX_STATEMENT_LENGTH = 80
"""Characters of a statement that is compared as a formula. A longer one is prose."""

_NAME = re.compile(
    r"^(?:[A-Za-z](?:_\{?\w+\}?)?|\\[a-z]+|\([A-Za-z](?:\s*,\s*[A-Za-z])*\))"
    r"\s*(?:(?<![<>!])=|\\in(?![a-z]))\s*(?=\S)"
)
"""A name before `=` or `\\in`, such as `x =` or `(a, b) =`."""
_CHOICE = re.compile(r"^(?:\\text\{)?\(?([A-Ja-j])\)?(?:\}|\)|\.)*\s+(?:\\text\{)?(.+?)\}?$")


def reward(sample: Sample) -> dict[str, float]:
    """Return `{"reward": 1 or 0, "format": 1 if an answer was found}`.

    Raises: DataError if the label is missing or has no comparable content; any exception of
    math-verify.
    """
    label = text_label(sample)
    label = boxed(label) or label
    if not any(letter.isalnum() or letter in "\\∅∞√πθ" for letter in tidy(label)):
        raise DataError(
            "the label has no content to compare with",
            where="label",
            found=repr(sample.label),
            expected="such as 1/2, $x+1$",
        )
    for text in filter(None, (after_thinking(sample.response), sample.response)):
        correct = _is_correct(text, label)
        if correct is not None:
            return {"reward": float(correct), "format": 1.0}
    return {"reward": 0.0, "format": 0.0}


def _is_correct(text: str, label: str) -> bool | None:
    """True if the answer of a text is correct; None if the text has no answer."""
    if boxes(text):
        answer = boxed(text)
        if not answer:
            return None
        return equal(answer, label) or _boxes_equal_list(text, label)
    for statement in stated(text):
        answer = tidy(statement)
        items = listed(answer)
        is_answer = quantity(answer) is not None or (items is not None and _is_list(items))
        is_formula = len(answer) <= MAX_STATEMENT_LENGTH and not is_worded(answer)
        if (
            is_answer
            or words_of(answer) == words_of(tidy(label))
            or (is_formula and equal(answer, label))
        ):
            return equal(answer, label)
    answers = _parsed(_plain_numbers(text))
    return _verified(_parsed_label(label), answers) if answers else None


def _boxes_equal_list(text: str, label: str) -> bool:
    """True if the label is an unordered list, and the last boxes contain one item each."""
    items = listed(tidy(label))
    answers = joined_boxes(text)
    if items is None or items.ordered or answers is None:
        return False
    return equal(answers, label)


def _is_list(items: Listed) -> bool:
    """True if the items are certainly a list and not a sentence with commas."""
    return bool(items.opening) or all(
        quantity(item) is not None for reading in items.readings for item in reading
    )


def equal(answer: str, label: str) -> bool:
    """True if an answer equals a label, both without a box. Raises: any exception of math-verify.

    | answer and label | equal if |
    |---|---|
    | the same text | always; case, blanks, articles and `\\text{}` do not count |
    | two quantities | the numbers are equal and the units do not differ (`Quantity.equals`) |
    | two sets or bare lists | the items are equal in any order, under equal brackets |
    | two tuples or intervals | the items are equal in order, under equal brackets |
    | a text and another kind | never |
    | formulas | math-verify finds them equal |
    """
    label = boxed(label) or label
    return _equal(tidy(answer), tidy(label))


def _equal(answer: str, label: str) -> bool:
    if not answer or not label:
        return False
    if words_of(answer) == words_of(label):
        return True
    if len(words_of(label)) > 0 and (choice := _CHOICE.match(answer)) and not _CHOICE.match(label):
        # `\textbf{(B)}\ 12` is an answer by letter and by value; the label decides which counts.
        if re.fullmatch(r"\(?[A-Ja-j]\)?", label):
            return words_of(label) == choice[1].lower()
        return _equal(tidy(choice[2]), label)
    answer, label = _without_names(answer, label)
    left = quantity(answer)
    right = quantity(label)
    if left is not None and right is not None:
        return left.equals(right)
    items = listed(answer)
    label_items = listed(label)
    if items is not None and label_items is not None:
        return _same_items(items, label_items)
    if (items is not None and right is not None) or (label_items is not None and left is not None):
        return False
    if words_of(answer) == words_of(label):
        return True
    if is_worded(answer) or is_worded(label):
        return False
    # Numbers that a blank separates: math-verify reads `1 0 0 0` as 0.
    if re.search(r"\d\s+\d", f"{answer}||{label}".replace("\n", "|")):
        return False
    answers = _parsed(_in_box(left.text if left else answer))
    return _verified(_parsed_label(right.text if right else label), answers)


def _without_names(answer: str, label: str) -> tuple[str, str]:
    """Return answer and label without `x =`, unless both have different names.

    If only the answer is an equation, its last side is returned.
    """
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


def _same_items(answer: Listed, label: Listed) -> bool:
    """True if two lists are equal in any pair of their readings."""
    both_bracketed = answer.opening and label.opening
    same_brackets = (answer.opening, answer.closing) == (label.opening, label.closing)
    if both_bracketed and not same_brackets:
        return False
    ordered = answer.ordered or label.ordered
    return any(
        _readings_match(left, right, ordered)
        for left in answer.readings
        for right in label.readings
        if len(left) == len(right)
    )


def _readings_match(answer: tuple[str, ...], label: tuple[str, ...], ordered: bool) -> bool:
    if ordered:
        return all(_equal(item, other) for item, other in zip(answer, label, strict=True))
    unmatched = list(label)
    for item in answer:
        position = next((i for i, other in enumerate(unmatched) if _equal(item, other)), None)
        if position is None:
            return False
        del unmatched[position]
    return True


def _parsed_label(label: str) -> list:
    """Return the label's expressions."""
    # Text around `$...$` is a sentence: math-verify extracts the formula from it.
    return _parsed(label if "$" in label else _in_box(label))


def _in_box(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _parsed(text: str) -> list:
    # The time limit of math-verify is a signal alarm, which only works in a main thread. It is off:
    # `workers` enforces the deadline by ending the process.
    return parse(text, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]


def _verified(label: list, answers: list) -> bool:
    return bool(label) and verify(label, answers, timeout_seconds=None, raise_on_error=True)


def _plain_numbers(text: str) -> str:
    """Return the text with ASCII digits, and integers with an exponent written out.

    math-verify reads `1e3` as e times 3.
    """

    def written_out(match: re.Match[str]) -> str:
        number = quantity(match[0])
        return number.text if number is not None and number.value.denominator == 1 else match[0]

    scientific = r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?![\w.]*\w)"
    return re.sub(scientific, written_out, plain_letters(text))
