"""Reference implementations of the algorithms: loops over Python floats.

Nothing is vectorised or shared with the code under test. A batch is a list of samples; a sample is
a list of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))


def baseline(
    i: int, rewards: Sequence[float], groups: Sequence[int], rollouts: Sequence[int]
) -> list[float]:
    """Return the mean reward of each rollout of sample i's group."""
    members = [j for j in range(len(rewards)) if groups[j] == groups[i]]
    means = []
    for rollout in dict.fromkeys(rollouts[j] for j in members):
        means.append(mean([rewards[j] for j in members if rollouts[j] == rollout]))
    return means


def grpo(rewards, groups, rollouts, scale: bool) -> list[float]:
    result = []
    for i, reward in enumerate(rewards):
        means = baseline(i, rewards, groups, rollouts)
        advantage = reward - mean(means)
        if scale and len(means) > 1:
            advantage /= deviation(means) + 1e-6
        result.append(advantage)
    return result


def rloo(rewards, groups, rollouts) -> list[float]:
    result = []
    for i, reward in enumerate(rewards):
        others = [
            mean(
                [
                    rewards[j]
                    for j in range(len(rewards))
                    if groups[j] == groups[i] and rollouts[j] == rollout
                ]
            )
            for rollout in dict.fromkeys(
                rollouts[j] for j in range(len(rewards)) if groups[j] == groups[i]
            )
            if rollout != rollouts[i]
        ]
        result.append(reward - mean(others) if others else 0.0)
    return result


def reinforce_plus_plus(
    rewards, kl: Rows, mask: Rows, gamma: float, beta: float, every_token: bool
) -> list[list[float]]:
    result = []
    for reward, divergences, counted in zip(rewards, kl, mask, strict=True):
        rewards_of_token = [-beta * d * m for d, m in zip(divergences, counted, strict=True)]
        last = max((t for t, m in enumerate(counted) if m), default=None)
        if last is not None:
            rewards_of_token[last] += reward
        returns = []
        for t in range(len(rewards_of_token)):
            total = 0.0
            steps = 0
            for s in range(t, len(rewards_of_token)):
                total += gamma**steps * rewards_of_token[s]
                steps += 1 if every_token or counted[s] else 0
            returns.append(total)
        result.append(returns)
    return result


def whiten(values: Rows, mask: Rows) -> list[list[float]]:
    counted = [
        v for row, m in zip(values, mask, strict=True) for v, c in zip(row, m, strict=True) if c
    ]
    middle = mean(counted)
    variance = sum((v - middle) ** 2 for v in counted) / max(len(counted) - 1, 1)
    return [
        [
            (v - middle) / math.sqrt(variance + 1e-8) if c else 0.0
            for v, c in zip(row, m, strict=True)
        ]
        for row, m in zip(values, mask, strict=True)
    ]


def kl(new: float, reference: float, kind: str, importance: float = 1.0) -> float:
    d = new - reference
    value = {"k1": d, "k2": d * d / 2}.get(kind, math.exp(-d) - 1 + d) * importance
    return min(max(value, -10.0), 10.0) if kind == "low_var_kl" else value


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def sequence_ratios(new: Rows, base: Rows) -> list[float]:
    return [
        math.exp(mean([a - b for a, b in zip(n, o, strict=True)])) if n else 1.0
        for n, o in zip(new, base, strict=True)
    ]


