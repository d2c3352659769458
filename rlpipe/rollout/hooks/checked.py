"""What a function of the user gave back, as rows: checked, named, and with the weights that sampled
each token.

    tokens, response_length   ids of the vocabulary, prompt and response not empty together, within the context
    loss_mask                 0 or 1 for each response token; None: all count
    rollout_log_probs         finite, one a response token; None: those the engine gave, if it sampled all that counts
    teacher_log_probs         finite, one a response token; only with teacher.opd_type: samples
    status                    pending with a response counts as completed
    weight_versions           from the journal. A tool's tokens have those of the tokens before them; what the journal does not
                              know has the oldest weights that answered during the rollout: never
                              younger than it is
    rollout_routed_experts    with train.use_rollout_routing_replay: integers, (tokens - 1) × layers × k of them in any shape;
                              None, or as they were: those of the engine's answers
    reward                    a number, or a dict of numbers of which `reward_key` is the reward; None: the reward stage scores it
    group, index, seed        ours, whatever the function wrote there

Not here: calling the function (`custom`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from rlpipe.data.custom import is_given
from rlpipe.errors import EngineError, HookError
from rlpipe.rollout.hooks.journal import Journal
from rlpipe.store.routed_experts import NOT_ROUTED, within
from rlpipe.types import PlannedGroup, Sample, Status, WeightVersion


@dataclass(frozen=True)
class Limits:
    """What a sample may hold, and which entry of a reward dict is the reward."""

    vocab_size: int
    context_len: int
    reward_key: str | None = None
    routed_width: int = 0
    """Numbers per token of the engines' routed experts; 0: they are not kept."""
    teacher: bool = False
    """True if samples bring the teacher's log-probs (teacher.opd_type: samples)."""


def as_rows(
    returned: Any,
    group: PlannedGroup,
    rollout: int,
    journal: Journal,
    limits: Limits,
    *,
    before: Sample | None,
    where: str,
) -> list[Sample]:
    """The rows of one rollout. `before`: what there was of it from an earlier iteration.

    A rollout of several samples numbers them `rollout`, `rollout + n`, `rollout + 2n` … with n
    rollouts in the group. Raises: HookError naming the sample and what is wrong with it.
    """
    samples = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not samples:
        raise _wrong(
            "it gave back no sample",
            where,
            found="an empty list",
            expected="a Sample, or a list of them",
        )
    for number, sample in enumerate(samples):
        place = where if len(samples) == 1 else f"{where}, sample {number}"
        if not isinstance(sample, Sample):
            raise _wrong(
                "it gave back something else",
                place,
                found=type(sample).__name__,
                expected="a Sample, or a list of them",
            )
        _settle(sample, journal, limits, before, place)
        sample.group_id, sample.index, sample.rollout_id = (
            group.group_id,
            rollout + number * len(group.seeds),
            rollout,
        )
        sample.seed = group.seeds[rollout]
    if len({id(sample) for sample in samples}) < len(samples):
        raise _wrong(
            "it gave back one sample twice",
            where,
            found=f"{len(samples)} samples",
            expected="copies, if they are equal",
        )
    return samples


def check_row(sample: Sample, limits: Limits, where: str) -> None:
    """The rules for a sample that is a row already, after a hook had it. Raises: HookError."""
    _check_tokens(sample, limits, where)
    _check_columns(sample, limits, where)
    _take_routing(sample, limits, where)
    _take_reward(sample, limits, where)
    if sum(tokens for tokens, _ in sample.weight_versions) != len(sample.response_ids):
        raise _wrong(
            "its response tokens were changed",
            where,
            expected="the tokens as they were sampled; change loss_mask instead",
        )


def _settle(
    sample: Sample, journal: Journal, limits: Limits, before: Sample | None, where: str
) -> None:
    try:
        sample.settle_lengths()
    except ValueError as error:
        raise _wrong("its response is longer than its tokens", where, found=error) from error
    if isinstance(sample.status, str) and not isinstance(sample.status, Status):
        sample.status = Status(sample.status)
    if sample.status is Status.PENDING and sample.response_ids:
        sample.status = Status.COMPLETED
    if sample.status is Status.PENDING:
        found = "status pending" + (
            f", a response text of {len(sample.response)} characters" if sample.response else ""
        )
        expected = "tokens (prompt + response) and response_length"
        raise _wrong("it has no response tokens", where, found=found, expected=expected)
    left_alone = before is not None and sample.rollout_log_probs == before.rollout_log_probs
    if left_alone and len(sample.response_ids) > len(sample.rollout_log_probs or ()):
        sample.rollout_log_probs = None
    _check_tokens(sample, limits, where)
    _check_columns(sample, limits, where)
    _take_reward(sample, limits, where)
    if before is not None and sample.rollout_routed_experts is not None:
        untouched = np.array_equal(sample.rollout_routed_experts, before.rollout_routed_experts)
        sample.rollout_routed_experts = None if untouched else sample.rollout_routed_experts
    _take_routing(sample, limits, where)
    _attribute(sample, journal, before, routed=bool(limits.routed_width))
    sample.finish_reason = sample.finish_reason or _REASONS[sample.status]


