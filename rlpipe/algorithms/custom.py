"""Functions of the user in place of an estimator, a loss, a correction, a reducer: how they are
called, what they must be.

Each is found by a path in the configuration and has slime's signature, so slime's own functions
work; `args` has slime's names:

    custom_advantage_function_path        (args, rollout_data) -> None; sets rollout_data["advantages"], ["returns"]
    custom_tis_function_path              (args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths,
                                           response_lengths, **others) -> (pg_loss, masks, metrics)
    custom_pg_loss_reducer_function_path  (total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer
    custom_loss_function_path             (args, batch, logits, sum_of_sample_mean) -> (loss, metrics)
                                          or (args, batch, log_probs, entropy) -> (loss per token,
                                          metrics)

Correction and reducer are asked once per optimizer step, of all its samples on the CPU, and must be
what slime's are too: the first proportional to pg_loss, the second linear in its values. So their
result is a weight per token, and neither micro-batches nor parallelism change it. What is not
proportional or linear is refused, with its numbers.

The first form of a custom loss is slime's: see `algorithms.logits`, and what it costs there. The
second spares whole logits; it is a loss with a parameter `log_probs` or `entropy`. Its `batch` has
[n] tensors of the tokens at hand (advantages, log_probs, rollout_log_probs, ref_log_probs,
teacher_log_probs, values, returns: those the batch has, `log_probs` being the ones before the
iteration) and `sequence_mean`, [n] → [n].

The source of each function is an input of its stage, and so are the keys of that stage. What a
function reads of `args` beyond them is not: change such a key together with the function's source
(a comment will do).

Not here: finding and importing a function (`config.hooks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlpipe.algorithms.importance import Correction
from rlpipe.algorithms.logits import MODULES
from rlpipe.algorithms.objective import Tokens
from rlpipe.algorithms.values import Estimates
from rlpipe.config.algorithms import AdvantageConfig, LossConfig
from rlpipe.config.hooks import load_hook
from rlpipe.errors import ConfigError, DataError
from rlpipe.slime.modules import provide

Function = Callable[..., Any]

CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "custom_advantage_function_path": (("args", "rollout_data"), ()),
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
"""Key → positional and keyword arguments of the call."""


def load(key: str, path: str) -> Function:
    """The function under a key. Raises: ConfigError if it is not there or cannot be called as it
    will be."""
    provide(MODULES)
    function = load_hook(path)
    positional, keywords = CALLS[key]
    try:
        inspect.signature(function).bind(*positional, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "this function cannot be called as it would be",
            where=key,
            found=f"{path}: {error}",
            expected=f"({', '.join([*positional, *(['*'] if keywords else []), *keywords])})",
        ) from error
    return function


def takes_logits(function: Function) -> bool:
    """Is this custom loss of slime's form?"""
    return not {"log_probs", "entropy"} & set(inspect.signature(function).parameters)


def check(advantage: AdvantageConfig, loss: LossConfig) -> None:
    """Load all of them, to know before anything is started. Raises: ConfigError."""
    for config in (advantage, loss):
        for key in CALLS:
            if path := getattr(config, key, None):
                load(key, path)


def custom_estimates(
    function: Function, args: Any, rollout_data: dict[str, Any], lengths: np.ndarray
) -> Estimates:
    """What an advantage function sets, flat [R] float64. Raises: DataError if it is not one number
    per response token."""
    function(args, rollout_data)
    where = "custom_advantage_function_path"
    advantages = _flat(rollout_data.get("advantages"), lengths, where, "advantages")
    returns = rollout_data.get("returns")
    return Estimates(
        advantages, advantages if returns is None else _flat(returns, lengths, where, "returns")
    )


