"""The objective of a step: every loss of a configuration, against loops, finite differences, and
itself cut in pieces."""

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
from rlpipe.algorithms.objective import Tokens, objective
from rlpipe.algorithms.reduction import token_weights
from rlpipe.algorithms.sequences import Sequences, alone
from rlpipe.config.algorithms import LossConfig
from tests.algorithms import loops
from tests.algorithms.batches import Ragged, ragged

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
"""New, old, behaviour and reference log-probs, and advantages; the entropy is made up: minus the
new log-prob."""


Total = Callable[[torch.Tensor], torch.Tensor]


class Made:
    """The tokens of a batch that count, as the trainer has them, in float64."""

    def __init__(self, batch: Ragged, loss: LossConfig) -> None:
        new, old, behaviour, reference, advantages = (
            Ragged.flat(column) for column in batch.columns
        )
        mask = Ragged.flat(batch.mask)
        self.lengths = batch.lengths
        correction = correct(old, behaviour, mask, batch.lengths, loss)
        weight = token_weights(
            mask,
            batch.lengths,
            per_token=loss.calculate_per_token_loss,
            rollout=np.array(batch.rollouts),
            kept=correction.kept,
        ).astype(np.float64)
        sample = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        self.counted = np.flatnonzero(mask > 0)
        self.sample, self.counts = (
            sample[self.counted],
            np.bincount(sample, mask, minlength=len(batch.lengths)),
        )
        columns = {
            "weight": weight,
            "advantages": advantages,
            "proximal": old,
            "behaviour": behaviour,
            "reference": reference,
        }
        columns["factor"] = correction.factor
        self.columns = {
            name: torch.from_numpy(column[self.counted]) for name, column in columns.items()
        }
        self.new = torch.from_numpy(new[self.counted])

    def tokens(
        self, new: torch.Tensor, chosen: torch.Tensor | None = None, total: Total = alone
    ) -> Tokens:
        pick = torch.arange(len(self.new)) if chosen is None else chosen
        sequences = Sequences(
            torch.from_numpy(self.sample)[pick], torch.from_numpy(self.counts), total
        )
        columns: dict[str, Any] = {name: column[pick] for name, column in self.columns.items()}
        return Tokens(log_probs=new[pick], entropy=-new[pick], sequences=sequences, **columns)


def gradient(made: Made, loss: LossConfig) -> tuple[float, torch.Tensor]:
    new = made.new.clone().requires_grad_()
    total = objective(made.tokens(new), loss).loss
    total.backward()
    assert new.grad is not None
    return total.item(), new.grad


@given(ragged(columns=COLUMNS), policies)
def test_it_is_what_loops_compute(batch: Ragged, loss: LossConfig):
    made = Made(batch, loss)
    found = objective(made.tokens(made.new), loss)
    assert found.loss.item() == pytest.approx(
        loops.objective(batch.columns, batch.mask, batch.rollouts, loss), rel=1e-6, abs=1e-6
    )
    assert found.metrics["loss"].item() == found.loss.item()


@given(ragged(columns=COLUMNS, least=1), policies, st.randoms())
def test_cut_into_micro_batches_loss_gradient_and_metrics_are_the_same(
    batch: Ragged, loss: LossConfig, random
):
    """Whole samples, in any order."""
    made = Made(batch, loss)
    bins = [random.randrange(3) for _ in batch.lengths]
    whole, wanted = gradient(made, loss)
    new = made.new.clone().requires_grad_()
    found = [
        objective(
            made.tokens(new, torch.from_numpy(np.flatnonzero(np.array(bins)[made.sample] == k))),
            loss,
        )
        for k in range(3)
    ]
    total = torch.stack([part.loss for part in found]).sum()
    total.backward()
    assert total.item() == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert new.grad is not None
    assert torch.allclose(new.grad, wanted, atol=1e-9)
    names = objective(made.tokens(made.new), loss).metrics
    for name, value in names.items():
        assert sum(part.metrics[name].item() for part in found) == pytest.approx(
            value.item(), rel=1e-6, abs=1e-6
        )


