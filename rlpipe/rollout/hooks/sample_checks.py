"""Check the samples that a user function returned, and complete them to rows.

    tokens, response_length   ids of the vocabulary, at least one prompt token, within the context
    loss_mask                 0 or 1 for each response token; None: all tokens count
    rollout_log_probs         a finite number for each response token; None: the engine's
                              log-probs, if the engine sampled all tokens that count
    teacher_log_probs         a finite number for each response token; needs
                              teacher.opd_type: samples
    status                    `pending` with a response counts as `completed`
    weight_versions           from the journal. Tokens of a tool have the version of the tokens
                              before. Unknown tokens have the oldest version that answered in the
                              rollout, so a token is never younger than recorded
    rollout_routed_experts    with train.use_rollout_routing_replay: (tokens - 1) × layers × k
                              integers in any shape; None or unchanged: the experts of the
                              engine's answers
    reward                    a number, or a dict of numbers with the reward under `reward_key`
                              (entries of text are left out); None: the reward stage scores the
                              sample
    group, index, seed        set by rlpipe

Entry points: `checked_rows` for returned samples, `check_row` for a row that a hook changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from rlpipe.data.user_source import is_given
from rlpipe.errors import EngineError, HookError
from rlpipe.rollout.generate import FINISHED
from rlpipe.rollout.generation import runs_of
from rlpipe.rollout.hooks.journal import Journal
from rlpipe.slime.sample import own_sample
from rlpipe.store.routed_experts import NOT_ROUTED, within
from rlpipe.types import PlannedGroup, Sample, Status, WeightVersion

_REASON_OF_STATUS = {
    Status.COMPLETED: "stop",
    Status.TRUNCATED: "length",
    Status.ABORTED: "abort",
    Status.FAILED: "failed",
}
_NOT_TEXT = "prompts are text: vision and audio models are not supported"
UNREAD = {
    "generate_function_path": "call the other function from "
    "rollout.custom_generate_function_path; a held-out set may have another function "
    "(evaluation.datasets.N.custom_generate_function_path)",
    "train_metadata": "set sample.metadata, which functions of advantages and rewards are given",
    "multimodal_inputs": _NOT_TEXT,
    "multimodal_train_inputs": _NOT_TEXT,
}
"""Fields of slime's samples that rlpipe does not read, with the replacement. A sample that sets
such a field is refused."""


@dataclass(frozen=True)
class Limits:
    """Limits of a sample, and settings for reading it."""

    vocab_size: int
    context_len: int
    reward_key: str | None = None
    """Entry of a reward dict that is the reward."""
    routed_width: int = 0
    """Numbers per token of the routed experts. 0: they are not stored."""
    teacher: bool = False
    """True if samples have the teacher's log-probs (teacher.opd_type: samples)."""
    trained: bool = True
    """False in evaluations, where a response may be text without tokens."""


def checked_rows(
    returned: Any,
    group: PlannedGroup,
    rollout: int,
    journal: Journal,
    limits: Limits,
    *,
    before: Sample | None,
    where: str,
) -> list[Sample]:
    """Return the rows of one rollout.

    `before` is the sample of an earlier iteration that the rollout continued. With n rollouts in
    the group, several samples of a rollout get the indices `rollout`, `rollout + n`,
    `rollout + 2n` and so on.

    Raises: HookError with the sample and the problem.
    """
    expected = "a Sample, or a list of them"
    samples = list(returned) if isinstance(returned, list | tuple) else [returned]
    samples = [own_sample(sample) for sample in samples]
    if not samples:
        raise _error(
            "the function returned no sample", where, found="an empty list", expected=expected
        )
    for number, sample in enumerate(samples):
        sample_where = where if len(samples) == 1 else f"{where}, sample {number}"
        if not isinstance(sample, Sample):
            raise _error(
                "the function returned another type",
                sample_where,
                found=type(sample).__name__,
                expected=expected,
            )
        _complete(sample, journal, limits, before, sample_where)
        _check_prompt(sample, group, sample_where)
        sample.group_id = group.group_id
        sample.index = rollout + number * len(group.seeds)
        sample.rollout_id = rollout
        sample.seed = group.seeds[rollout]
    if len({id(sample) for sample in samples}) < len(samples):
        raise _error(
            "the function returned one sample twice",
            where,
            found=f"{len(samples)} samples",
            expected="copies, if the samples are equal",
        )
    return samples


