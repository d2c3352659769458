"""Functions of `slime.rollout.rm_hub` and its modules, for functions written for slime.

`rlpipe.slime.modules` makes them importable under slime's names. They grade as rlpipe's rewards of
the same name do; `rlpipe.rewards.rules` lists the differences from slime.
"""

from __future__ import annotations

import asyncio
import inspect
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlpipe.config.data import RemoteReward
from rlpipe.config.hooks import load_hook
from rlpipe.rewards.answers import boxed, boxes
from rlpipe.rewards.math import equal
from rlpipe.rewards.remote import make_remote
from rlpipe.rewards.rules import LETTERS, dapo, deepscaler, f1, gpqa, named_rule
from rlpipe.types import Sample

DEFAULT_VALID_LETTERS = list(LETTERS)


def last_boxed_only_string(text: str) -> str | None:
    """Return the last `\\boxed{...}` with its command; None without one, or if it is not closed."""
    found = boxes(text)
    if not found or found[-1].content is None:
        return None
    return text[found[-1].start : found[-1].end]


def remove_boxed(text: str) -> str | None:
    """Return the content of a box."""
    return boxed(text)


def extract_answer(passage: str) -> str | None:
    """Return the content of the last box of a text."""
    return boxed(passage)


extract_boxed_answer = extract_answer


def grade_answer_verl(solution: str, ground_truth: str) -> bool:
    """True if the last box of a solution equals the label as mathematics."""
    answer = boxed(solution) if solution else None
    return bool(answer and ground_truth) and equal(str(answer), str(ground_truth))


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """True if two answers without a box are equal as mathematics."""
    return bool(given_answer and ground_truth) and equal(given_answer, ground_truth)


grade_answer_mathd = grade_answer_sympy


def get_deepscaler_rule_based_reward(response: str, label: str | float | None) -> int:
    """Return 1 if the last box after the reasoning equals the label, else 0."""
    return int(deepscaler(Sample(response=response, label=_text(label)))["reward"]) if label else 0


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, **_: Any
) -> dict[str, Any]:
    """Return DAPO's `score` (1 or -1), `acc` and `pred`. `strict_box_verify`: only a box counts."""
    if strict_box_verify:
        prediction = boxed(solution_str[-100:])
        correct = prediction == ground_truth
    else:
        correct = bool(dapo(Sample(response=solution_str, label=ground_truth))["acc"])
        _before, mark, rest = solution_str[-300:].rpartition("Answer:")
        prediction = rest.strip().split("\n")[0] if mark else "[INVALID]"
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}


def f1_score(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """Return F1, precision and recall of the words."""
    if prediction is None:
        return 0.0, 0.0, 0.0
    parts = f1(Sample(response=prediction, label=ground_truth))
    return parts["reward"], parts["precision"], parts["recall"]


def normalize_answer(text: str) -> str:
    """Return SQuAD's normal form: lower case, without punctuation, articles and extra blanks."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


def compute_gpqa_reward(response: str, label: Any, metadata: dict | None = None) -> float:
    """Return 1 if the response chooses the correct option, else 0."""
    sample = Sample(response=response or "", label=_text(label), metadata=dict(metadata or {}))
    return gpqa(sample)["reward"]


async def async_rm(args: Any, sample: Sample, **keywords: Any) -> Any:
    """Return the reward of a sample by its own function, `args.custom_rm_path` or the rm_type.

    Raises: NotImplementedError without an rm_type; DataError for an unknown one.
    """
    path = sample.custom_rm_path or args.custom_rm_path
    if path:
        result = load_hook(path)(args, sample, **keywords)
        return await result if inspect.isawaitable(result) else result
    kind = str(sample.metadata.get("rm_type") or args.rm_type or "").strip()
    if not kind:
        raise NotImplementedError("Rule-based RM type is not specified.")
    if kind == "remote_rm":
        return await make_remote(RemoteReward(type="remote", url=args.rm_url))(sample)
    parts = named_rule(kind)(replace(sample))
    if kind.removeprefix("boxed_") == "dapo":
        return {"score": parts["reward"], **parts}
    return parts["reward"]


async def batched_async_rm(args: Any, samples: Sequence[Sample], **keywords: Any) -> list[Any]:
    """Return the rewards of samples; `args.custom_rm_path` gets all of them at once."""
    if args.custom_rm_path is not None:
        return await load_hook(args.custom_rm_path)(args, samples, **keywords)
    return list(await asyncio.gather(*(async_rm(args, sample, **keywords) for sample in samples)))


def _text(label: Any) -> str | None:
    return None if label is None else str(label)


compute_score_dapo = compute_score
