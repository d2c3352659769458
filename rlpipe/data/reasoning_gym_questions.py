"""Generate prompts with the `reasoning-gym` package.

The metadata of each prompt contains the record that `rewards.reasoning_gym` needs for scoring.
Entry point: `make_questions`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rlpipe.config.data import ReasoningGymPrompts
from rlpipe.data.prompts import PROMPTS_KEY, PromptRow
from rlpipe.errors import ConfigError, DataError
from rlpipe.rewards.reasoning_gym import compile_pattern, make_task, scoring_record


def make_questions(source: ReasoningGymPrompts, key: str = PROMPTS_KEY) -> list[PromptRow]:
    """Return the task's items in order, without questions that occur in `source.exclude`.

    `key`: of the source, for errors.
    Raises: ConfigError for an unknown task, argument, format or pattern; DataError if the pattern
    does not match an item, JSON cannot store an item, or no question remains.
    """
    pattern = None
    if source.question_pattern is not None:
        pattern = compile_pattern(source.question_pattern, f"{key}.question_pattern")
    # Questions are compared before formatting, so sources with other prompt formats are excluded.
    excluded = {entry["question"] for other in source.exclude for _, entry in _entries(other, key)}
    rows = [
        _prompt_row(source, pattern, where, entry, key)
        for where, entry in _entries(source, key)
        if entry["question"] not in excluded
    ]
    if not rows:
        raise DataError(
            "no question is left",
            where=f"{source.task}(seed={source.seed}, size={source.size})",
            found=f"all {source.size} also occur in `exclude`",
            do="configure more questions (size), other arguments, or a more distant seed",
        )
    return rows


def _entries(source: ReasoningGymPrompts, key: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (name for errors, entry) of every item of the task."""
    owned = sorted({"seed", "size"} & source.arguments.keys())
    if owned:
        raise ConfigError(
            "these arguments of the task are configuration keys",
            where=f"{key}.arguments",
            found=owned,
            expected=f"{key}.seed, {key}.size",
        )
    task = make_task(source.task, source.arguments, seed=source.seed, size=source.size, key=key)
    return [
        (f"{source.task}(seed={source.seed})[{index}]", task[index]) for index in range(source.size)
    ]


def _prompt_row(
    source: ReasoningGymPrompts,
    pattern: re.Pattern[str] | None,
    where: str,
    entry: dict[str, Any],
    key: str,
) -> PromptRow:
    question = entry["question"]
    answer = entry["answer"]
    if pattern is not None:
        match = pattern.search(question)
        if match is None:
            raise DataError(
                f"{key}.question_pattern does not match",
                where=where,
                found=repr(question),
                expected=pattern.pattern,
            )
        question = match.group(1)
    prompt = _formatted(source.prompt_format, f"{key}.prompt_format", question, answer)
    label = None
    if answer is not None:
        label = _formatted(source.answer_format, f"{key}.answer_format", question, answer)
    record = scoring_record(source.task, source.arguments, entry)
    try:
        json.dumps(record)
    except (TypeError, ValueError) as error:
        raise DataError(
            "the task's entry cannot be written as JSON", where=where, found=str(error)
        ) from error
    return PromptRow(prompt, label, record, where)


def _formatted(template: str, setting: str, question: str, answer: str | None) -> str:
    try:
        return template.format(question=question, answer=answer)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            "not a Python format of question and answer",
            where=setting,
            found=f"{template!r}: {error!r}",
            expected="text with {question} and {answer}; write {{ for a brace",
        ) from error