def check_row(sample: Sample, limits: Limits, where: str) -> None:
    """Check a complete row after a hook changed it. Raises: HookError."""
    _check_tokens(sample, limits, where)
    _check_columns(sample, limits, where)
    _read_routed_experts(sample, limits, where)
    _read_reward(sample, limits, where)
    if sum(tokens for tokens, _ in sample.weight_versions) != len(sample.response_ids):
        raise _error(
            "the response tokens were changed",
            where,
            expected="the sampled tokens; change loss_mask instead",
        )


def check_unread(sample: Any, where: str) -> None:
    """Raises: HookError if a function set a field that rlpipe would ignore."""
    for name, instead in UNREAD.items():
        if is_given(value := getattr(sample, name, None)):
            raise HookError(
                f"sample.{name} is not read",
                where=where,
                found=repr(value)[:200],
                expected="None",
                do=instead,
            )


def _complete(
    sample: Sample, journal: Journal, limits: Limits, before: Sample | None, where: str
) -> None:
    """Check a sample and fill the fields that the function did not set."""
    try:
        sample.settle_lengths()
    except ValueError as error:
        raise _error("the response is longer than the tokens", where, found=error) from error
    _settle_status(sample, where)
    _check_response(sample, limits, where)
    if before is not None:
        _forget_copied_values(sample, before)
    _check_tokens(sample, limits, where)
    _check_columns(sample, limits, where)
    _read_reward(sample, limits, where)
    _read_routed_experts(sample, limits, where)
    _attribute(sample, journal, before, routed=bool(limits.routed_width))
    sample.finish_reason = sample.finish_reason or _REASON_OF_STATUS[sample.status]


def _settle_status(sample: Sample, where: str) -> None:
    # slime's functions may set the status as a string, or as a value of slime's own enumeration.
    if not isinstance(sample.status, Status):
        sample.status = Status(getattr(sample.status, "value", sample.status))
    if sample.status is Status.PENDING and sample.response_ids:
        sample.status = Status.COMPLETED


def _check_response(sample: Sample, limits: Limits, where: str) -> None:
    """Raises: HookError if the function set the text and no tokens, or nothing at all."""
    text_only = limits.trained and sample.response and sample.status in FINISHED
    if sample.response_ids or not (text_only or sample.status is Status.PENDING):
        return
    found = f"status {sample.status.value}"
    if sample.response:
        found += f", a response text of {len(sample.response)} characters"
    raise HookError(
        "the sample has no response tokens",
        where=where,
        found=found,
        expected="sample.tokens (prompt + response) and sample.response_length",
        do="append the ids that the engine sampled; its answer has them as "
        "[entry[1] for entry in meta_info['output_token_logprobs']]",
    )


def _check_prompt(sample: Sample, group: PlannedGroup, where: str) -> None:
    """Raises: HookError if the response is a part of the prompt: the function appended no token."""
    if sample.response_ids and [*sample.prompt_ids, *sample.response_ids] == [*group.prompt_ids]:
        raise _error(
            "sample.tokens are the prompt without a response",
            where,
            found=f"{len(group.prompt_ids)} tokens, as in the prompt, and response_length "
            f"{len(sample.response_ids)}",
            expected="sample.tokens = the prompt's tokens + the tokens that the engine sampled",
        )


def _forget_copied_values(sample: Sample, before: Sample) -> None:
    """Unset the per-token values of the earlier iteration that the function left unchanged.

    They have no values for the new tokens. The journal has the values of all tokens.
    """
    unchanged = sample.rollout_log_probs == before.rollout_log_probs
    if unchanged and len(sample.response_ids) > len(sample.rollout_log_probs or ()):
        sample.rollout_log_probs = None
    experts = sample.rollout_routed_experts
    if experts is not None and np.array_equal(experts, before.rollout_routed_experts):
        sample.rollout_routed_experts = None


