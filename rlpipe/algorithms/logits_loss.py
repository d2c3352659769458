"""Custom losses of slime's form, which get logits: `train.loss.custom_loss_function_path`.

    (args, batch, logits, sum_of_sample_mean) -> (loss, metrics)

`logits` [1, T, V / TP] float32 are the logits of every packed token of the micro-batch on this
rank, including prompts and padding, over the rank's columns of the vocabulary. They are not divided
by `args.rollout_temperature`.

Logits cost memory that the other losses do not need: T × V / TP × 4 bytes, and the same again for
each step of the loss that autograd keeps. With 16384 tokens and a vocabulary of 152k, a copy has
10 GB. `train.max_tokens_per_gpu` bounds T; tensor parallelism divides V.

`batch` is slime's, with lists of one entry per sample of the micro-batch:

    tokens [1, T], unconcat_tokens, total_lengths, response_lengths, loss_masks, rollout_mask_sums,
    full_loss_masks [1, T], log_probs, ref_log_probs, rollout_log_probs, teacher_log_probs,
    advantages, values, returns (None if the batch has none), packed_seq_params,
    multimodal_train_inputs (None)

`loss_masks` cover whole samples. With context parallelism the other columns have this rank's tokens
only, as in slime: chunk r of each sample, then chunk 2 CP - 1 - r.

`sum_of_sample_mean` reduces a flat column of all samples: the sum over samples of the mean over the
counted tokens. Samples of one rollout share a denominator. With calculate_per_token_loss it is the
sum over tokens. Loss and metrics are scalars; they are divided by the step's number of rollouts (or
tokens) afterwards. All tensor parallel ranks must compute the same loss, each from its own columns.

`get_responses`, `get_log_probs_and_entropy`, `compute_policy_loss`, `compute_approx_kl`,
`icepop_function`, `vanilla_tis_function`, `all_gather_with_cp` and `slice_log_prob_with_cp` are
slime's functions. `rlpipe.slime.modules` makes them importable under slime's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from rlpipe.algorithms.divergence import kl_estimate
from rlpipe.algorithms.losses import policy_loss
from rlpipe.errors import DataError

LOSS_KEY = "train.loss.custom_loss_function_path"


@dataclass(frozen=True)
class Share:
    """The part of the logits on this rank."""

    group: Any = None
    """Process group of the ranks that split the vocabulary. None: this rank has all columns."""
    cp_size: int = 1
    cp_rank: int = 0


_WHOLE = Share()
_share: ContextVar[Share] = ContextVar("share", default=_WHOLE)


@contextmanager
def shared_as(share: Share) -> Iterator[None]:
    """Set the share of the logits for slime's functions within the context."""
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


