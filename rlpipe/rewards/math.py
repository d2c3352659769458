"""Compares the answer in a response with the label as mathematics, by `math-verify`.

Its own time limit is a signal alarm, which works only in a main thread, so it is off: the deadline is kept from outside,
by ending the process (`workers`). A label is taken as LaTeX, `\\boxed{...}` if it has no `$` or `\\boxed` of its own.

Not here: any other extraction of the answer than math-verify's.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

from rlpipe.errors import DataError
from rlpipe.types import Sample

for _name in ("math_verify.parser", "math_verify.grader"):  # their only warnings are about the time limit we keep ourselves
    logging.getLogger(_name).setLevel(logging.ERROR)


def reward(sample: Sample) -> dict[str, float]:
    """`{"reward": 1 or 0, "format": 1 if an answer was found}`.

    Raises: DataError if the label is missing or has nothing in it to compare; whatever math-verify raises while it compares.
    """
    gold = _expressions(sample.label) if sample.label else []
    if not gold:
        raise DataError(
            "the label holds nothing to compare with", where="label", found=repr(sample.label), expected="such as 1/2, $x+1$"
        )
    answer = parse(sample.response, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
    equal = verify(gold, answer, timeout_seconds=None, raise_on_error=True)
    return {"reward": float(equal), "format": float(bool(answer))}


def equal(answer: str, label: str) -> bool:
    """Are two answers, each without a box around it, the same mathematics? Raises: as `reward`."""
    gold = _expressions(label)
    return bool(gold) and bool(verify(gold, _expressions(answer), timeout_seconds=None, raise_on_error=True))


def _expressions(label: str) -> list:
    text = label if "$" in label or "\\boxed" in label else f"\\boxed{{{label}}}"
    return parse(text, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
