"""A custom loss in slime's shape, which gets logits: `train.loss.custom_loss_function_path`.

    (args, batch, logits, sum_of_sample_mean) -> (loss, metrics)

`logits` [1, T, V / TP] float32: of every packed token of the micro-batch that this rank holds,
prompts and padding included, over its columns of the vocabulary, before division by
`args.rollout_temperature`. They cost memory that the other losses do not: T × V / TP numbers of 4
bytes, and of their own size once more for each step of the loss that autograd keeps (16384 tokens
of a vocabulary of 152k: 10 GB a copy). `train.max_tokens_per_gpu` bounds T; tensor parallelism
divides V.

`batch` is slime's: lists of one entry per sample of the micro-batch,

    tokens [1, T], unconcat_tokens, total_lengths, response_lengths, loss_masks, rollout_mask_sums,
    full_loss_masks [1, T], log_probs, ref_log_probs, rollout_log_probs, teacher_log_probs,
    advantages, values, returns (None: the batch has none), packed_seq_params,
    multimodal_train_inputs (None)

`loss_masks` are whole; the other columns have this rank's tokens where context parallel ranks share
samples, as in slime: of each sample chunk r, then chunk 2 CP - 1 - r. `sum_of_sample_mean` makes a
number of such a column of all samples, flat: Σ over samples of the mean over their tokens that
count (a rollout's samples share a denominator; Σ over tokens with calculate_per_token_loss). Loss
and metrics are scalars, divided by the step's number of rollouts (or tokens) afterwards. All tensor
parallel ranks must compute the same loss, each from its own columns.

`get_responses`, `get_log_probs_and_entropy`, `compute_policy_loss`, `compute_approx_kl`, and the
corrections `icepop_function` and `vanilla_tis_function` are slime's: a file finds them under
slime's names (`MODULES`) where slime is not installed.

Not here: how logits are made (`engines.megatron.train.logits`), the losses that need none
(`objective`, `custom`).
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

_WHERE = "train.loss.custom_loss_function_path"


@dataclass(frozen=True)
class Share:
    """What of the logits this rank holds."""

    group: Any = None
    """The ranks that split the vocabulary. None: this one has all of it."""
    cp_size: int = 1
    cp_rank: int = 0


_ALONE = Share()
_share: ContextVar[Share] = ContextVar("share", default=_ALONE)


@contextmanager
def shared_as(share: Share) -> Iterator[None]:
    """The functions of slime work on logits of this share in here."""
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
    """What the function answers, with gradient at the logits even where no token counts. Raises:
    DataError if it is no scalar."""
    loss, metrics = function(args, batch, logits, sum_of_sample_mean)
    for name, value in {"loss": loss, **metrics}.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise DataError(
                "a custom loss of logits answers numbers",
                where=f"{_WHERE} ({name})",
                found=tuple(value.shape)
                if isinstance(value, torch.Tensor)
                else type(value).__name__,
                expected="a tensor with one value",
                do="reduce it with sum_of_sample_mean",
            )
    loss = loss.reshape(())
    if not loss.requires_grad:
        loss = (
            loss + logits.flatten()[:0].sum()
        )  # 0 with a gradient of zeros; 0 × a sum of masked logits would be NaN
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
    """For each sample the logits [R, V / TP] that predict its response tokens, divided by the
    temperature, and those tokens [R]; of a sample that ranks share, this one's."""
    share = _share.get()
    rows = logits[0]
    begin = 0
    temperature = args.rollout_temperature if apply_temperature else 1.0
    for tokens, total, response in zip(
        unconcat_tokens, total_lengths, response_lengths, strict=True
    ):
        first = total - response - 1
        if share.cp_size == 1:
            chosen = rows[begin + first : begin + total - 1]
            wanted = tokens[first + 1 :]
            begin += total
        else:
            places = _places(total, share).to(rows.device)
            here = (places >= first) & (places < total - 1)
            chosen = rows[begin : begin + len(places)][here]
            wanted = tokens[places[here] + 1]
            begin += len(places)
        yield (chosen if temperature == 1.0 else chosen / temperature), wanted


