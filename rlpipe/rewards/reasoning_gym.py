"""Scores answers with the `reasoning_gym` task that asked the question; the row's metadata names
task and item.

An item goes into JSON and must come out as it was: some scorers compare tuples, which plain JSON
turns into lists (and then score the right answer 0.05). `pack` and `unpack` keep tuples and keys
that are not strings.

Not here: making the questions (`data.reasoning_gym`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from rlpipe.config.data import ReasoningGymReward
from rlpipe.errors import ConfigError, DataError
from rlpipe.types import Sample

METADATA_KEY = "reasoning_gym"


def make_reward(config: ReasoningGymReward) -> Callable[[Sample], dict[str, float]]:
    """The function that scores one sample: `{"reward", "score"}`, and `format` where an answer
    pattern is set.

    `score` is the task's own number, `reward` that number or whether it reaches the threshold.
    Without a pattern the whole response, stripped, is the answer. Raises: ConfigError for a pattern
    that is not a regular expression with a group.
    """
    pattern = None
    if config.answer_pattern is not None:
        pattern = compile_pattern(config.answer_pattern, "reward.function.answer_pattern")

    def reward(sample: Sample) -> dict[str, float]:
        answer = sample.response
        parts = {}
        if pattern is not None:
            found = pattern.search(answer)
            parts["format"] = float(found is not None)
            if found is None:
                return {"reward": 0.0, "score": 0.0, **parts}
            answer = found.group(1) or ""
        score = score_answer(answer.strip(), sample.metadata)
        return {
            "reward": score if config.threshold is None else float(score >= config.threshold),
            "score": score,
            **parts,
        }

    return reward


def score_answer(answer: str, metadata: dict[str, Any]) -> float:
    """The task's own score of `answer`, 0 to 1. Raises: DataError without a scoring record; what
    the scorer raises."""
    record = metadata.get(METADATA_KEY)
    if not isinstance(record, dict) or record.keys() != {"task", "arguments", "entry"}:
        raise DataError(
            "the sample was not made by reasoning_gym",
            where=f"metadata.{METADATA_KEY}",
            found=record if not isinstance(record, dict) else sorted(record),
            expected="task, arguments and entry",
            do="use prompts of type reasoning_gym, or another reward function",
        )
    return float(
        _task(record["task"], json.dumps(record["arguments"])).score_answer(
            answer, unpack(record["entry"])
        )
    )


def scoring_record(task: str, arguments: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The metadata that `score_answer` reads: JSON-able if the entry's own values are."""
    return {METADATA_KEY: {"task": task, "arguments": arguments, "entry": pack(entry)}}


def make_task(task: str, arguments: dict[str, Any], *, seed: int, size: int) -> ProceduralDataset:
    """`reasoning_gym.create_dataset`, with the package's complaints as ConfigError."""
    if task not in DATASETS:
        near = get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)
        raise ConfigError(
            "reasoning_gym has no such task",
            where="prompts.task",
            found=task,
            expected=", ".join(near),
        )
    try:
        return reasoning_gym.create_dataset(task, **arguments, seed=seed, size=size)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"reasoning_gym does not take these arguments for {task!r}",
            where="prompts.arguments",
            found=f"{arguments}: {error}",
            expected=f"fields of {DATASETS[task][1].__name__}",
        ) from error


def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """The compiled pattern. Raises: ConfigError naming `where` if it is not a regular expression
    with a group."""
    expected = "a regular expression with one (...)"
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            "not a regular expression",
            where=where,
            found=f"{pattern!r}: {error}",
            expected=expected,
        ) from error
    if compiled.groups < 1:
        raise ConfigError("the pattern has no group", where=where, found=pattern, expected=expected)
    return compiled


def pack(value: Any) -> Any:
    """`value` in JSON's types: a tuple is `{"__tuple__": [...]}`, other keys than strings
    `{"__items__": [[k, v], ...]}`."""
    if isinstance(value, tuple):
        return {"__tuple__": [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {"__items__": [[pack(key), pack(item)] for key, item in value.items()]}
    return value


def unpack(value: Any) -> Any:
    """The inverse of `pack`; every container in it is new, so a scorer may write into it."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(unpack(item) for item in value["__tuple__"])
        if value.keys() == {"__items__"}:
            return {unpack(key): unpack(item) for key, item in value["__items__"]}
        return {key: unpack(item) for key, item in value.items()}
    return value


@lru_cache(maxsize=64)
def _task(task: str, arguments: str) -> ProceduralDataset:
    return make_task(task, json.loads(arguments), seed=0, size=1)