def custom_correction(
    function: Function,
    args: Any,
    *,
    proximal: Sequence[np.ndarray],
    behaviour: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    total_lengths: np.ndarray,
) -> Correction:
    """The factor of every token: what a correction makes of pg_loss = 1.

    Shapes: one array per sample. Raises: DataError if it is not proportional to pg_loss or does not
    answer one value per token.
    """
    lengths = np.array([len(mask) for mask in masks], np.int64)

    def answer(scale: float) -> tuple[np.ndarray, Any, dict[str, Any]]:
        pg_loss, kept, metrics = function(
            args,
            pg_loss=torch.full((int(lengths.sum()),), scale),
            train_log_probs=[torch.from_numpy(part.copy()) for part in proximal],
            rollout_log_probs=[torch.from_numpy(part.copy()) for part in behaviour],
            loss_masks=[torch.from_numpy(part.copy()) for part in masks],
            total_lengths=total_lengths.tolist(),
            response_lengths=lengths.tolist(),
        )
        return _flat(pg_loss, lengths, "custom_tis_function_path", "pg_loss"), kept, metrics

    factor, kept, metrics = answer(1.0)
    twice = answer(-2.0)[0]
    if not np.allclose(twice, -2.0 * factor, rtol=1e-4, atol=1e-6):
        at = int(np.argmax(np.abs(twice + 2.0 * factor)))
        raise DataError(
            "a correction must be proportional to pg_loss",
            where="train.loss.custom_tis_function_path",
            found=f"{factor[at]:g} of 1 and {twice[at]:g} of -2 at token {at}",
            expected="pg_loss × a factor that depends on the log-probs only",
        )
    where = "custom_tis_function_path"
    mask = np.concatenate([*masks]) if len(masks) else np.zeros(0)
    given = mask if kept is None else _flat(kept, lengths, where, "masks")
    logged = {name: _flat(value, lengths, where, name) for name, value in metrics.items()}
    return Correction(factor, ((given > 0) & (mask > 0)) * 1.0, logged)


def reducer_weights(
    function: Function,
    *,
    masks: Sequence[np.ndarray],
    total_lengths: np.ndarray,
    per_token: bool,
    num_rollouts: int,
) -> np.ndarray:
    """The weight [R] float32 of every token under a reducer: its gradient.

    slime's reducers give a sum over samples (of tokens, under calculate_per_token_loss), which is
    then divided by their number. Raises: DataError if it is not linear.
    """
    lengths = [len(mask) for mask in masks]
    tensors = [torch.from_numpy(np.asarray(mask, np.float64)) for mask in masks]
    reduce = function(total_lengths.tolist(), lengths, tensors, per_token)
    values = torch.zeros(sum(lengths), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(reduce(values), values)
    probe = torch.sin(torch.arange(1, len(values) + 1, dtype=torch.float64))
    found = float(reduce(probe))
    linear = float(gradient @ probe)
    if not np.isclose(found, linear, rtol=1e-6, atol=1e-9):
        raise DataError(
            "a reducer must be linear in its values",
            where="train.loss.custom_pg_loss_reducer_function_path",
            found=f"{found:g} of a probe",
            expected=f"{linear:g}, its gradient times the probe",
        )
    total = sum(float(mask.sum()) for mask in tensors) if per_token else float(num_rollouts)
    return (gradient.numpy() / max(total, 1.0)).astype(np.float32)


def custom_loss(
    function: Function, args: Any, tokens: Tokens
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss [n] of a custom loss, and its metrics [n]. Raises: DataError for another shape."""
    batch = {**tokens.columns, "sequence_mean": tokens.sequences.mean}
    per_token, metrics = function(args, batch, tokens.log_probs, tokens.entropy)
    for name, value in {"loss": per_token, **metrics}.items():
        if not isinstance(value, torch.Tensor) or value.shape != tokens.log_probs.shape:
            raise DataError(
                "a custom loss answers one value per token",
                where=f"train.loss.custom_loss_function_path ({name})",
                found=tuple(value.shape)
                if isinstance(value, torch.Tensor)
                else type(value).__name__,
                expected=tuple(tokens.log_probs.shape),
                do="do not reduce it: it is weighted by token like every loss (calculate_per_token_loss and the like)",
            )
    return per_token, metrics


def _flat(values: Any, lengths: np.ndarray, where: str, name: str) -> np.ndarray:
    """A flat [R] float64 array of a list per sample, or of one flat tensor."""
    parts = (
        [values]
        if isinstance(values, torch.Tensor | np.ndarray)
        else list(() if values is None else values)
    )
    arrays = [
        np.asarray(
            part.detach().cpu() if isinstance(part, torch.Tensor) else part, np.float64
        ).ravel()
        for part in parts
    ]
    if len(arrays) == len(lengths) and any(
        len(array) != length for array, length in zip(arrays, lengths, strict=True)
    ):
        arrays = []
    flat = np.concatenate(arrays) if arrays else np.zeros(0)
    if len(flat) != int(lengths.sum()):
        raise DataError(
            "a function of yours must answer one value per response token",
            where=f"{where} ({name})",
            found=f"{len(parts)} parts, {len(flat)} values that fit",
            expected=f"{len(lengths)} parts of {int(lengths.sum())} values together",
        )
    return flat
