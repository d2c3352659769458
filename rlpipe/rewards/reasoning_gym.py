"""Score answers with the `reasoning_gym` task that made the question.

The row's metadata contains task, arguments and entry (`scoring_record`). An entry is stored as JSON
and must be restored exactly. Some scorers compare tuples; plain JSON turns these into lists, and
the correct answer then scores 0.05. `pack` and `unpack` keep tuples and keys that are not strings.

Entry points: `make_reward`, `score_answer`. `data.reasoning_gym_prompts` makes the questions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from rlpipe.config.data import ReasoningGymReward
from rlpipe.errors import ConfigError, DataError
from rlpipe.system.imports import quick_imports
from rlpipe.types import Sample

with quick_imports():  # sympy, matplotlib and 100 tasks
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

METADATA_KEY = "reasoning_gym"


def make_reward(config: ReasoningGymReward) -> Callable[[Sample], dict[str, float]]:
    """Return the function that scores one sample: `{"reward", "score"}`.

    `score` is the task's score. `reward` is the score, or with a threshold 1 if the score reaches
    it, else 0. With an answer pattern, `format` is 1 if the pattern matches. Without one the whole
    stripped response is the answer.

    Raises: ConfigError if the pattern is not a regular expression with a group.
    """
    pattern = None
    if config.answer_pattern is not None:
        pattern = compile_pattern(config.answer_pattern, "reward.function.answer_pattern")

    def reward(sample: Sample) -> dict[str, float]:
        answer = sample.response
        parts = {}
        if pattern is not None:
            match = pattern.search(answer)
            parts["format"] = float(match is not None)
            if match is None:
                return {"reward": 0.0, "score": 0.0, **parts}
            answer = match.group(1) or ""
        score = score_answer(answer.strip(), sample.metadata)
        return {
            "reward": score if config.threshold is None else float(score >= config.threshold),
            "score": score,
            **parts,
        }

    return reward


def score_answer(answer: str, metadata: dict[str, Any]) -> float:
    """Return the task's score of an answer, 0 to 1.

    Raises: DataError if the metadata has no scoring record; any exception of the task's scorer.
    """
    record = metadata.get(METADATA_KEY)
    if not isinstance(record, dict) or record.keys() != {"task", "arguments", "entry"}:
        raise DataError(
            "the sample was not made by reasoning_gym",
            where=f"metadata.{METADATA_KEY}",
            found=record if not isinstance(record, dict) else sorted(record),
            expected="task, arguments and entry",
            do="use prompts of type reasoning_gym, or another reward function",
        )
    task = _cached_task(record["task"], json.dumps(record["arguments"]))
    return float(task.score_answer(answer, unpack(record["entry"])))


def scoring_record(task: str, arguments: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata for `score_answer`; JSON-able if the values of the entry are."""
    return {METADATA_KEY: {"task": task, "arguments": arguments, "entry": pack(entry)}}


def make_task(
    task: str, arguments: dict[str, Any], *, seed: int, size: int, key: str = "data.prompts"
) -> ProceduralDataset:
    """Create a task of reasoning_gym. `key`: of the prompt source.

    Raises: ConfigError for an unknown task or bad arguments.
    """
    if task not in DATASETS:
        nearest = get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)
        raise ConfigError(
            "reasoning_gym has no such task",
            where=f"{key}.task",
            found=task,
            expected=", ".join(nearest),
        )
    try:
        if task == "composite":
            arguments = _with_specs(arguments)
        return reasoning_gym.create_dataset(task, **arguments, seed=seed, size=size)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"reasoning_gym does not accept these arguments for {task!r}",
            where=f"{key}.arguments",
            found=f"{arguments}: {error}",
            expected=f"fields of {DATASETS[task][1].__name__}",
        ) from error


def _with_specs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `composite`, whose parts are objects in place of JSON.

    Raises: TypeError if a part has other keys.
    """
    parts = arguments.get("datasets", [])
    if not isinstance(parts, list | tuple) or not all(isinstance(part, dict) for part in parts):
        raise TypeError("datasets is not a list of {name, weight, config}")
    return {**arguments, "datasets": [DatasetSpec(**{"config": {}, **part}) for part in parts]}


def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a pattern with a group. Raises: ConfigError with the key `where`."""
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
    """Convert a value to JSON types, reversibly.

    A tuple becomes `{"__tuple__": [...]}`. A dict with keys that are not strings becomes
    `{"__items__": [[k, v], ...]}`.
    """
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
    """Invert `pack`. Every container is new, because some scorers write into the entry."""
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
def _cached_task(task: str, arguments: str) -> ProceduralDataset:
    # Seed and size determine the questions only, not the scoring.
    return make_task(task, json.loads(arguments), seed=0, size=1)
