"""Correction for tokens that other weights sampled: a factor per token, and tokens that leave the
loss.

With ℓ the trainer's log-prob before the iteration (proximal) and ℓ_roll the engine's when the token
was sampled (behaviour):

    token       w_t = exp(ℓ_t - ℓ_roll,t)
    sequence    w = exp(Σ_t m_t (ℓ_t - ℓ_roll,t))                 unbiased, high variance
    geometric   w = exp(1/M Σ_t m_t (ℓ_t - ℓ_roll,t))             biased, low variance

The gap has two parts, and w corrects both: the engine computes a little otherwise than the trainer,
and in asynchronous training it sampled with weights that are up to S versions older. Times a
clipped surrogate whose ratio is to ℓ, this is decoupled PPO (arXiv 2110.00641; AReaL, arXiv
2505.24298). Where engine and trainer agree w is 1 and nothing changes.

Both log-probs are recorded before the first optimizer step, so all of this is fixed for a whole
step before anything is packed: NumPy in float64. Legend: N samples of one optimizer step, R
response tokens of all of them. Not here: which tokens are too old to be trained at all
(`rlpipe.batch.build`). Source: Yao et al., "Your efficient RL framework secretly brings you
off-policy RL training" (2025), as slime's `--use-tis`; IcePop: Ring-1T, arXiv 2510.18855; levels,
modes, veto: Li et al., "When speed kills stability" (2025), as in slime's example
train_infer_mismatch_helper.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlpipe.config.algorithms import Level, LossConfig

LARGEST_LOG_RATIO = 20.0
"""exp of more would be of no use; slime's safety bound."""


@dataclass(frozen=True, eq=False)
class Correction:
    """What a step's tokens are weighted with."""

    factor: np.ndarray
    """[R] multiplies the policy loss."""
    kept: np.ndarray
    """[R] 1, or 0 for a token that leaves the whole loss."""
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    """Name → [R], to be averaged like the loss (over the tokens of the loss mask)."""


def correct(
    proximal: np.ndarray,
    behaviour: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
    loss: LossConfig,
) -> Correction:
    """All corrections of a loss configuration.

    Rejected tokens: those out of bounds (tis_mode mask, use_rs) and those of vetoed sequences.
    IcePop's keep their KL and entropy; their factor is 0. tis_batch_normalize divides by the mean
    over tokens that are kept (by level: over sequences).

    Shapes: proximal, behaviour, mask [R]; lengths [N].
    """
    sample = np.repeat(np.arange(len(lengths)), lengths)
    counted = np.asarray(mask) > 0
    log_ratio = np.where(
        counted, np.asarray(proximal, np.float64) - np.asarray(behaviour, np.float64), 0.0
    )
    metrics: dict[str, np.ndarray] = {}
    factor = np.ones(len(log_ratio))
    kept = np.ones(len(log_ratio))
    if loss.use_tis:
        ratio = ratios(log_ratio, sample, counted, loss.tis_level)
        factor, kept = bounded(ratio, loss.tis_mode, low=loss.tis_clip_low, high=loss.tis_clip)
        outside = (factor != ratio) | (kept == 0)
        metrics |= {"tis": ratio, "tis_clipfrac": outside * 1.0, "tis_abs": np.abs(ratio - 1)}
    if loss.use_rs:
        low, high = loss.rs_bounds
        _, inside = bounded(
            ratios(log_ratio, sample, counted, loss.rs_level), "mask", low=low, high=high
        )
        kept = kept * inside
    if loss.rs_veto_threshold is not None:
        veto = vetoed(log_ratio, sample, counted, loss.rs_veto_threshold)
        kept, metrics["rs_vetofrac"] = kept * ~veto, veto * 1.0
    if loss.use_tis and loss.tis_batch_normalize:
        factor = normalised(
            factor, sample, counted & (kept > 0), per_sequence=loss.tis_level != "token"
        )
    if loss.use_rs or loss.rs_veto_threshold is not None or loss.tis_mode == "mask":
        metrics["rs_rejectfrac"] = 1 - kept
    return Correction(factor, kept, metrics)


def ratios(
    log_ratio: np.ndarray, sample: np.ndarray, counted: np.ndarray, level: Level
) -> np.ndarray:
    """w [R] of a level, exp(±20) at most; a sequence's on each of its tokens. Tokens of mask 0 have
    no part in sequences."""
    if level != "token":
        sums = np.bincount(sample, log_ratio * counted, minlength=int(sample.max(initial=-1)) + 1)
        tokens = np.bincount(sample, counted, minlength=len(sums))
        log_ratio = (sums / np.maximum(tokens, 1) if level == "geometric" else sums)[sample]
    return np.exp(np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def bounded(
    ratio: np.ndarray, mode: str, *, low: float, high: float
) -> tuple[np.ndarray, np.ndarray]:
    """(factor, kept) [R] of weights and bounds. Raises: ValueError for another mode.

    mode        factor              kept
    clip        clamp(w, low, high) 1
    truncate    min(w, high)        1
    icepop      w, outside 0        1
    mask        w                   0 outside
    """
    inside = ((ratio >= low) & (ratio <= high)) * 1.0
    ones = np.ones(len(ratio))
    match mode:
        case "clip":
            return np.clip(ratio, low, high), ones
        case "truncate":
            return np.minimum(ratio, high), ones
        case "icepop":
            return ratio * inside, ones
        case "mask":
            return ratio, inside
    raise ValueError(f"tis_mode: found {mode!r}, expected one of clip, truncate, icepop, mask")


def vetoed(
    log_ratio: np.ndarray, sample: np.ndarray, counted: np.ndarray, threshold: float
) -> np.ndarray:
    """[R] bool: is any token that counts of this sample one that the trainer finds far less likely,
    w_t < threshold?"""
    bad = np.bincount(
        sample, counted & (log_ratio < np.log(threshold)), minlength=int(sample.max(initial=-1)) + 1
    )
    return bad[sample] > 0


def normalised(
    factor: np.ndarray, sample: np.ndarray, counted: np.ndarray, *, per_sequence: bool
) -> np.ndarray:
    """The factors divided by their mean over the tokens counted; `per_sequence`: every sample
    counts once. Unchanged if 0."""
    chosen = np.flatnonzero(counted)
    if per_sequence:
        chosen = chosen[np.unique(sample[chosen], return_index=True)[1]]
    mean = factor[chosen].mean() if len(chosen) else 0.0
    return factor / mean if mean > 0 else factor
