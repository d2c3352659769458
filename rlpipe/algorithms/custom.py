"""Call user functions in place of an estimator, a loss, a correction or a reducer.

Each configuration key names one function by its path. The signatures are slime's, so slime's own
functions work; `args` has slime's names:

    custom_advantage_function_path
        (args, rollout_data) -> None; sets rollout_data["advantages"], ["returns"]
    custom_convert_samples_to_train_data_path
        (args, samples) -> dict with "rewards" and "loss_masks"
    rollout_data_postprocess_path
        (args, rollout_id, rollout_data) -> None; changes "advantages", "returns" or "loss_masks"
    custom_tis_function_path
        (args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths,
        response_lengths, **others) -> (pg_loss, masks, metrics)
    custom_pg_loss_reducer_function_path
        (total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer
    custom_loss_function_path
        (args, batch, logits, sum_of_sample_mean) -> (loss, metrics)
        or (args, batch, log_probs, entropy) -> (loss per token, metrics)

A conversion of samples has slime's result, a dict of lists with an entry for each sample. Its
rewards, loss masks and log-probs replace those of the samples. Tokens, their order and the rollout
of each sample are stored before, so other ones are refused (`converted`).

Correction and reducer run once per optimizer step on the CPU, with all samples of the step. Like
slime's, a correction must be proportional to pg_loss and a reducer linear in its values. Their
result is then a weight per token that neither micro-batches nor parallelism change. A function
without this property is refused.

The first form of a custom loss is slime's (`algorithms.logits_loss`), and costs memory for logits.
The second form needs no whole logits. A loss with a parameter `log_probs` or `entropy` has the
second form. Its `batch` has [n] tensors of the micro-batch's tokens: advantages, log_probs,
rollout_log_probs, ref_log_probs, teacher_log_probs, values, returns, as far as the batch has them.
`log_probs` are the proximal log-probs. `sequence_mean` in `batch` is a function [n] → [n].

The source of each function is an input of its stage, and so are the configuration keys of that
stage. Other values that a function reads from `args` are not an input. After a change of such a
value, change the function's source too (a comment is enough).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlpipe.algorithms.importance import Correction
from rlpipe.algorithms.objective import TokenBatch
from rlpipe.algorithms.values import Estimates
from rlpipe.config.algorithms import AdvantageConfig, LossConfig
from rlpipe.config.hooks import load_hook
from rlpipe.errors import ConfigError, DataError
from rlpipe.types import Sample

Function = Callable[..., Any]

SIGNATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "custom_advantage_function_path": (("args", "rollout_data"), ()),
    "custom_convert_samples_to_train_data_path": (("args", "samples"), ()),
    "rollout_data_postprocess_path": (("args", "rollout_id", "rollout_data"), ()),
    "custom_tis_function_path": (
        ("args",),
        (
            "pg_loss",
            "train_log_probs",
            "rollout_log_probs",
            "loss_masks",
            "total_lengths",
            "response_lengths",
        ),
    ),
    "custom_pg_loss_reducer_function_path": (
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        (),
    ),
    "custom_loss_function_path": (("args", "batch", "logits", "sum_of_sample_mean"), ()),
}
"""Key → (positional arguments, keyword arguments) of the call."""


def load(key: str, path: str) -> Function:
    """Return the function that `path` names.

    Raises: ConfigError if it does not exist or cannot be called with the arguments of its key.
    """
    function = load_hook(path)
    positional, keywords = SIGNATURES[key]
    try:
        inspect.signature(function).bind(*positional, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the function cannot be called with the arguments of its key",
            where=key,
            found=f"{path}: {error}",
            expected=f"({', '.join([*positional, *(['*'] if keywords else []), *keywords])})",
        ) from error
    return function


def takes_logits(function: Function) -> bool:
    """True if a custom loss has slime's form, with logits."""
    return not {"log_probs", "entropy"} & set(inspect.signature(function).parameters)


def check(advantage: AdvantageConfig, loss: LossConfig) -> None:
    """Load every configured function, to fail before a run starts. Raises: ConfigError."""
    for config in (advantage, loss):
        for key in SIGNATURES:
            if path := getattr(config, key, None):
                load(key, path)


def custom_estimates(
    function: Function, args: Any, rollout_data: dict[str, Any], lengths: np.ndarray
) -> Estimates:
    """Call a custom advantage function and return its estimates, [R] float64 each.

    Without "returns", the returns are the advantages.

    Raises: DataError if the function does not set one number per response token.
    """
    function(args, rollout_data)
    where = "custom_advantage_function_path"
    advantages = _flatten(rollout_data.get("advantages"), lengths, where, "advantages")
    returns = rollout_data.get("returns")
    if returns is None:
        return Estimates(advantages, advantages)
    return Estimates(advantages, _flatten(returns, lengths, where, "returns"))


@dataclass(frozen=True, slots=True)
class Converted:
    """Values of a batch from the user's conversion of its samples."""

    rewards: np.ndarray
    """[N] float64."""
    loss_mask: np.ndarray
    """[R] float64, 0 or 1."""
    log_probs: dict[str, np.ndarray]
    """`rollout_log_probs` or `teacher_log_probs`, as far as returned → [R] float64."""