def logits_loss(
    function: Callable[..., Any],
    args: Any,
    batch: dict[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Call a custom loss function and return its loss and metrics, all scalars.

    The loss always has a gradient at the logits, even if no token counts.

    Raises: DataError if a result is not a tensor with one value.
    """
    loss, metrics = function(args, batch, logits, sum_of_sample_mean)
    for name, value in {"loss": loss, **metrics}.items():
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or value.numel() != 1:
            raise DataError(
                "a custom loss of logits must return scalars",
                where=f"{LOSS_KEY} ({name})",
                found=tuple(value.shape) if is_tensor else type(value).__name__,
                expected="a tensor with one value",
                do="reduce it with sum_of_sample_mean",
            )
    loss = loss.reshape(())
    if not loss.requires_grad:
        # The sum of no logits is 0 with a gradient of zeros. 0 × a sum of masked logits is NaN.
        loss = loss + logits.flatten()[:0].sum()
    return loss, metrics


def get_responses(
    logits: torch.Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    apply_temperature: bool = True,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (logits [R, V / TP], tokens [R]) of each sample's response on this rank.

    The logits are those that predict the tokens, divided by the temperature. With context
    parallelism R counts this rank's response tokens.
    """
    share = _share.get()
    rows = logits[0]
    begin = 0
    temperature = args.rollout_temperature if apply_temperature else 1.0
    for tokens, total, response in zip(
        unconcat_tokens, total_lengths, response_lengths, strict=True
    ):
        # The logits at position t predict token t + 1.
        first = total - response - 1
        if share.cp_size == 1:
            predicting = rows[begin + first : begin + total - 1]
            predicted = tokens[first + 1 :]
            begin += total
        else:
            positions = _positions(total, share).to(rows.device)
            in_response = (positions >= first) & (positions < total - 1)
            predicting = rows[begin : begin + len(positions)][in_response]
            predicted = tokens[positions[in_response] + 1]
            begin += len(positions)
        yield (predicting if temperature == 1.0 else predicting / temperature), predicted


def _positions(total: int, share: Share) -> torch.Tensor:
    """Return the position in its sample of each token on this rank.

    The rank has two of 2 CP chunks. Positions beyond the end of the sample are padding.
    """
    size = -(-total // (2 * share.cp_size))
    chunks = (share.cp_rank, 2 * share.cp_size - 1 - share.cp_rank)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])


def slice_log_prob_with_cp(log_prob: Any, total_length: int, response_length: int) -> Any:
    """Return this rank's values of a response: all of them outside a custom loss.

    Corrections and reducers get whole responses, so slime's functions for them need no other rank.
    """
    share = _share.get()
    if share.cp_size == 1:
        return log_prob
    first = total_length - response_length - 1
    positions = _positions(total_length, share)
    kept = positions[(positions >= first) & (positions < total_length - 1)] - first
    return torch.as_tensor(log_prob)[kept]


def all_gather_with_cp(
    tensor: torch.Tensor, total_length: int, response_length: int
) -> torch.Tensor:
    """Return the values of a whole response from those of this rank.

    Raises: DataError in a custom loss with context parallelism, which has no such exchange.
    """
    if _share.get().cp_size > 1:
        raise DataError(
            "all_gather_with_cp is called in a custom loss with context parallelism",
            where=LOSS_KEY,
            do="compute with this rank's tokens, or in custom_tis_function_path",
        )
    return tensor


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    **_others: Any,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Return (empty tensor, {"log_probs": [R] of each sample}), with gradient.

    With `with_entropy` the dictionary also has "entropy", [R] of each sample. The empty tensor is
    slime's first result.
    """
    columns: dict[str, list[torch.Tensor]] = {"log_probs": []}
    if with_entropy:
        columns["entropy"] = []
    responses = get_responses(
        logits,
        args=args,
        unconcat_tokens=unconcat_tokens,
        total_lengths=total_lengths,
        response_lengths=response_lengths,
    )
    for response_logits, tokens in responses:
        log_probs, entropy = target_log_probs(response_logits, tokens, with_entropy=with_entropy)
        columns["log_probs"].append(log_probs)
        if entropy is not None:
            columns["entropy"].append(entropy)
    return logits.new_empty(0), columns


def target_log_probs(
    logits: torch.Tensor, targets: torch.Tensor, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-prob of each row's target and optionally each row's entropy, with gradient.

    ℓ = z_target - log Σ exp z,  H = log Σ exp z - Σ p z, over the columns of all ranks.

    A logit of -inf is a token of probability 0 and adds nothing to H.

    Shapes: logits [n, V / TP] float32; targets [n]; returns [n], [n] or None.
    """
    group = _share.get().group
    # Shifted by the maximum over all ranks, so that exp cannot overflow.
    shifted = logits - _row_maximum(logits.detach(), group)[:, None]
    mass = shifted.exp()
    column = targets - (0 if group is None else group.rank() * logits.shape[1])
    on_rank = (column >= 0) & (column < logits.shape[1])
    gathered = shifted.gather(1, torch.where(on_rank, column, 0)[:, None])[:, 0]
    target = torch.where(on_rank, gathered, 0.0)
    parts = [target, mass.sum(-1)]
    if with_entropy:
        # 0 × -inf is NaN: tokens of probability 0 are excluded from the product and its gradient.
        parts.append((mass * torch.where(mass > 0, shifted, 0.0)).sum(-1))
    target, total, *weighted = _sum_over_columns(torch.stack(parts), group)
    return target - total.log(), (total.log() - weighted[0] / total if with_entropy else None)


def _row_maximum(logits: torch.Tensor, group: Any) -> torch.Tensor:
    maximum = logits.amax(-1)
    if group is not None:
        torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=group)
    return maximum


class _SumOverColumns(torch.autograd.Function):
    """Sum over the ranks that split the vocabulary.

    All of these ranks compute the same loss from the sum, so the backward pass returns the incoming
    gradient unchanged.
    """

    @staticmethod
    def forward(ctx, values, group):
        values = values.clone()
        torch.distributed.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0], None


def _sum_over_columns(values: torch.Tensor, group: Any) -> torch.Tensor:
    if group is None:
        return values
    result: Any = _SumOverColumns.apply(values, group)
    return result


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slime's clipped surrogate for `ppo_kl` = -log ratio, and 1 for clipped tokens."""
    clip = {"eps_clip": eps_clip, "eps_clip_high": eps_clip_high, "eps_clip_c": eps_clip_c}
    result = policy_loss(-ppo_kl, torch.zeros_like(ppo_kl), advantages, **clip)
    return result.loss, result.clipped


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the KL estimate of each token, under slime's argument names."""
    return kl_estimate(log_probs.float(), log_probs_base.float(), kl_loss_type, importance_ratio)


def vanilla_tis_function(
    args: Any, **columns: Any
) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """Return slime's TIS: the policy loss times each token's clamped importance weight.

    The bounds are `args.tis_clip_low` and `args.tis_clip`.
    """
    return _corrected("clip", args, **columns)


def icepop_function(args: Any, **columns: Any) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """Return slime's IcePop: the policy loss times each token's importance weight.

    A weight outside `args.tis_clip_low` and `args.tis_clip` becomes 0.
    """
    return _corrected("icepop", args, **columns)


def _corrected(
    mode: str,
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Any,
    **_: Any,
) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """Return (corrected loss [R], loss masks unchanged, metrics [R])."""
    ratio = torch.exp(torch.cat([*train_log_probs]) - torch.cat([*rollout_log_probs]))
    weights = ratio.clamp(min=args.tis_clip_low, max=args.tis_clip)
    if mode == "icepop":
        weights = torch.where(weights == ratio, ratio, torch.zeros_like(ratio))
    metrics = {
        "tis": ratio.detach(),
        "tis_clipfrac": (weights != ratio).float(),
        "tis_abs": (ratio - 1).abs().detach(),
    }
    return pg_loss * weights, loss_masks, metrics