@given(ragged(columns=COLUMNS, least=1), policies, st.randoms())
def test_cut_within_samples_over_ranks_that_share_them_it_is_the_same(
    batch: Ragged, loss: LossConfig, random
):
    """Two context parallel ranks: any token on either, sums over sequences taken over both."""
    made = Made(batch, loss)
    owner = np.array([random.randrange(2) for _ in made.sample], int)
    whole, wanted = gradient(made, loss)
    new = made.new.clone().requires_grad_()
    parts = [torch.from_numpy(np.flatnonzero(owner == rank)) for rank in range(2)]
    sent: list[list[torch.Tensor]] = [[], []]

    def listen(rank: int):
        return lambda values: (sent[rank].append(values), values)[1]

    for rank, part in enumerate(parts):
        objective(made.tokens(new, part, total=listen(rank)), loss)
    sums = [first + second for first, second in zip(*sent, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        answers = iter(sums)
        total = (
            total
            + objective(
                made.tokens(new, part, total=lambda _, answers=answers: next(answers)), loss
            ).loss
        )
    total.backward()
    assert total.item() == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert new.grad is not None
    assert torch.allclose(new.grad, wanted, atol=1e-9)


@pytest.mark.parametrize("surrogate", ["clip", "gspo"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradients_are_finite_differences(surrogate: str, unbiased: bool):
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
    made = Made(batch, loss)
    assert torch.autograd.gradcheck(
        lambda new: objective(made.tokens(new), loss).loss, made.new.clone().requires_grad_()
    )


def test_without_proximal_log_probs_the_ratio_is_1_and_has_a_gradient():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(
        new, -new.detach(), torch.full((2,), 0.5), Sequences(torch.zeros(2, dtype=torch.long), torch.tensor([2.0])),
        advantages=torch.tensor([1.0, -3.0]),
    )  # fmt: skip
    found = objective(tokens, LossConfig())
    found.loss.backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-0.5, 1.5]
    assert found.metrics["ratio"].item() == 1


def test_bypass_takes_the_ratio_to_the_engine():
    made = Made(
        Ragged([1.0], [0], [0], [[1.0]], [[[-1.0]], [[-1.0]], [[-1.5]], [[-1.0]], [[1.0]]]),
        LossConfig(),
    )
    loss = LossConfig(use_rollout_logprobs=True, eps_clip_high=10.0)
    assert objective(made.tokens(made.new), LossConfig()).loss.item() == pytest.approx(-1)
    assert objective(made.tokens(made.new), loss).loss.item() == pytest.approx(-math.exp(0.5))


def test_a_reducer_of_the_users_weighs_the_surrogate_only():
    made = Made(
        Ragged([1.0], [0], [0], [[1.0]], [[[-1.0]], [[-1.0]], [[-1.0]], [[-2.0]], [[3.0]]]),
        LossConfig(),
    )
    tokens = made.tokens(made.new)
    other = Tokens(**{**vars(tokens), "policy_weight": torch.tensor([0.1], dtype=torch.float64)})
    found = objective(other, LossConfig(kl_loss_coef=1.0, kl_loss_type="k1"))
    assert found.loss.item() == pytest.approx(0.1 * -3.0 + 1.0)
    assert found.metrics["pg_loss"].item() == pytest.approx(-0.3)


def test_a_custom_loss_is_weighted_like_any_other():
    made = Made(Ragged([1.0], [0], [0], [[1.0, 1.0]], [[[-1.0, -2.0]]] * COLUMNS), LossConfig())
    loss = LossConfig(type="custom", custom_loss_function_path="a.b")
    found = objective(
        made.tokens(made.new),
        loss,
        lambda tokens: (tokens.log_probs * 2, {"mine": tokens.log_probs * 0 + 7}),
    )
    assert found.loss.item() == pytest.approx(-3)
    assert found.metrics["mine"].item() == pytest.approx(7)
