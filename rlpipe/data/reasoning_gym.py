"""Questions made by the `reasoning-gym` package: prompts whose metadata carry what scoring an
answer needs.

Not here: the scoring, and what of an item it needs (`rewards.reasoning_gym`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rlpipe.config.data import ReasoningGymPrompts
from rlpipe.errors import ConfigError, DataError
from rlpipe.rewards.reasoning_gym import compile_pattern, make_task, scoring_record


@dataclass(frozen=True, slots=True)
class Question:
    """One made prompt. `metadata` is the `scoring_record` of its item."""

    prompt: str
    label: str | None
    metadata: dict[str, Any]
    where: str


def make_questions(source: ReasoningGymPrompts) -> list[Question]:
    """The task's items in order, without those whose question text occurs in `source.exclude`.

    Raises: ConfigError for an unknown task, argument, format or pattern; DataError for an item the
    pattern does not match or that JSON cannot hold, and if nothing is left.
    """
    pattern = None
    if source.question_pattern is not None:
        pattern = compile_pattern(source.question_pattern, "prompts.question_pattern")
    left_out = {entry["question"] for other in source.exclude for _, entry in _entries(other)}
    made = [
        _question(source, pattern, where, entry)
        for where, entry in _entries(source)
        if entry["question"] not in left_out
    ]
    if not made:
        raise DataError(
            "no question is left",
            where=f"{source.task}(seed={source.seed}, size={source.size})",
            found=f"all {source.size} also occur in `exclude`",
            do="give more questions (size), other arguments, or a seed further away",
        )
    return made


def _entries(source: ReasoningGymPrompts) -> list[tuple[str, dict[str, Any]]]:
    owned = sorted({"seed", "size"} & source.arguments.keys())
    if owned:
        raise ConfigError(
            "these have keys of their own",
            where="prompts.arguments",
            found=owned,
            expected="prompts.seed, prompts.size",
        )
    task = make_task(source.task, source.arguments, seed=source.seed, size=source.size)
    return [
        (f"{source.task}(seed={source.seed})[{index}]", task[index]) for index in range(source.size)
    ]


def _question(
    source: ReasoningGymPrompts, pattern: re.Pattern[str] | None, where: str, entry: dict[str, Any]
) -> Question:
    question = entry["question"]
    answer = entry["answer"]
    if pattern is not None:
        found = pattern.search(question)
        if found is None:
            raise DataError(
                "prompts.question_pattern does not match",
                where=where,
                found=repr(question),
                expected=pattern.pattern,
            )
        question = found.group(1)
    prompt = _formatted(source.prompt_format, "prompt_format", question, answer)
    label = (
        None
        if answer is None
        else _formatted(source.answer_format, "answer_format", question, answer)
    )
    record = scoring_record(source.task, source.arguments, entry)
    try:
        json.dumps(record)
    except (TypeError, ValueError) as error:
        raise DataError(
            "the task's entries cannot be written as JSON", where=where, found=str(error)
        ) from error
    return Question(prompt, label, record, where)


def _formatted(template: str, setting: str, question: str, answer: str | None) -> str:
    try:
        return template.format(question=question, answer=answer)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            "not a Python format of question and answer",
            where=f"prompts.{setting}",
            found=f"{template!r}: {error!r}",
            expected="text with {question} and {answer}; write {{ for a brace",
        ) from error
