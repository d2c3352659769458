"""Every Triton kernel, in Triton's interpreter on a CPU, against the formula in torch."""

from __future__ import annotations

import pytest
import torch

from rlpipe.engines.megatron.checkpoint import state
from rlpipe.engines.megatron.model import fused, vocab
from tests.engines.megatron.triton_interpreter import Interpreted

TOKENS = 19
GROUPS = 3
SIZE = 8
EPS = 1e-6
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(scope="module")
def kernels():
    interpreted = Interpreted()
    yield interpreted
    interpreted.stop()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    tolerance = 1e-5 if found.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=1e-5)


def logits(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return 4 * random(7, 53, dtype=dtype), torch.tensor([0, 52, -1, 16, 15, 31, 7])


@BOTH_DTYPES
def test_statistics_of_logits_equal_torch(kernels, dtype):
    values, targets = logits(dtype)
    close(
        kernels.call("statistics", values, targets, 0.7)[0], vocab._statistics(values, targets, 0.7)
    )


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradient_of_logits_equals_torch(kernels, with_entropy):
    values, targets = logits()
    top, total, weighted, _ = vocab._statistics(values, targets, 0.7)
    columns = (
        top + total.log(),
        total.log() - weighted / total,
        random(7),
        random(7).flip(0) if with_entropy else None,
    )
    wanted = vocab._gradient_(values, targets, *columns, 0.7)
    close(kernels.call("gradient_", values.clone(), targets, *columns, 0.7)[0], wanted)


def test_masked_logits_have_finite_statistics_and_no_gradient(kernels):
    """Columns of -inf, in one row a whole block of the kernel, are a smaller vocabulary."""
    values, targets = logits()
    kept = torch.arange(53) % 3 == 0
    kept[:16] = False
    kept[targets[targets >= 0]] = True
    masked = values.masked_fill(~kept, -torch.inf)
    incoming = random(7), random(7).flip(0)
    renumbered = torch.where(targets >= 0, kept.cumsum(0)[targets] - 1, -1)
    small = values[:, kept].contiguous()
    wanted = vocab._statistics(small, renumbered, 0.7)
    top, total, weighted, _ = wanted
    columns = (top + total.log(), total.log() - weighted / total, *incoming)
    gradient = torch.zeros(7, 53)
    gradient[:, kept] = vocab._gradient_(small, renumbered, *columns, 0.7)
    close(vocab._statistics(masked, targets, 0.7), wanted)
    close(vocab._gradient_(masked, targets, *columns, 0.7), gradient)
    close(kernels.call("statistics", masked, targets, 0.7)[0], wanted)
    close(kernels.call("gradient_", masked.clone(), targets, *columns, 0.7)[0], gradient)


@BOTH_DTYPES
def test_swiglu_and_its_gradient_equal_torch(kernels, dtype):
    both = random(TOKENS, 2 * 70, dtype=dtype)
    grad = random(TOKENS, 70, dtype=dtype)
    close(kernels.call("swiglu", both)[0], fused._gated(both))
    close(kernels.call("swiglu_backward", grad, both)[0], fused._gated_backward(grad, both))


@BOTH_DTYPES
def test_rms_norm_and_its_gradients_equal_torch(kernels, dtype):
    x = random(TOKENS, 40, dtype=dtype)
    grad = random(40, TOKENS, dtype=dtype).T.contiguous()
    weight = random(40, dtype=dtype)
    close(kernels.call("rms_norm", x, weight, EPS)[0], fused._norm(x, weight, EPS))
    found = kernels.call("rms_norm_backward", grad, x, weight, EPS)[0]
    for mine, wanted in zip(found, fused._norm_backward(grad, x, weight, EPS), strict=True):
        close(mine, wanted)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("normalised", [False, True])
def test_heads_and_their_gradients_equal_torch(kernels, group, normalised):
    mixed = random(TOKENS, GROUPS, 4 * SIZE)
    weight = random(SIZE) if normalised else None
    angles = random(TOKENS, SIZE // 2)
    where = {"group": group, "offset": SIZE, "eps": EPS}
    known = (mixed, weight, angles.cos(), angles.sin())
    wanted = fused._heads(*known, **where)
    close(kernels.call("heads", *known, **where)[0], wanted)
    grad = random(*wanted.shape)
    out = torch.zeros_like(mixed)
    of_weight, arguments = kernels.call("heads_backward", grad, *known, out.clone(), **where)
    wanted_of_weight = fused._heads_backward(grad, *known, out, **where)
    close(arguments[-1], out)
    assert (of_weight is None) == (wanted_of_weight is None)
    if wanted_of_weight is not None:
        close(of_weight, wanted_of_weight)


def test_hash_equals_torch(kernels):
    words = torch.randint(-(2**63), 2**63 - 1, (301,), generator=torch.Generator().manual_seed(0))
    _, (_, found, *_) = kernels.call(
        "hash_", words, torch.zeros(2, dtype=torch.int64), *state._ODD_MULTIPLIERS
    )
    assert found.tolist() == state.device_hash(words.view(torch.uint8)).tolist()
