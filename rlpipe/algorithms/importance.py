"""Correct for tokens that other weights sampled: a factor per token, and rejected tokens.

With ℓ the proximal log-probs and ℓ_roll the rollout (behaviour) log-probs:

    token       w_t = exp(ℓ_t - ℓ_roll,t)
    sequence    w = exp(Σ_t m_t (ℓ_t - ℓ_roll,t))                 unbiased, high variance
    geometric   w = exp(1/M Σ_t m_t (ℓ_t - ℓ_roll,t))             biased, low variance

w corrects two differences: engine and trainer compute log-probs with small numerical differences,
and in asynchronous training the engine sampled with weights that are up to S versions older. w
times a clipped surrogate with a ratio to ℓ is decoupled PPO (arXiv 2110.00641; AReaL, arXiv
2505.24298). Where engine and trainer agree, w is 1 and changes nothing.

`correct` runs in NumPy float64. Where a scoring pass recorded ℓ, it runs once per optimizer step,
before packing. A single optimizer step has ℓ only in its forward pass, so it runs once per
micro-batch. `rlpipe.batch.build` drops tokens that are too old.

Legend: N samples of one optimizer step, R response tokens of these samples.

Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025),
as slime's `--use-tis`; IcePop: Ring-1T, arXiv 2510.18855; levels, modes, veto: Li et al., "When
speed kills stability" (2025), as in slime's example train_infer_mismatch_helper.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlpipe.config.algorithms import Level, LossConfig

LARGEST_LOG_RATIO = 20.0
"""Bound on |log w|, as in slime. A larger weight is useless."""


@dataclass(frozen=True, eq=False)
class Correction:
    """Off-policy correction of the tokens of an optimizer step."""

    factor: np.ndarray
    """[R] factor of the policy loss."""
    kept: np.ndarray
    """[R] 1, or 0 for a token that is excluded from the whole loss."""
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    """Name → [R], to be averaged like the loss over the tokens of the loss mask."""


def correct(
    proximal_log_probs: np.ndarray,
    rollout_log_probs: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
    loss: LossConfig,
) -> Correction:
    """Return the combined corrections of a loss configuration.

    Rejected tokens are those out of bounds (tis_mode mask, use_rs) and those of vetoed sequences.
    A token that IcePop excludes has factor 0 and keeps its KL and entropy terms.
    `tis_batch_normalize` divides by the mean over the kept tokens (by level: over sequences).

    Shapes: proximal_log_probs, rollout_log_probs, mask [R]; lengths [N].
    """
    sample = np.repeat(np.arange(len(lengths)), lengths)
    counted = np.asarray(mask) > 0
    difference = np.asarray(proximal_log_probs, np.float64) - np.asarray(
        rollout_log_probs, np.float64
    )
    # Tokens that do not count, such as tool output, can have any rollout log-probs.
    log_ratio = np.where(counted, difference, 0.0)
    metrics: dict[str, np.ndarray] = {}
    factor = np.ones(len(log_ratio))
    kept = np.ones(len(log_ratio))
    if loss.use_tis:
        weights = importance_weights(log_ratio, sample, counted, loss.tis_level)
        factor, kept = bounded(weights, loss.tis_mode, low=loss.tis_clip_low, high=loss.tis_clip)
        outside = (factor != weights) | (kept == 0)
        metrics |= {"tis": weights, "tis_clipfrac": outside * 1.0, "tis_abs": np.abs(weights - 1)}
    if loss.use_rs:
        low, high = loss.rs_bounds
        weights = importance_weights(log_ratio, sample, counted, loss.rs_level)
        _, inside = bounded(weights, "mask", low=low, high=high)
        kept = kept * inside
    if loss.rs_veto_threshold is not None:
        veto = vetoed(log_ratio, sample, counted, loss.rs_veto_threshold)
        kept = kept * ~veto
        metrics["rs_vetofrac"] = veto * 1.0
    if loss.use_tis and loss.tis_batch_normalize:
        per_sequence = loss.tis_level != "token"
        factor = normalised(factor, sample, counted & (kept > 0), per_sequence=per_sequence)
    if loss.use_rs or loss.rs_veto_threshold is not None or loss.tis_mode == "mask":
        metrics["rs_rejectfrac"] = 1 - kept
    return Correction(factor, kept, metrics)


def importance_weights(
    log_ratio: np.ndarray, sample: np.ndarray, counted: np.ndarray, level: Level
) -> np.ndarray:
    """Return w [R] of a level, between exp(-20) and exp(20).

    Every token of a sequence has the weight of the sequence. Tokens of mask 0 do not count in it.
    """
    if level != "token":
        sums = np.bincount(sample, log_ratio * counted, minlength=int(sample.max(initial=-1)) + 1)
        tokens = np.bincount(sample, counted, minlength=len(sums))
        log_ratio = (sums / np.maximum(tokens, 1) if level == "geometric" else sums)[sample]
    return np.exp(np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def bounded(
    weights: np.ndarray, mode: str, *, low: float, high: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (factor, kept) [R] of weights w within bounds.

    mode        factor              kept
    clip        clamp(w, low, high) 1
    truncate    min(w, high)        1
    icepop      w, outside 0        1
    mask        w                   0 outside

    Raises: ValueError for another mode.
    """
    inside = ((weights >= low) & (weights <= high)) * 1.0
    ones = np.ones(len(weights))
    match mode:
        case "clip":
            return np.clip(weights, low, high), ones
        case "truncate":
            return np.minimum(weights, high), ones
        case "icepop":
            return weights * inside, ones
        case "mask":
            return weights, inside
    raise ValueError(f"tis_mode: found {mode!r}, expected one of clip, truncate, icepop, mask")


def vetoed(
    log_ratio: np.ndarray, sample: np.ndarray, counted: np.ndarray, threshold: float
) -> np.ndarray:
    """Return [R] bool: True for all tokens of a sample with a counted token of w_t < threshold."""
    num_samples = int(sample.max(initial=-1)) + 1
    num_vetoes = np.bincount(
        sample, counted & (log_ratio < np.log(threshold)), minlength=num_samples
    )
    return num_vetoes[sample] > 0


def normalised(
    factor: np.ndarray, sample: np.ndarray, counted: np.ndarray, *, per_sequence: bool
) -> np.ndarray:
    """Return the factors divided by their mean over the counted tokens, unchanged if that is 0.

    With `per_sequence`, every sample counts once in the mean.
    """
    selected = np.flatnonzero(counted)
    if per_sequence:
        selected = selected[np.unique(sample[selected], return_index=True)[1]]
    mean = factor[selected].mean() if len(selected) else 0.0
    return factor / mean if mean > 0 else factor