def _places(total: int, share: Share) -> torch.Tensor:
    """Where in its sample each token of this rank stands: two chunks of 2 CP, padding past the end
    included."""
    size = -(-total // (2 * share.cp_size))
    chunks = (share.cp_rank, 2 * share.cp_size - 1 - share.cp_rank)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])


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
    """(nothing, {"log_probs": [R] of each sample, "entropy": likewise if wanted}), with
    gradient."""
    found: dict[str, list[torch.Tensor]] = {
        "log_probs": [],
        **({"entropy": []} if with_entropy else {}),
    }
    responses = get_responses(
        logits,
        args=args,
        unconcat_tokens=unconcat_tokens,
        total_lengths=total_lengths,
        response_lengths=response_lengths,
    )
    for chosen, tokens in responses:
        log_probs, entropy = log_probs_of(chosen, tokens, with_entropy=with_entropy)
        found["log_probs"].append(log_probs)
        if entropy is not None:
            found["entropy"].append(entropy)
    return logits.new_empty(0), found


def log_probs_of(
    logits: torch.Tensor, targets: torch.Tensor, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each row's target, and the entropy of each row if wanted, over all ranks'
    columns, with gradient.

    ℓ = z_target - log Σ exp z,  H = log Σ exp z - Σ p z. A logit of -inf is a token of probability 0, which adds nothing to H.
    Shapes: logits [n, V / TP] float32; targets [n]; returns [n], [n].
    """
    group = _share.get().group
    top = _highest(logits.detach(), group)
    below = logits - top[:, None]
    mass = below.exp()
    local = targets - (0 if group is None else group.rank() * logits.shape[1])
    here = (local >= 0) & (local < logits.shape[1])
    target = torch.where(here, below.gather(1, torch.where(here, local, 0)[:, None])[:, 0], 0.0)
    # 0 × -inf is NaN, so tokens without probability are left out of the product and of its
    # gradient.
    parts = [target, mass.sum(-1)]
    if with_entropy:
        parts.append((mass * torch.where(mass > 0, below, 0.0)).sum(-1))
    target, total, *weighted = _over_columns(torch.stack(parts), group)
    return target - total.log(), (total.log() - weighted[0] / total if with_entropy else None)


def _highest(logits: torch.Tensor, group: Any) -> torch.Tensor:
    top = logits.amax(-1)
    if group is not None:
        torch.distributed.all_reduce(top, op=torch.distributed.ReduceOp.MAX, group=group)
    return top


class _OverColumns(torch.autograd.Function):
    """A sum over the ranks that split the vocabulary. All of them compute one and the same loss of
    it, so each takes that loss's gradient as it is."""

    @staticmethod
    def forward(ctx, values, group):
        values = values.clone()
        torch.distributed.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0], None


def _over_columns(values: torch.Tensor, group: Any) -> torch.Tensor:
    if group is None:
        return values
    result: Any = _OverColumns.apply(values, group)
    return result


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """slime's: the clipped surrogate of -log ratio, and which tokens were clipped."""
    clips = {"eps_clip": eps_clip, "eps_clip_high": eps_clip_high, "eps_clip_c": eps_clip_c}
    found = policy_loss(-ppo_kl, torch.zeros_like(ppo_kl), advantages, **clips)
    return found.loss, found.clipped


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """slime's: the estimate of that name per token."""
    return kl_estimate(log_probs.float(), log_probs_base.float(), kl_loss_type, importance_ratio)


def vanilla_tis_function(
    args: Any, **columns: Any
) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """slime's: the policy loss times each token's weight, clamped to `args.tis_clip_low` and
    `args.tis_clip`."""
    return _weighted("clip", args, **columns)


def icepop_function(args: Any, **columns: Any) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """slime's: the policy loss times each token's weight, and no policy loss for a weight out of
    these bounds."""
    return _weighted("icepop", args, **columns)


def _weighted(
    mode: str,
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Any,
    **_: Any,
) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    """slime's two corrections per token: (loss, masks as given, metrics [R])."""
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


MODULES: dict[str, dict[str, Any]] = {
    "slime.backends": {},
    "slime.backends.megatron_utils": {},
    "slime.backends.megatron_utils.loss": {
        "get_responses": get_responses,
        "get_log_probs_and_entropy": get_log_probs_and_entropy,
        "icepop_function": icepop_function,
        "vanilla_tis_function": vanilla_tis_function,
    },
    "slime.utils.ppo_utils": {
        "compute_policy_loss": compute_policy_loss,
        "compute_approx_kl": compute_approx_kl,
    },
}
"""What files with a loss written for slime import."""