def converted(
    function: Function, args: Any, samples: Sequence[Sample], rollouts: np.ndarray
) -> Converted:
    """Call the conversion of samples and return the values that it decides.

    `rollouts` [N]: number of each sample's rollout.
    Raises: DataError if an entry is missing or unknown, does not have one value for each sample or
    token, or changes tokens, their order or the rollouts.
    """
    # Copies: the function may write into its samples.
    data = function(args, [replace(sample) for sample in samples])
    where = "custom_convert_samples_to_train_data_path"
    entries = {name: value for name, value in data.items() if value is not None}
    unknown = entries.keys() - {*CONVERTED, *STORED, *DERIVED}
    if unknown or not entries.keys() >= CONVERTED_ALWAYS:
        raise DataError(
            "a conversion of samples returns these entries",
            where=where,
            found=", ".join(sorted(entries)),
            expected=", ".join((*CONVERTED, *STORED, *DERIVED)),
        )
    numbers = np.unique(rollouts, return_inverse=True)[1].tolist()
    stored = {
        "tokens": [[*sample.prompt_ids, *sample.response_ids] for sample in samples],
        "response_lengths": [len(sample.response_ids) for sample in samples],
        "rollout_ids": numbers,
    }
    for name in entries.keys() & STORED.keys():
        if STORED[name](entries[name]) != STORED[name](stored[name]):
            raise DataError(
                f"a conversion of samples must not change their {name}",
                where=f"{where} ({name})",
                found=f"{len(entries[name])} samples with other values",
                expected=f"the values of the {len(samples)} samples, in their order",
                do="drop a sample by a loss mask of 0",
            )
    lengths = np.array(stored["response_lengths"], np.int64)
    per_token = {
        name: _flatten(entries[name], lengths, where, name)
        for name in CONVERTED
        if name in entries and name != "rewards"
    }
    rewards = _float_array(entries["rewards"])
    if len(rewards) != len(samples) or not np.isfinite(rewards).all():
        raise DataError(
            "a conversion of samples must return one finite reward per sample",
            where=f"{where} (rewards)",
            found=f"{int(np.isfinite(rewards).sum())} finite numbers",
            expected=f"{len(samples)}",
        )
    return Converted(
        rewards=rewards,
        loss_mask=_checked_mask(per_token.pop("loss_masks"), where),
        log_probs=per_token,
    )