def _check_tokens(sample: Sample, limits: Limits, where: str) -> None:
    ids = [*sample.prompt_ids, *sample.response_ids]
    for token in ids:
        if not isinstance(token, Integral) or not 0 <= token < limits.vocab_size:
            raise _error(
                "a token id is not in the vocabulary",
                where,
                found=repr(token),
                expected=f"0 <= id < {limits.vocab_size}",
            )
    if not sample.prompt_ids:
        raise _error(
            "the sample has no prompt tokens",
            where,
            found=f"{len(ids)} tokens, response_length {len(sample.response_ids)}",
            expected="tokens that begin with the prompt",
        )
    if len(ids) > limits.context_len:
        raise _error(
            "the sample is too long",
            where,
            found=f"{len(ids)} tokens",
            expected=f"at most {limits.context_len} "
            "(rollout.rollout_max_context_len, the model's own limit)",
        )
    # NumPy integers become Python integers, which Parquet and JSON accept.
    sample.prompt_ids = [int(token) for token in sample.prompt_ids]
    sample.response_ids = [int(token) for token in sample.response_ids]


def _check_columns(sample: Sample, limits: Limits, where: str) -> None:
    check_unread(sample, where)
    _read_teacher_log_probs(sample, limits, where)
    num_tokens = len(sample.response_ids)
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        values = getattr(sample, name)
        if values is not None and len(values) != num_tokens:
            raise _error(
                f"{name} does not have one value per response token",
                where,
                found=len(values),
                expected=num_tokens,
            )
    if any(value not in (0, 1) for value in sample.loss_mask or ()):
        raise _error(
            "loss_mask has a value that is neither 0 nor 1",
            where,
            found=sorted(set(sample.loss_mask or ()), key=repr),
        )
    if sample.loss_mask is not None:
        sample.loss_mask = [int(value) for value in sample.loss_mask]
    for value in sample.rollout_log_probs or ():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise _error("rollout_log_probs has a value that is not a finite number", where)
    try:
        sample.metadata = json.loads(json.dumps(dict(sample.metadata), allow_nan=False))
        sample.prompt = json.loads(json.dumps(sample.prompt))
    except (TypeError, ValueError) as error:
        raise _error("prompt or metadata cannot be written as JSON", where, found=error) from error
    sample.response = str(sample.response)
    if not isinstance(sample.label, dict | list | None):
        sample.label = str(sample.label)


def _read_teacher_log_probs(sample: Sample, limits: Limits, where: str) -> None:
    values = sample.teacher_log_probs
    if values is None:
        return
    if not limits.teacher:
        raise HookError(
            "sample.teacher_log_probs is not read",
            where=where,
            expected="None",
            do="set advantage.use_opd: true and teacher.opd_type: samples, "
            "or leave the field None: the run's teacher scores the batch",
        )
    try:
        sample.teacher_log_probs = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise _error("teacher_log_probs are not numbers", where, found=error) from error
    if not all(map(math.isfinite, sample.teacher_log_probs)):
        raise _error("teacher_log_probs has a value that is not a finite number", where)


def _read_routed_experts(sample: Sample, limits: Limits, where: str) -> None:
    """Bring the experts into the shape [tokens, routed_width]; drop experts that are not stored."""
    width = limits.routed_width
    if sample.rollout_routed_experts is None or not width:
        sample.rollout_routed_experts = None
        return
    max_rows = max(len(sample.prompt_ids) + len(sample.response_ids) - 1, 0)
    experts = np.asarray(sample.rollout_routed_experts)
    fits = experts.size % width == 0 and experts.size <= max_rows * width
    integers = experts.dtype.kind in "iu"
    in_range = not experts.size or 0 <= experts.min() <= experts.max() < NOT_ROUTED
    if not (integers and fits and in_range):
        raise _error(
            "rollout_routed_experts do not fit the tokens",
            where,
            found=f"{experts.dtype} {experts.shape}",
            expected=f"{max_rows} tokens × {width} experts, numbers from 0",
        )
    sample.rollout_routed_experts = experts.reshape(-1, width).astype(np.uint16)