_REASONS = {
    Status.COMPLETED: "stop",
    Status.TRUNCATED: "length",
    Status.ABORTED: "abort",
    Status.FAILED: "failed",
}


UNREAD = {
    "generate_function_path": "call the other function from rollout.custom_generate_function_path; a held-out set may have its "
    "own (evaluation.datasets.N.custom_generate_function_path)",
    "train_metadata": "set sample.metadata, which functions of advantages and rewards are given",
    "multimodal_inputs": "prompts are text: vision and audio models are not supported",
    "multimodal_train_inputs": "prompts are text: vision and audio models are not supported",
}
"""Fields of slime's samples that nothing here reads → what to do instead. A sample that sets one is
refused."""


def check_unread(sample: Any, where: str) -> None:
    """Raises: HookError if a function set a field that would be ignored."""
    for name, instead in UNREAD.items():
        if is_given(value := getattr(sample, name, None)):
            raise HookError(
                f"sample.{name} is not read",
                where=where,
                found=repr(value)[:200],
                expected="None",
                do=instead,
            )


def _check_tokens(sample: Sample, limits: Limits, where: str) -> None:
    ids = [*sample.prompt_ids, *sample.response_ids]
    bad = next(
        (
            token
            for token in ids
            if not isinstance(token, Integral) or not 0 <= token < limits.vocab_size
        ),
        None,
    )
    if bad is not None:
        raise _wrong(
            "a token id is not in the vocabulary",
            where,
            found=repr(bad),
            expected=f"0 <= id < {limits.vocab_size}",
        )
    if not sample.prompt_ids:
        found = f"{len(ids)} tokens, response_length {len(sample.response_ids)}"
        raise _wrong(
            "it has no prompt tokens",
            where,
            found=found,
            expected="tokens that begin with the prompt",
        )
    if len(ids) > limits.context_len:
        expected = (
            f"at most {limits.context_len} (rollout.rollout_max_context_len, the model's own limit)"
        )
        raise _wrong("it is too long", where, found=f"{len(ids)} tokens", expected=expected)
    sample.prompt_ids, sample.response_ids = (
        [int(i) for i in sample.prompt_ids],
        [int(i) for i in sample.response_ids],
    )


def _check_columns(sample: Sample, limits: Limits, where: str) -> None:
    check_unread(sample, where)
    _check_teacher(sample, limits, where)
    size = len(sample.response_ids)
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        values = getattr(sample, name)
        if values is not None and len(values) != size:
            raise _wrong(
                f"{name} has not one value per response token",
                where,
                found=len(values),
                expected=size,
            )
    if any(value not in (0, 1) for value in sample.loss_mask or ()):
        raise _wrong(
            "loss_mask has a value that is neither 0 nor 1",
            where,
            found=sorted(set(sample.loss_mask or ()), key=repr),
        )
    if sample.loss_mask is not None:
        sample.loss_mask = [int(value) for value in sample.loss_mask]
    if not all(
        isinstance(value, Real) and math.isfinite(value) for value in sample.rollout_log_probs or ()
    ):
        raise _wrong("rollout_log_probs has a value that is not a finite number", where)
    try:
        sample.metadata = json.loads(json.dumps(dict(sample.metadata), allow_nan=False))
        sample.prompt = json.loads(json.dumps(sample.prompt))
    except (TypeError, ValueError) as error:
        raise _wrong("prompt or metadata cannot be written as JSON", where, found=error) from error
    sample.response, sample.label = (
        str(sample.response),
        None if sample.label is None else str(sample.label),
    )


def _check_teacher(sample: Sample, limits: Limits, where: str) -> None:
    """The teacher's log-probs as floats, if the run wants them. Raises: HookError."""
    given = sample.teacher_log_probs
    if given is None:
        return
    if not limits.teacher:
        do = "set advantage.use_opd: true and teacher.opd_type: samples, or leave them out: the run's teacher scores the batch"
        raise HookError("sample.teacher_log_probs is not read", where=where, expected="None", do=do)
    try:
        sample.teacher_log_probs = [float(value) for value in given]
    except (TypeError, ValueError) as error:
        raise _wrong("teacher_log_probs are not numbers", where, found=error) from error
    if not all(map(math.isfinite, sample.teacher_log_probs)):
        raise _wrong("teacher_log_probs has a value that is not a finite number", where)


