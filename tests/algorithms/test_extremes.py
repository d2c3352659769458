"""Log-ratios up to ±1000: float32 losses against exact values in float64 and in logarithms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlpipe.algorithms.advantages import group_relative, whiten
from rlpipe.algorithms.divergence import FAR_BELOW, kl_estimate, unbiased_kl
from rlpipe.algorithms.exponential import SPLIT, exp, expm1
from rlpipe.algorithms.importance import correct
from rlpipe.algorithms.logits_loss import compute_policy_loss, logits_loss, target_log_probs
from rlpipe.algorithms.losses import cispo_loss, policy_loss, sequence_policy_loss
from rlpipe.algorithms.objective import TokenBatch, objective
from rlpipe.algorithms.sequences import Sequences
from rlpipe.config.algorithms import LossConfig

LARGEST = torch.finfo(torch.float32).max
LOW = 0.2
HIGH = 0.28
DUAL = 3.0
log_ratio = (
    st.floats(-1000, 1000, width=32) | st.floats(80, 100, width=32) | st.floats(-3, 3, width=32)
)
advantage = st.floats(-3, 3, width=32) | st.sampled_from([0.0, 1e-6, -1e-6])


def e(x: float) -> float:
    """Return exp(x), infinite where float64 overflows."""
    return math.exp(x) if x < 709 else math.inf


def product(scale: float, x: float) -> float:
    """Return scale × exp(x), also where exp(x) alone overflows."""
    return 0.0 if scale == 0 else math.copysign(e(x + math.log(abs(scale))), scale)


def close(result: float, exact: float) -> bool:
    """True if equal to float32 precision, or infinite or largest where float32 overflows."""
    if abs(exact) > 0.999 * LARGEST:
        return abs(result) > 0.99 * LARGEST and math.copysign(1, result) == math.copysign(1, exact)
    return result == pytest.approx(exact, rel=2e-5, abs=1e-5)


def clip_gradient(d: float, a: float, dual: float | None) -> float:
    """Return ∂L/∂ℓ of the clipped surrogate: -A ρ, and 0 where it is clipped."""
    clipped = d > math.log(1 + HIGH) if a >= 0 else d < math.log(1 - LOW)
    if a < 0 and dual is not None and d > math.log(dual):
        clipped = True
    return 0.0 if clipped else product(-a, d)


def at_the_edge_of_a_clip(d: float) -> bool:
    return any(abs(d - math.log(edge)) < 1e-4 for edge in (1 - LOW, 1 + HIGH, DUAL))


def gradient(loss: torch.Tensor, leaf: torch.Tensor) -> list[float]:
    (result,) = torch.autograd.grad(loss.sum(), leaf)
    return result.tolist()


@given(log_ratio, advantage, st.sampled_from([None, DUAL]))
@example(100.0, 1.0, None)
@example(100.0, 0.0, None)
@example(100.0, -1.0, DUAL)
@example(90.0, -0.1, None)
@example(1000.0, 1.0, DUAL)
def test_the_clipped_surrogate_has_the_exact_gradient(d: float, a: float, dual: float | None):
    if at_the_edge_of_a_clip(d):
        return
    new = torch.tensor([d], requires_grad=True)
    result = policy_loss(
        new, torch.zeros(1), torch.tensor([a]), eps_clip=LOW, eps_clip_high=HIGH, eps_clip_c=dual
    )
    assert not math.isnan(result.loss.item())
    assert close(gradient(result.loss, new)[0], clip_gradient(d, a, dual))


@given(st.lists(log_ratio, min_size=1, max_size=4), advantage)
@example([100.0, 90.0], 1.0)
@example([0.0, 178.0], -0.5)
@example([0.0, 175.0], -2.0)
def test_gspo_has_the_exact_gradient(gaps: list[float], a: float):
    mean = float(np.mean(gaps))
    if at_the_edge_of_a_clip(mean):
        return
    new = torch.tensor(gaps, requires_grad=True)
    count = len(gaps)
    sequences = Sequences(torch.zeros(count, dtype=torch.long), torch.tensor([float(count)]))
    advantages = torch.full((count,), a)
    result = sequence_policy_loss(
        new, torch.zeros(count), advantages, sequences, eps_clip=LOW, eps_clip_high=HIGH
    )
    exact = clip_gradient(mean, a, None)
    for value in gradient(result.loss, new):
        # In float32 the mean of numbers up to 1000 has an error of 1e-4, and so does exp(mean).
        # A small advantage makes a gradient finite where exp(mean) is not, and the gradients of a
        # sequence's tokens are added before they are divided.
        largest = max(count * abs(exact), math.exp(min(mean, 100.0)))
        edge = largest > 0.9 * LARGEST and abs(value) > 0.5 * abs(exact)
        assert not math.isnan(value)
        assert edge or close(value, exact) or value == pytest.approx(exact, rel=1e-3)


@given(log_ratio, advantage)
def test_cispo_has_the_exact_gradient(d: float, a: float):
    new = torch.tensor([d], requires_grad=True)
    result = cispo_loss(new, torch.zeros(1), torch.tensor([a]), eps_clip=1.0, eps_clip_high=4.0)
    assert close(gradient(result.loss, new)[0], -min(e(d), 5.0) * a)


def k3(d: float) -> float:
    return e(-d) - 1 + d


@given(log_ratio, st.sampled_from(["k1", "k2", "k3", "low_var_kl"]))
@example(-100.0, "low_var_kl")
@example(-1000.0, "low_var_kl")
def test_every_kl_has_the_exact_gradient(d: float, kind: str):
    new = torch.tensor([d], requires_grad=True)
    exact = {"k1": 1.0, "k2": d}.get(kind, 1 - e(-d))
    if kind == "low_var_kl" and abs(k3(d)) > 10:
        exact = 0.0
    if kind == "low_var_kl" and abs(abs(k3(d)) - 10) < 1e-3:
        return
    value = kl_estimate(new, torch.zeros(1), kind)
    assert close(value.item(), {"k1": d, "k2": d * d / 2, "k3": k3(d)}.get(kind, min(k3(d), 10.0)))
    assert close(gradient(value, new)[0], exact)


def times_ratio(d: float, log_ratio: float, kind: str) -> tuple[float, float]:
    """Return value and gradient of an estimate times ρ."""
    if kind == "k1":
        return product(d, log_ratio), product(1 + d, log_ratio)
    if kind == "k2":
        return product(d * d / 2, log_ratio), product(d + d * d / 2, log_ratio)
    if d < -30:
        return e(log_ratio - d), product(d, log_ratio)
    return product(max(math.expm1(-d) + d, 0.0), log_ratio), product(d, log_ratio)


@given(
    st.integers(-1000, 1000) | st.integers(-30, 5),
    st.integers(-1000, 1000) | st.integers(-5, 5),
    st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
)
@example(-18, 0, "k3")
@example(-18, 0, "low_var_kl")
@example(-100, -99, "low_var_kl")
@example(-5, 100, "low_var_kl")
@example(0, 1000, "k3")
def test_every_kl_times_the_ratio_has_the_exact_gradient(d: int, gap: int, kind: str):
    new = torch.zeros(1, requires_grad=True)
    result = unbiased_kl(new, torch.tensor([-float(d)]), torch.tensor([-float(gap)]), kind)
    value, exact = times_ratio(d, gap, kind)
    if kind == "low_var_kl" and value > 10:
        value = 10.0
        exact = 0.0
    if kind == "k1" or math.isfinite(value):
        assert close(result.item(), value)
    assert close(gradient(result, new)[0], exact)


def test_near_the_reference_the_unbiased_estimate_is_bit_identical_to_the_product():
    generator = torch.Generator().manual_seed(0)
    new, reference, base = (torch.rand(3, 1000, generator=generator) * FAR_BELOW).unbind()
    leaves = [new.clone().requires_grad_() for _ in range(2)]
    ratio = (leaves[0] - base).exp()
    plain = kl_estimate(leaves[0], reference, "k3", ratio)
    result = unbiased_kl(leaves[1], reference, base, "k3")
    near = new - reference >= FAR_BELOW
    assert near.all()
    assert torch.equal(result, plain)
    assert torch.equal(
        *(torch.tensor(gradient(*pair)) for pair in ((plain, leaves[0]), (result, leaves[1])))
    )


@given(st.floats(-1000, SPLIT, width=32), st.floats(-3, 3, width=32))
def test_up_to_the_split_exponentials_are_bit_identical_to_torch(x: float, scale: float):
    for ours, plain in (
        (lambda x: exp(x), torch.exp),
        (expm1, torch.expm1),
        (lambda x: exp(x, torch.tensor([scale])), lambda x: torch.exp(x) * torch.tensor([scale])),
    ):
        leaf = torch.tensor([x], requires_grad=True)
        assert ours(leaf).item() == plain(leaf).item()
        assert gradient(ours(leaf), leaf) == gradient(plain(leaf), leaf)


@given(st.integers(2, 8), st.data())
def test_masked_logits_do_not_change_values_and_gradients_of_the_others(allowed: int, data):
    """Columns of -inf give the result of the smaller vocabulary in float64."""
    columns = data.draw(st.permutations(range(10)))[:allowed]
    values = data.draw(st.lists(st.floats(-30, 30, width=32), min_size=allowed, max_size=allowed))
    target = data.draw(st.integers(0, allowed - 1))
    small = torch.tensor([values], dtype=torch.float64, requires_grad=True)
    everything = small.log_softmax(-1)
    exact = everything[0, target] - 0.3 * (everything.exp() * everything).sum()
    (expected,) = torch.autograd.grad(exact, small)
    logits = torch.full((1, 10), -math.inf)
    logits[0, columns] = torch.tensor(values)
    logits.requires_grad_()
    log_probs, entropy = target_log_probs(
        logits, torch.tensor([columns[target]]), with_entropy=True
    )
    assert entropy is not None
    loss = (log_probs + 0.3 * entropy).sum()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-4, abs=1e-4)
    (result,) = torch.autograd.grad(loss, logits)
    assert result[0, columns].tolist() == pytest.approx(expected[0].tolist(), rel=1e-4, abs=1e-4)
    masked = sorted(set(range(10)) - set(columns))
    assert result[0, masked].tolist() == [0.0] * len(masked)


def test_a_custom_loss_without_tokens_has_zero_gradient_at_masked_logits():
    logits = torch.full((1, 2, 3), -math.inf, requires_grad=True)
    loss, _ = logits_loss(lambda *_: (torch.zeros(()), {}), None, {}, logits, torch.sum)
    assert loss.item() == 0
    (result,) = torch.autograd.grad(loss, logits)
    assert result.abs().max().item() == 0


def test_slimes_policy_loss_has_a_gradient_where_the_ratio_overflows():
    kl = torch.tensor([-100.0, -100.0], requires_grad=True)
    loss, clipped = compute_policy_loss(kl, torch.tensor([1.0, -1.0]), 0.2, 0.2, 3.0)
    assert loss.tolist() == pytest.approx([-1.2, 3.0])
    assert clipped[0] == 1
    assert gradient(loss, kl) == [0, 0]


@pytest.mark.parametrize("surrogate", ["clip", "gspo", "cispo"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_an_excluded_token_keeps_loss_gradient_and_metrics_finite(surrogate, kind, unbiased):
    """Tokens are excluded by weight (rejection), factor (IcePop) and mask (OPSM)."""
    new = torch.tensor([-1.0, -1.0, -1.0, -1000.0, -1.0], requires_grad=True)
    loss = LossConfig(
        surrogate=surrogate,
        kl_loss_type=kind,
        kl_loss_coef=0.1,
        use_unbiased_kl=unbiased,
        use_opsm=True,
    )
    tokens = TokenBatch(
        log_probs=new,
        entropy=torch.ones(5),
        weight=torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0]),
        sequences=Sequences(torch.arange(5), torch.ones(5)),
        advantages=torch.tensor([1.0, -1.0, -1.0, -1.0, 0.0]),
        proximal_log_probs=torch.tensor([-1.0, -1000.0, -1.0, -1.0, -1000.0]),
        reference_log_probs=torch.tensor([-1.0, -1.0, -1.0, -1.0, -1000.0]),
        factor=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]),
    )
    result = objective(tokens, loss)
    assert math.isfinite(result.loss.item())
    assert all(math.isfinite(value) for value in gradient(result.loss, new))
    assert all(math.isfinite(value.item()) for value in result.metrics.values())


def test_a_kl_with_coefficient_0_does_not_change_the_gradient():
    new = torch.tensor([-200.0], requires_grad=True)
    tokens = TokenBatch(
        log_probs=new,
        entropy=torch.ones(1),
        weight=torch.ones(1),
        sequences=Sequences(torch.zeros(1, dtype=torch.long), torch.ones(1)),
        advantages=torch.ones(1),
        proximal_log_probs=torch.tensor([-200.0]),
        reference_log_probs=torch.tensor([-1.0]),
    )
    result = objective(tokens, LossConfig(kl_loss_coef=0.0, kl_loss_type="k3"))
    assert result.loss.item() == -1
    assert gradient(result.loss, new) == [-1]


@given(
    st.lists(log_ratio, min_size=2, max_size=6),
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["clip", "truncate", "icepop", "mask"]),
)
def test_off_policy_weights_are_finite_in_float32(gaps, level, mode):
    loss = LossConfig(
        use_tis=True,
        tis_level=level,
        tis_mode=mode,
        use_rs=True,
        rs_level=level,
        tis_batch_normalize=True,
    )
    count = len(gaps)
    result = correct(
        np.array(gaps), np.zeros(count), np.ones(count), np.array([1, count - 1]), loss
    )
    for column in (result.factor, result.kept, *result.metrics.values()):
        assert np.isfinite(column.astype(np.float32)).all()


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.1, -1e10 / 3])
def test_equal_values_are_whitened_to_exactly_0(value):
    for count in (1, 3, 7, 1000):
        assert whiten(np.full(count, value), np.ones(count)).tolist() == [0.0] * count


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.1, -1e10 / 3])
@pytest.mark.parametrize("scale", [False, True])
def test_equal_rewards_have_advantages_of_exactly_0(value, scale):
    for count in (3, 7, 11):
        group = np.repeat([5, 2], count)
        rewards = np.full(2 * count, value)
        assert group_relative(rewards, group, scale_by_std=scale).tolist() == [0.0] * (2 * count)
