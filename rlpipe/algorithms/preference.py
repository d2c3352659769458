"""Losses of preference pairs.

Samples 2p and 2p + 1 of a batch are the chosen and the rejected response of pair p, and one rollout
(`rlpipe.batch.packing` keeps them in one micro-batch). Each token has the loss of its pair, and
`reduction` gives all tokens of a pair together the weight 1 / pairs. So the weighted sum over all
tokens, micro-batches and ranks is the mean over pairs.

Legend: n tokens with loss mask 1 of one micro-batch on one rank; N samples, N / 2 pairs.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from rlpipe.algorithms.sequences import Sequences
from rlpipe.config.algorithms import DpoConfig


def reward_loss(
    values: torch.Tensor, sequences: Sequences, *, center_rewards_coefficient: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the Bradley-Terry loss of each row's pair, with gradient, and metrics.

    L = -log σ(r_chosen - r_rejected) + c (r_chosen + r_rejected)².

    Shapes: values [n], the reward at the last token of each sample; returns [n]. Metrics:
    rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies.

    Source: arXiv 1706.03741; centering arXiv 2312.09244. TRL's RewardTrainer has the same loss.
    """
    chosen, rejected = sequences.sums(values).view(-1, 2).unbind(1)
    loss = -logsigmoid(chosen - rejected) + center_rewards_coefficient * (chosen + rejected) ** 2
    return _of_rows(loss, _rewards(chosen, rejected), sequences)


def dpo_loss(
    log_probs: torch.Tensor,
    reference_log_probs: torch.Tensor | None,
    sequences: Sequences,
    config: DpoConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return DPO's loss of each token's pair, with gradient, and metrics under TRL's names.

    h_y = Σ_t (ℓ_t - ℓ_ref,t),  Δ = h_chosen - h_rejected,  ε = label_smoothing:

        sigmoid  L = -(1 - ε) log σ(β Δ) - ε log σ(-β Δ)
        robust   L = (-(1 - ε) log σ(β Δ) + ε log σ(-β Δ)) / (1 - 2 ε)
        hinge    L = max(0, 1 - β Δ)
        ipo      L = (h_chosen / |chosen| - h_rejected / |rejected| - 1 / (2 β))²

    and with rpo_alpha L - α / |chosen| Σ_t ℓ_chosen,t. ℓ_ref = 0 without a reference.

    Shapes: log_probs, reference_log_probs [n]; returns [n] each. Metrics: rewards/chosen and
    rewards/rejected (β h), rewards/margins, rewards/accuracies, logps/chosen, logps/rejected (Σ ℓ).

    Source: DPO arXiv 2305.18290 eq. 7; conservative DPO in its appendix; robust arXiv 2403.00409;
    hinge SLiC arXiv 2305.10425; IPO arXiv 2310.12036 eq. 17, per token as in TRL; RPO arXiv
    2404.19733, whose NLL is a mean per response (that of TRL is one mean over all tokens).
    """
    of_samples = sequences.sums(log_probs)
    ratios = of_samples
    if reference_log_probs is not None:
        ratios = of_samples - sequences.sums(reference_log_probs)
    lengths = sequences.counts.to(ratios.dtype).clamp(min=1)
    chosen, rejected = ratios.view(-1, 2).unbind(1)
    margin = config.beta * (chosen - rejected)
    smoothing = config.label_smoothing
    match config.loss_type:
        case "sigmoid":
            loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        case "robust":
            right, wrong = -(1 - smoothing) * logsigmoid(margin), smoothing * logsigmoid(-margin)
            loss = (right + wrong) / (1 - 2 * smoothing)
        case "hinge":
            loss = torch.relu(1 - margin)
        case "ipo":
            one, other = (ratios / lengths).view(-1, 2).unbind(1)
            loss = (one - other - 1 / (2 * config.beta)) ** 2
    if config.rpo_alpha:
        loss = loss - config.rpo_alpha * (of_samples / lengths).view(-1, 2)[:, 0]
    log_probs_of = of_samples.detach().view(-1, 2)
    metrics = _rewards(config.beta * chosen, config.beta * rejected)
    metrics |= {"logps/chosen": log_probs_of[:, 0], "logps/rejected": log_probs_of[:, 1]}
    return _of_rows(loss, metrics, sequences)


def _rewards(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return metrics of the rewards [pairs] of each pair, without gradient."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
    }


def _of_rows(
    loss: torch.Tensor, metrics: dict[str, torch.Tensor], sequences: Sequences
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return values of pairs as the values [n] of the rows of each pair."""
    pair = sequences.sample // 2
    return loss[pair], {name: values[pair] for name, values in metrics.items()}