def _take_routing(sample: Sample, limits: Limits, where: str) -> None:
    """The experts as rows, if there are any and the run wants them."""
    given = sample.rollout_routed_experts
    rows = max(len(sample.prompt_ids) + len(sample.response_ids) - 1, 0)
    if given is None or not limits.routed_width:
        sample.rollout_routed_experts = None
        return
    experts = np.asarray(given)
    whole = experts.size % limits.routed_width == 0 and experts.size <= rows * limits.routed_width
    if (
        experts.dtype.kind not in "iu"
        or not whole
        or (experts.size and not 0 <= experts.min() <= experts.max() < NOT_ROUTED)
    ):
        expected = f"{rows} tokens × {limits.routed_width} experts, numbers from 0"
        raise _wrong(
            "rollout_routed_experts do not fit its tokens",
            where,
            found=f"{experts.dtype} {experts.shape}",
            expected=expected,
        )
    sample.rollout_routed_experts = experts.reshape(-1, limits.routed_width).astype(np.uint16)


def _take_reward(sample: Sample, limits: Limits, where: str) -> None:
    if isinstance(sample.reward, dict):
        parts = dict(sample.reward)
        key = limits.reward_key or "reward"
        if key not in parts:
            raise _wrong(
                "which entry of the dict is the reward?",
                where,
                found=", ".join(map(str, parts)),
                expected=repr(key),
            )
        sample.reward = parts.pop(key)
        sample.reward_parts = {
            str(name): _number(value, f"reward part {name!r}", where)
            for name, value in parts.items()
        }
    if sample.reward is not None:
        sample.reward = _number(sample.reward, "the reward", where)


def _number(value: Any, what: str, where: str) -> float:
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(value, Real) or not math.isfinite(value):
        raise _wrong(f"{what} is not a finite number", where, found=repr(value)[:200])
    return float(value)


def _attribute(sample: Sample, journal: Journal, before: Sample | None, *, routed: bool) -> None:
    """Weight versions of all tokens; log-probs, and experts if they are wanted, where the function
    gave none."""
    goes_on = (
        before is not None
        and sample.response_ids[: len(before.response_ids)] == before.response_ids
    )
    begin = len(before.response_ids) if before is not None and goes_on else 0
    held = before.rollout_routed_experts if before is not None and goes_on else None
    known = journal.known(
        sample.prompt_ids, sample.response_ids, sample.loss_mask, begin=begin, routed=held
    )
    if routed and sample.rollout_routed_experts is None:
        tokens = len(sample.prompt_ids) + len(sample.response_ids)
        sample.rollout_routed_experts = within(known.routed_experts, tokens)
    if before is not None and goes_on:
        known.versions[:begin] = [
            version for tokens, version in before.weight_versions for _ in range(tokens)
        ]
        known.log_probs[:begin] = before.rollout_log_probs or [None] * begin
    counts = sample.loss_mask or [1] * len(sample.response_ids)
    if (
        sample.rollout_log_probs is None
        and (log_probs := _log_probs(known.log_probs, counts)) is not None
    ):
        sample.rollout_log_probs = log_probs
    sample.weight_versions = runs_of(
        _filled(known.versions, counts, _oldest(sample.weight_versions, journal, before))
    )


def _log_probs(known: list[float | None], counts: Sequence[int]) -> list[float] | None:
    """Those of the engine; a token that does not count has 0, as in slime. None if one that counts
    is not known."""
    filled = [
        value if value is not None else (None if count else 0.0)
        for value, count in zip(known, counts, strict=True)
    ]
    return None if None in filled else [value for value in filled if value is not None]


def _oldest(said: Sequence[Any], journal: Journal, before: Sample | None) -> int | None:
    """The version of tokens that nobody knows: the oldest that the function was told, else that
    anyone was told."""
    stamps = [stamp for stamp in said if isinstance(stamp, str)]
    try:
        versions = [WeightVersion.version_of(stamp) for stamp in stamps]
    except ValueError as error:
        raise EngineError(
            "the engine's weights have no version of ours", where="custom generate", found=stamps
        ) from error
    candidates = [*versions, *([] if versions or journal.oldest is None else [journal.oldest])]
    if before is not None and before.oldest_weight_version is not None:
        candidates.append(before.oldest_weight_version)
    return min(candidates, default=None)


def _filled(versions: list[int | None], counts: Sequence[int], unknown: int | None) -> list[int]:
    """One version a token; an empty list if none is known at all."""
    last = next((version for version in versions if version is not None), unknown)
    if last is None:
        return []
    filled = []
    for version, count in zip(versions, counts, strict=True):
        if version is None and count and unknown is not None:
            version = unknown
        last = last if version is None else version
        filled.append(last)
    return filled


def runs_of(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Run lengths `(tokens, version)`."""
    runs: list[tuple[int, int]] = []
    for version in versions:
        if runs and runs[-1][1] == version:
            runs[-1] = (runs[-1][0] + 1, version)
        else:
            runs.append((1, version))
    return runs


def _wrong(problem: str, where: str, *, found: object = None, expected: object = None) -> HookError:
    return HookError(problem, where=where, found=found, expected=expected)