def _first_seen(values: Sequence[Any]) -> list[int]:
    """Number values by their first appearance, so that equal partitions are equal lists."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [numbers[value] for value in values]


CONVERTED = ("rewards", "loss_masks", "rollout_log_probs", "teacher_log_probs")
"""Entries of a conversion that replace values of the samples."""
CONVERTED_ALWAYS = {"rewards", "loss_masks"}
STORED: dict[str, Callable[[Any], Any]] = {
    "tokens": lambda parts: [list(map(int, part)) for part in parts],
    "response_lengths": lambda lengths: list(map(int, lengths)),
    "rollout_ids": _first_seen,
}
"""Entries that must equal the stored samples → their form for the comparison."""
DERIVED = (
    "raw_reward",
    "truncated",
    "sample_indices",
    "rollout_mask_sums",
    "round_number",
    "source_names",
    "metadata",
)
"""Entries that a batch derives from the samples in any case."""


def postprocessed(
    function: Function,
    args: Any,
    rollout_id: int,
    rollout_data: dict[str, Any],
    lengths: np.ndarray,
) -> tuple[Estimates, np.ndarray]:
    """Call the post-processing of a batch and return its estimates and its loss mask, [R] each.

    Raises: DataError if a column does not have one value per response token, or a mask has another
    value than 0 and 1.
    """
    function(args, rollout_id, rollout_data)
    where = "rollout_data_postprocess_path"
    names = ("advantages", "returns", "loss_masks")
    advantages, returns, mask = (
        _flatten(rollout_data[name], lengths, where, name) for name in names
    )
    return Estimates(advantages, returns), _checked_mask(mask, where)


def _checked_mask(mask: np.ndarray, where: str) -> np.ndarray:
    """Return the mask. Raises: DataError for another value than 0 and 1."""
    if not np.isin(mask, (0, 1)).all():
        raise DataError("a loss mask is not 0 or 1", where=where, found=sorted({*mask})[:5])
    return mask


def custom_correction(
    function: Function,
    args: Any,
    *,
    proximal_log_probs: Sequence[np.ndarray],
    rollout_log_probs: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    total_lengths: np.ndarray,
) -> Correction:
    """Return the correction of a custom function: its result for pg_loss = 1.

    Shapes: one array per sample.
    Raises: DataError if the function is not proportional to pg_loss or does not return one value
    per response token.
    """
    lengths = np.array([len(mask) for mask in masks], np.int64)
    where = "custom_tis_function_path"

    def corrected(scale: float) -> tuple[np.ndarray, Any, dict[str, Any]]:
        # Every call gets copies: the function may write into its arguments.
        pg_loss, kept, metrics = function(
            args,
            pg_loss=torch.full((int(lengths.sum()),), scale),
            train_log_probs=[torch.from_numpy(part.copy()) for part in proximal_log_probs],
            rollout_log_probs=[torch.from_numpy(part.copy()) for part in rollout_log_probs],
            loss_masks=[torch.from_numpy(part.copy()) for part in masks],
            total_lengths=total_lengths.tolist(),
            response_lengths=lengths.tolist(),
        )
        return _flatten(pg_loss, lengths, where, "pg_loss"), kept, metrics

    # A proportional function returns factor × scale, so two calls determine and check the factor.
    factor, kept, metrics = corrected(1.0)
    scaled = corrected(-2.0)[0]
    if not np.allclose(scaled, -2.0 * factor, rtol=1e-4, atol=1e-6):
        token = int(np.argmax(np.abs(scaled + 2.0 * factor)))
        raise DataError(
            "a correction must be proportional to pg_loss",
            where="train.loss.custom_tis_function_path",
            found=f"{factor[token]:g} for 1 and {scaled[token]:g} for -2 at token {token}",
            expected="pg_loss × a factor that depends on the log-probs only",
        )
    mask = np.concatenate([*masks]) if len(masks) else np.zeros(0)
    kept_mask = mask if kept is None else _flatten(kept, lengths, where, "masks")
    columns = {name: _flatten(value, lengths, where, name) for name, value in metrics.items()}
    return Correction(factor, ((kept_mask > 0) & (mask > 0)) * 1.0, columns)


def reducer_weights(
    function: Function,
    *,
    masks: Sequence[np.ndarray],
    total_lengths: np.ndarray,
    per_token: bool,
    num_rollouts: int,
) -> np.ndarray:
    """Return the weight [R] float32 of every token under a custom reducer: its gradient.

    A reducer of slime returns a sum over samples, or over tokens under calculate_per_token_loss.
    This function divides by their number.

    Raises: DataError if the reducer is not linear.
    """
    lengths = [len(mask) for mask in masks]
    tensors = [torch.from_numpy(np.asarray(mask, np.float64)) for mask in masks]
    reduce = function(total_lengths.tolist(), lengths, tensors, per_token)
    values = torch.zeros(sum(lengths), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(reduce(values), values)
    # A linear function equals its gradient times the input, for any input.
    probe = torch.sin(torch.arange(1, len(values) + 1, dtype=torch.float64))
    reduced = float(reduce(probe))
    linear = float(gradient @ probe)
    if not np.isclose(reduced, linear, rtol=1e-6, atol=1e-9):
        raise DataError(
            "a reducer must be linear in its values",
            where="train.loss.custom_pg_loss_reducer_function_path",
            found=f"{reduced:g} for test values",
            expected=f"{linear:g}, the gradient times the test values",
        )
    total = sum(float(mask.sum()) for mask in tensors) if per_token else float(num_rollouts)
    return (gradient.numpy() / max(total, 1.0)).astype(np.float32)


def custom_loss(
    function: Function, args: Any, tokens: TokenBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss [n] and the metrics [n each] of a custom loss function.

    Raises: DataError if a result does not have one value per token.
    """
    batch = {**tokens.columns, "sequence_mean": tokens.sequences.mean}
    per_token, metrics = function(args, batch, tokens.log_probs, tokens.entropy)
    for name, value in {"loss": per_token, **metrics}.items():
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.shape != tokens.log_probs.shape:
            raise DataError(
                "a custom loss must return one value per token",
                where=f"train.loss.custom_loss_function_path ({name})",
                found=tuple(value.shape) if is_tensor else type(value).__name__,
                expected=tuple(tokens.log_probs.shape),
                do="return unreduced values: token weights are applied as for every loss "
                "(calculate_per_token_loss and similar keys)",
            )
    return per_token, metrics


def _flatten(values: Any, lengths: np.ndarray, where: str, name: str) -> np.ndarray:
    """Return a flat [R] float64 array from one array per sample, or from one flat tensor."""
    if isinstance(values, torch.Tensor | np.ndarray):
        parts = [values]
    else:
        parts = list(() if values is None else values)
    arrays = [_float_array(part) for part in parts]
    if len(arrays) == len(lengths):
        pairs = zip(arrays, lengths, strict=True)
        if any(len(array) != length for array, length in pairs):
            arrays = []
    flat = np.concatenate(arrays) if arrays else np.zeros(0)
    if len(flat) != int(lengths.sum()):
        raise DataError(
            "a user function must return one value per response token",
            where=f"{where} ({name})",
            found=f"{len(parts)} parts with {len(flat)} usable values",
            expected=f"{len(lengths)} parts with {int(lengths.sum())} values in total",
        )
    return flat


def _float_array(values: Any) -> np.ndarray:
    array = values.detach().cpu() if isinstance(values, torch.Tensor) else values
    return np.asarray(array, np.float64).ravel()