def _read_reward(sample: Sample, limits: Limits, where: str) -> None:
    if isinstance(sample.reward, dict):
        parts = dict(sample.reward)
        key = limits.reward_key or "reward"
        if key not in parts:
            raise _error(
                "the dict of rewards lacks the entry of the reward",
                where,
                found=", ".join(map(str, parts)),
                expected=repr(key),
            )
        sample.reward = parts.pop(key)
        sample.reward_parts = {
            str(name): _finite_number(value, f"reward part {name!r}", where)
            for name, value in parts.items()
            if not isinstance(value, str | None)
        }
    if sample.reward is not None:
        sample.reward = _finite_number(sample.reward, "the reward", where)


def _finite_number(value: Any, name: str, where: str) -> float:
    # A zero-dimensional NumPy array or torch tensor counts as its value.
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(value, Real) or not math.isfinite(value):
        raise _error(f"{name} is not a finite number", where, found=repr(value)[:200])
    return float(value)


def _attribute(sample: Sample, journal: Journal, before: Sample | None, *, routed: bool) -> None:
    """Set the weight versions; set log-probs and experts if the function set none."""
    num_before = 0
    experts_before = None
    continued = before
    if before is not None:
        num_before = len(before.response_ids)
        experts_before = before.rollout_routed_experts
        if sample.response_ids[:num_before] != before.response_ids:
            # The function started the response again.
            num_before = 0
            experts_before = None
            continued = None
    known = journal.known(
        sample.prompt_ids,
        sample.response_ids,
        sample.loss_mask,
        begin=num_before,
        routed=experts_before,
    )
    if routed and sample.rollout_routed_experts is None:
        num_tokens = len(sample.prompt_ids) + len(sample.response_ids)
        sample.rollout_routed_experts = within(known.routed_experts, num_tokens)
    if continued is not None:
        known.versions[:num_before] = [
            version for tokens, version in continued.weight_versions for _ in range(tokens)
        ]
        known.log_probs[:num_before] = continued.rollout_log_probs or [None] * num_before
    loss_mask = sample.loss_mask or [1] * len(sample.response_ids)
    if sample.rollout_log_probs is None:
        sample.rollout_log_probs = _filled_log_probs(known.log_probs, loss_mask)
    oldest = _oldest_version(sample.weight_versions, journal, before)
    sample.weight_versions = runs_of(_filled_versions(known.versions, loss_mask, oldest))


def _filled_log_probs(
    known: Sequence[float | None], loss_mask: Sequence[int]
) -> list[float] | None:
    """Return the engine's log-probs, with 0 for tokens that do not count, as in slime. None if a
    token that counts has no log-prob."""
    filled = [
        0.0 if value is None and not counts else value
        for value, counts in zip(known, loss_mask, strict=True)
    ]
    return None if None in filled else [value for value in filled if value is not None]


def _oldest_version(reported: Sequence[Any], journal: Journal, before: Sample | None) -> int | None:
    """Return the version of tokens that the journal does not know: the oldest in the stamps that
    the function stored, else the oldest that answered in the rollout."""
    stamps = [stamp for stamp in reported if isinstance(stamp, str)]
    try:
        versions = [WeightVersion.version_of(stamp) for stamp in stamps]
    except ValueError as error:
        raise EngineError(
            "the engine's weight version is not one of rlpipe",
            where="custom generate",
            found=stamps,
        ) from error
    if not versions and journal.oldest is not None:
        versions.append(journal.oldest)
    if before is not None and before.oldest_weight_version is not None:
        versions.append(before.oldest_weight_version)
    return min(versions, default=None)


def _filled_versions(
    versions: Sequence[int | None], loss_mask: Sequence[int], unknown: int | None
) -> list[int]:
    """Return one version per token; empty if no version is known at all.

    Tokens that do not count take the version of the token before; others take `unknown`.
    """
    last = next((version for version in versions if version is not None), unknown)
    if last is None:
        return []
    filled = []
    for version, counts in zip(versions, loss_mask, strict=True):
        if version is None and counts and unknown is not None:
            version = unknown
        last = last if version is None else version
        filled.append(last)
    return filled


def _error(problem: str, where: str, *, found: object = None, expected: object = None) -> HookError:
    return HookError(problem, where=where, found=found, expected=expected)
