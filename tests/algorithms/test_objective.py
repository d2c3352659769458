"""The objective of a step against reference loops, finite differences and split batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.importance import correct
from rlpipe.algorithms.objective import TokenBatch, objective
from rlpipe.algorithms.sequences import Sequences, local_total
from rlpipe.config.algorithms import LossConfig
from tests.algorithms import loops
from tests.algorithms.batches import Ragged, ragged
from tests.algorithms.weights import token_weights

policies = st.builds(
    dict,
    surrogate=st.sampled_from(["clip", "gspo", "cispo"]),
    eps_clip=st.sampled_from([0.2, 0.9]),
    eps_clip_high=st.sampled_from([None, 0.3]),
    eps_clip_c=st.sampled_from([None, 3.0]),
    use_opsm=st.booleans(),
    opsm_delta=st.just(0.1),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    kl_loss_coef=st.sampled_from([0.0, 0.1]),
    kl_loss_type=st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
    use_unbiased_kl=st.booleans(),
    calculate_per_token_loss=st.booleans(),
    use_tis=st.booleans(),
    tis_mode=st.sampled_from(["clip", "icepop", "mask"]),
).map(LossConfig.model_validate)

COLUMNS = 5
"""Policy, proximal, rollout and reference log-probs, and advantages.

The tests take the negative policy log-prob as the entropy.
"""


Total = Callable[[torch.Tensor], torch.Tensor]


class CountedTokens:
    """The counted tokens of a batch as the trainer has them, in float64."""

    def __init__(self, batch: Ragged, loss: LossConfig) -> None:
        new, proximal, rollout, reference, advantages = (
            Ragged.flat(column) for column in batch.columns
        )
        mask = Ragged.flat(batch.mask)
        self.lengths = batch.lengths
        correction = correct(proximal, rollout, mask, batch.lengths, loss)
        weight = token_weights(
            mask,
            batch.lengths,
            per_token=loss.calculate_per_token_loss,
            rollout=np.array(batch.rollouts),
            kept=correction.kept,
        ).astype(np.float64)
        sample = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        self.counted = np.flatnonzero(mask > 0)
        self.sample = sample[self.counted]
        self.counts = np.bincount(sample, mask, minlength=len(batch.lengths))
        columns = {
            "weight": weight,
            "advantages": advantages,
            "proximal_log_probs": proximal,
            "rollout_log_probs": rollout,
            "reference_log_probs": reference,
            "factor": correction.factor,
        }
        self.columns = {
            name: torch.from_numpy(column[self.counted]) for name, column in columns.items()
        }
        self.new = torch.from_numpy(new[self.counted])

    def tokens(
        self, new: torch.Tensor, chosen: torch.Tensor | None = None, total: Total = local_total
    ) -> TokenBatch:
        indices = torch.arange(len(self.new)) if chosen is None else chosen
        sequences = Sequences(
            torch.from_numpy(self.sample)[indices], torch.from_numpy(self.counts), total
        )
        columns: dict[str, Any] = {name: column[indices] for name, column in self.columns.items()}
        return TokenBatch(
            log_probs=new[indices], entropy=-new[indices], sequences=sequences, **columns
        )


def gradient(counted: CountedTokens, loss: LossConfig) -> tuple[float, torch.Tensor]:
    new = counted.new.clone().requires_grad_()
    total = objective(counted.tokens(new), loss).loss
    total.backward()
    assert new.grad is not None
    return total.item(), new.grad


@given(ragged(columns=COLUMNS), policies)
def test_the_objective_equals_the_reference_loop(batch: Ragged, loss: LossConfig):
    counted = CountedTokens(batch, loss)
    result = objective(counted.tokens(counted.new), loss)
    assert result.loss.item() == pytest.approx(
        loops.objective(batch.columns, batch.mask, batch.rollouts, loss), rel=1e-6, abs=1e-6
    )
    assert result.metrics["loss"].item() == result.loss.item()


@given(ragged(columns=COLUMNS, min_length=1), policies, st.randoms())
def test_micro_batches_do_not_change_loss_gradient_and_metrics(
    batch: Ragged, loss: LossConfig, random
):
    """Micro-batches have whole samples in any order."""
    counted = CountedTokens(batch, loss)
    bins = [random.randrange(3) for _ in batch.lengths]
    whole, expected = gradient(counted, loss)
    new = counted.new.clone().requires_grad_()
    result = [
        objective(
            counted.tokens(
                new, torch.from_numpy(np.flatnonzero(np.array(bins)[counted.sample] == k))
            ),
            loss,
        )
        for k in range(3)
    ]
    total = torch.stack([part.loss for part in result]).sum()
    total.backward()
    assert total.item() == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert new.grad is not None
    assert torch.allclose(new.grad, expected, atol=1e-9)
    names = objective(counted.tokens(counted.new), loss).metrics
    for name, value in names.items():
        assert sum(part.metrics[name].item() for part in result) == pytest.approx(
            value.item(), rel=1e-6, abs=1e-6
        )


@given(ragged(columns=COLUMNS, min_length=1), policies, st.randoms())
def test_context_parallel_ranks_do_not_change_loss_and_gradient(
    batch: Ragged, loss: LossConfig, random
):
    """Each token is on one of two ranks; sums over sequences include both ranks."""
    counted = CountedTokens(batch, loss)
    owner = np.array([random.randrange(2) for _ in counted.sample], int)
    whole, expected = gradient(counted, loss)
    new = counted.new.clone().requires_grad_()
    parts = [torch.from_numpy(np.flatnonzero(owner == rank)) for rank in range(2)]
    sent: list[list[torch.Tensor]] = [[], []]

    def listen(rank: int):
        return lambda values: (sent[rank].append(values), values)[1]

    for rank, part in enumerate(parts):
        objective(counted.tokens(new, part, total=listen(rank)), loss)
    sums = [first + second for first, second in zip(*sent, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        answers = iter(sums)
        total = (
            total
            + objective(
                counted.tokens(new, part, total=lambda _, answers=answers: next(answers)), loss
            ).loss
        )
    total.backward()
    assert total.item() == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert new.grad is not None
    assert torch.allclose(new.grad, expected, atol=1e-9)


@pytest.mark.parametrize("surrogate", ["clip", "gspo"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradients_equal_finite_differences(surrogate: str, unbiased: bool):
    random = np.random.default_rng(0)
    rows = [[random.normal(size=n).tolist() for n in (3, 1, 4)] for _ in range(COLUMNS)]
    batch = Ragged([1.0, 0.0, 2.0], [0, 0, 0], [0, 0, 1], [[1, 0, 1], [1], [1, 1, 1, 0]], rows)
    loss = LossConfig.model_validate(
        {
            "surrogate": surrogate,
            "eps_clip": 0.2,
            "use_opsm": True,
            "entropy_coef": 0.1,
            "kl_loss_coef": 0.3,
            "kl_loss_type": "k3",
            "use_unbiased_kl": unbiased,
            "use_tis": True,
            "tis_clip": 5.0,
        }
    )
    counted = CountedTokens(batch, loss)
    assert torch.autograd.gradcheck(
        lambda new: objective(counted.tokens(new), loss).loss, counted.new.clone().requires_grad_()
    )


def test_without_proximal_log_probs_the_ratio_is_1_and_has_a_gradient():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = TokenBatch(
        log_probs=new,
        entropy=-new.detach(),
        weight=torch.full((2,), 0.5),
        sequences=Sequences(torch.zeros(2, dtype=torch.long), torch.tensor([2.0])),
        advantages=torch.tensor([1.0, -3.0]),
    )
    result = objective(tokens, LossConfig())
    result.loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-0.5, 1.5]
    assert result.metrics["ratio"].item() == 1


def test_bypass_takes_the_ratio_to_the_rollout_log_probs():
    counted = CountedTokens(
        Ragged([1.0], [0], [0], [[1.0]], [[[-1.0]], [[-1.0]], [[-1.5]], [[-1.0]], [[1.0]]]),
        LossConfig(),
    )
    loss = LossConfig(use_rollout_logprobs=True, eps_clip_high=10.0)
    assert objective(counted.tokens(counted.new), LossConfig()).loss.item() == pytest.approx(-1)
    assert objective(counted.tokens(counted.new), loss).loss.item() == pytest.approx(-math.exp(0.5))


def test_a_custom_reducer_weights_the_surrogate_only():
    counted = CountedTokens(
        Ragged([1.0], [0], [0], [[1.0]], [[[-1.0]], [[-1.0]], [[-1.0]], [[-2.0]], [[3.0]]]),
        LossConfig(),
    )
    tokens = counted.tokens(counted.new)
    other = TokenBatch(
        **{**vars(tokens), "policy_weight": torch.tensor([0.1], dtype=torch.float64)}
    )
    result = objective(other, LossConfig(kl_loss_coef=1.0, kl_loss_type="k1"))
    assert result.loss.item() == pytest.approx(0.1 * -3.0 + 1.0)
    assert result.metrics["pg_loss"].item() == pytest.approx(-0.3)


def test_a_custom_loss_is_weighted_like_a_built_in_one():
    counted = CountedTokens(
        Ragged([1.0], [0], [0], [[1.0, 1.0]], [[[-1.0, -2.0]]] * COLUMNS), LossConfig()
    )
    loss = LossConfig(type="custom", custom_loss_function_path="a.b")
    result = objective(
        counted.tokens(counted.new),
        loss,
        lambda tokens: (tokens.log_probs * 2, {"mine": tokens.log_probs * 0 + 7}),
    )
    assert result.loss.item() == pytest.approx(-3)
    assert result.metrics["mine"].item() == pytest.approx(7)