def clip_loss(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    value = max(-ratio * advantage, -clamp(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        value = min(value, -dual * advantage)
    return value


def importance_ratios(new: Rows, base: Rows, mask: Rows, level: str) -> list[list[float]]:
    result = []
    for n, o, m in zip(new, base, mask, strict=True):
        gaps = [(a - b) * c for a, b, c in zip(n, o, m, strict=True)]
        if level == "sequence":
            gaps = [sum(gaps)] * len(gaps)
        elif level == "geometric":
            gaps = [sum(gaps) / max(sum(m), 1)] * len(gaps)
        result.append([math.exp(clamp(gap, -20, 20)) for gap in gaps])
    return result


def corrected(
    new: Rows, base: Rows, mask: Rows, loss
) -> tuple[list[list[float]], list[list[float]]]:
    """Return (factors, kept) per sample under a LossConfig."""
    factors = [[1.0] * len(row) for row in new]
    kept = [[1.0] * len(row) for row in new]
    if loss.use_tis:
        ratios = importance_ratios(new, base, mask, loss.tis_level)
        for i, row in enumerate(ratios):
            for t, w in enumerate(row):
                inside = loss.tis_clip_low <= w <= loss.tis_clip
                if loss.tis_mode == "clip":
                    factors[i][t] = clamp(w, loss.tis_clip_low, loss.tis_clip)
                elif loss.tis_mode == "truncate":
                    factors[i][t] = min(w, loss.tis_clip)
                elif loss.tis_mode == "icepop":
                    factors[i][t] = w if inside else 0.0
                else:
                    factors[i][t], kept[i][t] = w, float(inside)
    if loss.use_rs:
        low, high = loss.rs_bounds
        for i, row in enumerate(importance_ratios(new, base, mask, loss.rs_level)):
            for t, w in enumerate(row):
                kept[i][t] *= float(low <= w <= high)
    if loss.rs_veto_threshold is not None:
        for i, (n, o, m) in enumerate(zip(new, base, mask, strict=True)):
            if any(
                c and a - b < math.log(loss.rs_veto_threshold)
                for a, b, c in zip(n, o, m, strict=True)
            ):
                kept[i] = [0.0] * len(n)
    if loss.use_tis and loss.tis_batch_normalize:
        chosen = [
            [f for f, c, k in zip(*rows, strict=True) if c and k]
            for rows in zip(factors, mask, kept, strict=True)
        ]
        pool = [f for row in chosen for f in (row if loss.tis_level == "token" else row[:1])]
        scale = mean(pool) if pool and mean(pool) > 0 else 1.0
        factors = [[f / scale for f in row] for row in factors]
    return factors, kept


def reduced(
    losses: Rows, mask: Rows, rollouts: Sequence[int], kept: Rows, *, per_token=False, constant=None
) -> float:
    """Return the reduced loss: Σ over rollouts of (Σ m k L) / denominator."""
    total = 0.0
    tokens = sum(sum(row) for row in mask)
    names = list(dict.fromkeys(rollouts))
    for name in names:
        members = [i for i, rollout in enumerate(rollouts) if rollout == name]
        inner = sum(
            m * k * v for i in members for m, k, v in zip(mask[i], kept[i], losses[i], strict=True)
        )
        if per_token:
            total += inner / max(tokens, 1)
        else:
            length = constant or max(sum(sum(mask[i]) for i in members), 1)
            total += inner / length / len(names)
    return total


def objective(columns: Sequence[Rows], mask: Rows, rollouts: Sequence[int], loss) -> float:
    """Return the policy objective of five columns.

    The columns are policy, proximal, rollout and reference log-probs, and advantages. A token's
    entropy is its negative policy log-prob.
    """
    base = columns[1]
    rollout = columns[2]
    factors, kept = corrected(base, rollout, mask, loss)
    totals = [
        [token_objective(row, m, t, loss, f) for t, f in enumerate(factor)]
        for row, m, factor in zip(list(zip(*columns, strict=True)), mask, factors, strict=True)
    ]
    return reduced(
        totals,
        mask,
        rollouts,
        kept,
        per_token=loss.calculate_per_token_loss,
        constant=loss.constant_length,
    )


def token_objective(
    row: Sequence[Sequence[float]], mask: Sequence[float], t: int, loss, factor: float
) -> float:
    new, base, _, reference, advantages = row
    counted = [s for s, m in enumerate(mask) if m]
    gap = sum(new[s] - base[s] for s in counted) / max(len(counted), 1)
    ratio = math.exp(gap if loss.surrogate == "gspo" else new[t] - base[t])
    high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
    if loss.surrogate == "cispo":
        value = -clamp(ratio, 1 - loss.eps_clip, 1 + high) * advantages[t] * new[t]
    else:
        value = clip_loss(ratio, advantages[t], loss.eps_clip, high, loss.eps_clip_c)
    if loss.use_opsm and advantages[t] < 0 and -gap > loss.opsm_delta:
        value = 0.0
    importance = math.exp(new[t] - base[t]) if loss.use_unbiased_kl else 1.0
    penalty = loss.kl_loss_coef * kl(new[t], reference[t], loss.kl_loss_type, importance)
    return value * factor + loss.entropy_coef * new[t] + penalty
