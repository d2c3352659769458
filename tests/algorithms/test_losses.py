"""Per-token losses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.losses import (
    cispo_loss,
    off_policy_sequence_mask,
    policy_loss,
    sequence_policy_loss,
    sft_loss,
)
from rlpipe.algorithms.sequences import Sequences
from tests.algorithms import loops
from tests.algorithms.batches import Ragged, ragged

number = st.floats(-3, 3, width=32)


def of_samples(lengths) -> Sequences:
    lengths = torch.as_tensor(lengths)
    return Sequences(torch.repeat_interleave(torch.arange(len(lengths)), lengths), lengths.double())


def column(rows) -> torch.Tensor:
    return torch.from_numpy(Ragged.flat(rows))


def at_ratio(ratio: float, advantage: float, **clip) -> tuple[float, float]:
    new = torch.tensor([math.log(ratio)])
    result = policy_loss(
        new, torch.zeros(1), torch.tensor([advantage]), **{"eps_clip": 0.2, **clip}
    )
    return result.loss.item(), result.clipped.item()


def test_a_token_with_positive_advantage_is_clipped_above():
    assert at_ratio(1.5, 1.0) == pytest.approx((-1.2, 1))


def test_clip_higher_raises_the_upper_bound():
    assert at_ratio(1.25, 1.0, eps_clip_high=0.28) == pytest.approx((-1.25, 0))
    assert at_ratio(1.5, 1.0, eps_clip_high=0.28) == pytest.approx((-1.28, 1))


def test_a_token_with_negative_advantage_is_clipped_below():
    assert at_ratio(0.5, -1.0) == pytest.approx((0.8, 1))


def test_dual_clip_bounds_the_loss_of_a_token_with_negative_advantage():
    assert at_ratio(5.0, -1.0)[0] == pytest.approx(5)
    assert at_ratio(5.0, -1.0, eps_clip_c=3.0)[0] == pytest.approx(3)
    assert at_ratio(5.0, 1.0, eps_clip_c=3.0)[0] == pytest.approx(-1.2)


def test_cispo_by_hand_keeps_the_gradient_of_a_clipped_token():
    new = torch.tensor([-2.0], requires_grad=True)
    result = cispo_loss(
        new, torch.tensor([-2.0 - math.log(6)]), torch.ones(1), eps_clip=1.0, eps_clip_high=4.0
    )
    result.loss.sum().backward()
    assert new.grad is not None
    assert (result.loss.item(), new.grad.item(), result.clipped.item()) == pytest.approx(
        (10, -5, 1)
    )


def test_on_policy_the_gradient_is_the_advantage_and_no_token_is_clipped():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = policy_loss(new, new.detach(), torch.tensor([0.5, -0.25]), eps_clip=0.2)
    result.loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-0.5, 0.25]
    assert result.clipped.tolist() == [0, 0]
    assert result.ppo_kl.tolist() == [0, 0]


@given(ragged(columns=1, min_length=1))
def test_on_policy_all_surrogates_have_the_same_gradient_over_a_sequence(batch: Ragged):
    log_probs = column(batch.columns[0])
    lengths = batch.lengths
    advantages = torch.repeat_interleave(
        torch.tensor(batch.rewards, dtype=torch.float64), torch.from_numpy(lengths)
    )
    gradients = []
    for surrogate in (
        lambda new, base: policy_loss(new, base, advantages, eps_clip=0.2),
        lambda new, base: sequence_policy_loss(
            new, base, advantages, of_samples(lengths), eps_clip=3e-4, eps_clip_high=4e-4
        ),
        lambda new, base: cispo_loss(new, base, advantages, eps_clip=1.0, eps_clip_high=4.0),
    ):
        new = log_probs.clone().requires_grad_()
        (
            surrogate(new, log_probs).loss
            / torch.repeat_interleave(*[torch.from_numpy(lengths)] * 2)
        ).sum().backward()
        gradients.append(new.grad)
    assert torch.allclose(gradients[0], gradients[1])
    assert torch.allclose(gradients[0], gradients[2])


def test_a_clipped_token_gets_no_gradient():
    new = torch.tensor([math.log(1.5)], requires_grad=True)
    policy_loss(new, torch.zeros(1), torch.ones(1), eps_clip=0.2).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.item() == 0


@given(ragged(columns=3), st.booleans())
def test_token_losses_equal_the_reference_loop(batch: Ragged, dual: bool):
    new, base, advantages = (column(rows) for rows in batch.columns)
    bound = 3.0 if dual else None
    clip = policy_loss(new, base, advantages, eps_clip=0.2, eps_clip_high=0.3, eps_clip_c=bound)
    cispo = cispo_loss(new, base, advantages, eps_clip=0.9, eps_clip_high=4.0)
    for i, (a, b, c) in enumerate(
        zip(new.tolist(), base.tolist(), advantages.tolist(), strict=True)
    ):
        ratio = math.exp(a - b)
        assert clip.loss[i].item() == pytest.approx(
            loops.clip_loss(ratio, c, 0.2, 0.3, bound), rel=1e-9, abs=1e-9
        )
        assert clip.ppo_kl[i].item() == pytest.approx(b - a, abs=1e-9)
        assert cispo.loss[i].item() == pytest.approx(
            -loops.clamp(ratio, 0.1, 5.0) * c * a, rel=1e-9, abs=1e-9
        )


@given(ragged(columns=3, min_length=1), st.booleans())
def test_sequence_losses_equal_the_reference_loop(batch: Ragged, dual: bool):
    new, base, advantages = batch.columns
    bound = 3.0 if dual else None
    sequences = of_samples(batch.lengths)
    result = sequence_policy_loss(
        column(new),
        column(base),
        column(advantages),
        sequences,
        eps_clip=0.2,
        eps_clip_high=0.3,
        eps_clip_c=bound,
    )
    ratios = loops.sequence_ratios(new, base)
    expected = [
        [loops.clip_loss(ratio, a, 0.2, 0.3, bound) for a in row]
        for ratio, row in zip(ratios, advantages, strict=True)
    ]
    assert result.loss.tolist() == pytest.approx(Ragged.flat(expected), rel=1e-9, abs=1e-9)
    masked = off_policy_sequence_mask(
        column(new), column(base), column(advantages), sequences, delta=0.1
    )
    expected_mask = [
        [float(not (a < 0 and -math.log(ratio) > 0.1)) for a in row]
        for ratio, row in zip(ratios, advantages, strict=True)
    ]
    assert masked.tolist() == Ragged.flat(expected_mask).tolist()


SURROGATES = {
    "clip": lambda new, base, a, s: (
        policy_loss(new, base, a, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0).loss
    ),
    "gspo": lambda new, base, a, s: (
        sequence_policy_loss(new, base, a, s, eps_clip=0.2, eps_clip_high=0.3).loss
    ),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_gradients_equal_finite_differences(name: str):
    generator = torch.Generator().manual_seed(0)
    new, base, advantages = (
        torch.randn(12, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    sequences = of_samples([3, 4, 1, 4])
    assert torch.autograd.gradcheck(
        lambda x: SURROGATES[name](x, base, advantages, sequences), new.requires_grad_()
    )


def test_cispos_gradient_equals_the_finite_difference_at_constant_weight():
    generator = torch.Generator().manual_seed(0)
    new, base, advantages = (
        torch.randn(12, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    weight = (new - base).exp().clamp(0, 5)
    probe = new.clone().requires_grad_()
    cispo_loss(probe, base, advantages, eps_clip=1.0, eps_clip_high=4.0).loss.sum().backward()
    step = 1e-6
    differences = (-weight * advantages * (new + step) + weight * advantages * (new - step)) / (
        2 * step
    )
    assert probe.grad is not None
    assert torch.allclose(probe.grad, differences, atol=1e-8)


def test_the_supervised_loss_is_the_negative_log_likelihood():
    assert sft_loss(torch.tensor([-0.5, -2.0])).tolist() == [0.5, 2.0]
