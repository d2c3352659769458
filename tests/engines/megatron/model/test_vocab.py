"""Log-probs and entropy from hidden states, against torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlpipe.engines.megatron.model import vocab

ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
TEMPERATURE = 0.7


def inputs(rows: int = 12, hidden: int = 8, vocabulary: int = 20):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, hidden, generator=generator, dtype=torch.float32).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator).requires_grad_()
    return states, weight, torch.randint(0, vocabulary, (rows,), generator=generator)


def plain(states, weight, targets):
    everything = torch.log_softmax(states @ weight.T / TEMPERATURE, -1)
    return everything.gather(1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


def ours(states, weight, targets, *, entropy_gradient=True):
    return vocab.log_probs_and_entropy(
        states,
        weight,
        targets,
        temperature=TEMPERATURE,
        group=ALONE,
        entropy_gradient=entropy_gradient,
    )


@pytest.mark.parametrize("chunk_elements", [2**28, 100, 1])
def test_values_and_gradients_equal_log_softmax(monkeypatch, chunk_elements):
    monkeypatch.setattr(vocab, "CHUNK_ELEMENTS", chunk_elements)
    mix = torch.linspace(-1, 1, 12)
    results = []
    for function in (plain, ours):
        states, weight, targets = inputs()
        log_probs, entropy = function(states, weight, targets)
        (mix * log_probs + mix.flip(0) * entropy).sum().backward()
        results.append((log_probs, entropy, states.grad, weight.grad))
    for wanted, found in zip(*results, strict=True):
        assert torch.allclose(wanted, found, atol=1e-5)


def test_the_entropy_has_a_gradient_only_if_requested():
    states, weight, targets = inputs()
    log_probs, entropy = ours(states, weight, targets, entropy_gradient=False)
    assert log_probs.requires_grad
    assert not entropy.requires_grad


def test_certain_and_impossible_tokens_have_finite_values_and_gradients():
    states = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[500.0], [-500.0]], requires_grad=True)
    log_probs, entropy = ours(states, weight, torch.tensor([0, 1]))
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.tolist() == pytest.approx([0, -1000 / TEMPERATURE])
    assert entropy.tolist() == pytest.approx([0, 0], abs=1e-6)
    for tensor in (states, weight):
        assert tensor.grad is not None
        assert torch.isfinite(tensor.grad).all()


def test_no_rows_give_no_log_probs_and_zero_gradients():
    states, weight, targets = inputs()
    log_probs, entropy = ours(states[:0], weight, targets[:0])
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0
