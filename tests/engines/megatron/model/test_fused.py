"""Fused operations against torch's autograd, and the tensors that they save."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from rlpipe.engines.megatron.model import fused

TOKENS = 11
GROUPS = 3
SIZE = 8
EPS = 1e-6


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def assert_same_gradients(ours, plain, *leaves: torch.Tensor) -> None:
    """Compare the gradients of a weighted sum of all results of two functions of the leaves."""
    found = []
    for function in (ours, plain):
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        total = torch.stack(
            [(torch.linspace(-1, 2, r.numel()).view(r.shape) * r).sum() for r in results]
        ).sum()
        found.append((*results, *torch.autograd.grad(total, leaves)))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def test_rms_norm_equals_torch():
    assert_same_gradients(
        lambda x, w: fused.rms_norm(x, w, EPS),
        lambda x, w: rms_norm(x, (40,), w, EPS),
        leaf(TOKENS, 2, 40),
        leaf(40),
    )


def test_swiglu_equals_torch():
    assert_same_gradients(
        fused.swiglu, lambda both: silu(both[..., :9]) * both[..., 9:], leaf(TOKENS, 1, 18)
    )


def turned(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    cosine = cosine[:, None]
    sine = sine[:, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_query_key_value_equals_torch(normalised, group):
    angles = leaf(TOKENS, SIZE // 2).detach()
    turns = angles.cos(), angles.sin()

    def plain(mixed, *weights):
        query, key, value = mixed.split([group * SIZE, SIZE, SIZE], -1)
        heads = [query.reshape(TOKENS, -1, SIZE), key]
        if weights:
            heads = [
                rms_norm(part, (SIZE,), weight, EPS)
                for part, weight in zip(heads, weights, strict=True)
            ]
        return *(turned(part, *turns) for part in heads), value

    def ours(mixed, of_query=None, of_key=None):
        return fused.query_key_value(mixed, of_query, of_key, *turns, EPS)

    weights = (leaf(SIZE), leaf(SIZE)) if normalised else ()
    assert_same_gradients(ours, plain, leaf(TOKENS, GROUPS, (group + 2) * SIZE), *weights)


def test_recomputed_results_are_not_saved_and_give_equal_gradients():
    both = leaf(TOKENS, 18)
    weight = leaf(5, 9)
    gated = fused.swiglu(both)
    wanted = torch.autograd.grad(linear(gated, weight).square().sum(), (both, weight))
    gated = fused.swiglu(both)
    storage = weakref.ref(gated)
    with fused.recomputed_for_backward(gated):
        out = linear(gated, weight)
    del gated
    gc.collect()
    assert storage() is None
    found = torch.autograd.grad(out.square().sum(), (both, weight))
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_other_saved_tensors_are_unchanged():
    other = leaf(3, 9)
    gated = fused.swiglu(leaf(TOKENS, 18))
    with fused.recomputed_for_backward(gated):
        out = other.exp()
    assert torch.equal(torch.autograd.grad(out.sum(), other)[0], other.exp())
