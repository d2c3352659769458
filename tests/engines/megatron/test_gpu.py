"""Kernels on CUDA in bfloat16, at sizes of real models, and reproducible runs.

python -m pytest -m gpu tests/engines/megatron/test_gpu.py -s
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint import state
from rlpipe.engines.megatron.model import fused, linear, varlen, vocab
from rlpipe.engines.megatron.model.attention import packed_layout
from rlpipe.system.ports import free_port
from tests.engines.megatron.model.test_vocab import ALONE
from tests.engines.megatron.ranks import engine, make_batch

pytestmark = pytest.mark.gpu
STEPS = 20
REPEATS = 3


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to("cuda", dtype).requires_grad_()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ‖found - wanted‖ / ‖wanted‖; infinite for NaN."""
    found = found.detach().double()
    wanted = wanted.detach().double()
    far = (found - wanted).norm() / wanted.norm().clamp_min(1e-30)
    return float(torch.nan_to_num(far, nan=float("inf")))


def assert_near_unfused(
    monkeypatch, module, function: Callable, *leaves: torch.Tensor, most: float = 1e-2
) -> None:
    """Compare results and gradients: with kernels in bfloat16, and without in float32."""
    found = []
    for kernels, inputs in (
        (module.kernels, leaves),
        (None, [tensor.detach().float().requires_grad_() for tensor in leaves]),
    ):
        monkeypatch.setattr(module, "kernels", kernels)
        results = function(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        total = torch.stack(
            [
                (torch.linspace(-1, 2, r.numel(), device="cuda").view(r.shape) * r).sum()
                for r in results
            ]
        ).sum()
        found.append((*results, *torch.autograd.grad(total, inputs)))
    far = [distance(*pair) for pair in zip(*found, strict=True)]
    assert max(far) < most, far


def test_rms_norm_and_swiglu_equal_unfused_operations(monkeypatch):
    assert_near_unfused(
        monkeypatch, fused, lambda x, w: fused.rms_norm(x, w, 1e-6), leaf(1000, 1, 2560), leaf(2560)
    )
    monkeypatch.undo()
    assert_near_unfused(monkeypatch, fused, fused.swiglu, leaf(1000, 1, 2 * 9728))


@pytest.mark.parametrize("normalised", [False, True])
def test_queries_and_keys_equal_unfused_operations(monkeypatch, normalised):
    angles = leaf(1000, 64, dtype=torch.float32).detach()
    weights = (leaf(128), leaf(128)) if normalised else ()

    def function(mixed, of_query=None, of_key=None):
        return fused.query_key_value(mixed, of_query, of_key, angles.cos(), angles.sin(), 1e-6)

    assert_near_unfused(monkeypatch, fused, function, leaf(1000, 8, 6 * 128), *weights)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_log_probs_over_a_large_vocabulary_equal_unfused_operations(monkeypatch, entropy_gradient):
    monkeypatch.setattr(vocab, "CHUNK_ELEMENTS", 2**26)
    targets = torch.randint(0, 151936, (1000,), generator=torch.Generator().manual_seed(0)).cuda()

    def function(hidden, weight):
        found = vocab.log_probs_and_entropy(
            hidden, weight, targets, temperature=0.7, group=ALONE, entropy_gradient=entropy_gradient
        )
        return found if entropy_gradient else found[0]

    hidden = leaf(1000, 1024)
    weight = (0.05 * leaf(151936, 1024)).detach().requires_grad_()
    assert_near_unfused(monkeypatch, vocab, function, hidden, weight, most=2e-2)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_packed_attention_equals_attention_of_each_segment(cp_size):
    lengths = np.array([4, 260, 1024, 96])
    query, key, value = (leaf(int(lengths.sum()), heads, 128).detach() for heads in (16, 8, 8))
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    wanted = torch.cat([_alone(query[a:b], key[a:b], value[a:b]) for a, b in pairwise(bounds)])
    held = [_held(lengths, bounds, cp_size, rank) for rank in range(cp_size)]
    gathered = torch.cat(held)
    for rank, mine in enumerate(held):
        layout = packed_layout(lengths, cp_size, rank, torch.device("cuda"))
        theirs = (
            (key, value)
            if cp_size == 1
            else (key[gathered][layout.keys], value[gathered][layout.keys])
        )
        found = varlen.attend(query[mine], *theirs, layout.segments, 128**-0.5)
        assert distance(found, wanted[mine]) < 1e-2


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_packed_attention_with_sinks_equals_explicit_scores(cp_size, window):
    lengths = np.array([4, 260, 1024, 96])
    query, key, value = (leaf(int(lengths.sum()), heads, 64) for heads in (16, 8, 8))
    inputs = (query, key, value)
    sinks = leaf(16)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    outputs = [
        _alone_with_sinks(query[a:b], key[a:b], value[a:b], sinks, window)
        for a, b in pairwise(bounds)
    ]
    wanted = torch.cat(outputs)
    direction = leaf(*wanted.shape).detach().float()
    expected = torch.autograd.grad((wanted * direction).sum(), (*inputs, sinks))
    held = [_held(lengths, bounds, cp_size, rank) for rank in range(cp_size)]
    gathered = torch.cat(held)
    total = torch.zeros((), device="cuda")
    for rank, mine in enumerate(held):
        layout = packed_layout(lengths, cp_size, rank, torch.device("cuda"))
        order = slice(None) if cp_size == 1 else gathered[layout.keys]
        found = varlen.attend_with_sinks(
            query[mine], key[order], value[order], sinks, layout.segments, 0.125, window
        )
        assert distance(found, wanted[mine]) < 1e-2
        total = total + (found.float() * direction[mine]).sum()
    gradients = torch.autograd.grad(total, (*inputs, sinks))
    assert max(distance(*pair) for pair in zip(gradients, expected, strict=True)) < 2e-2


def _alone_with_sinks(query, key, value, sinks, window: int | None) -> torch.Tensor:
    q, k, v = (tensor.float().transpose(0, 1) for tensor in (query, key, value))
    scores = q @ k.repeat_interleave(2, 0).mT * 0.125
    seen = torch.ones_like(scores[0], dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(-window)
    scores = scores.masked_fill(~seen, float("-inf"))
    column = sinks.float()[:, None, None].expand(-1, len(query), 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return (weights @ v.repeat_interleave(2, 0)).transpose(0, 1)


def _held(lengths: np.ndarray, bounds: np.ndarray, cp_size: int, rank: int) -> torch.Tensor:
    """Return the global positions of a rank's tokens: chunks r and 2c-1-r of every segment."""
    chunks = [
        np.split(np.arange(a, a + n), 2 * cp_size)
        for a, n in zip(bounds[:-1], lengths, strict=True)
    ]
    return torch.from_numpy(
        np.concatenate([np.concatenate([c[rank], c[2 * cp_size - 1 - rank]]) for c in chunks])
    ).cuda()


def _alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    q, k, v = (tensor.float().transpose(0, 1)[None] for tensor in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_the_hash_of_the_kernel_equals_torch():
    content = torch.randint(
        0, 256, (100_003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    assert state.device_hash(content.cuda()).tolist() == state.device_hash(content).tolist()


def test_twenty_packed_steps_are_reproducible(models):
    digests = {}
    seconds = {}
    for deterministic in (True, False):
        runs = [_twenty_steps(models["qwen3"], deterministic=deterministic) for _ in range(REPEATS)]
        digests[deterministic], seconds[deterministic] = (
            [digest for digest, _ in runs],
            min(spent for _, spent in runs),
        )
    print(f"\n{STEPS} steps: deterministic {seconds[True]:.3f} s, otherwise {seconds[False]:.3f} s")
    assert len(set(digests[True])) == 1


def _twenty_steps(model_dir: str, *, deterministic: bool) -> tuple[str, float]:
    """Return the state's digest after twenty steps, and their time in seconds."""
    config = TrainConfig.model_validate({"optimizer": {"lr": 1e-3}, "max_tokens_per_gpu": 128})
    ours = engine(
        model_dir, config, 0, 1, free_port(), dtype="bfloat16", deterministic=deterministic
    )
    try:
        ours.load_hf()
        batch = make_batch(200)
        packing = plan(
            batch.lengths,
            global_batch_size=200 // STEPS,
            max_tokens=ours.max_tokens,
            data_parallel=1,
        )
        columns = batch.with_columns(proximal_log_probs=ours.score(batch))
        started = time.perf_counter()
        return ours.train(columns, packing).state_digest, time.perf_counter() - started
    finally:
        ours.close()


def test_products_add_weight_gradients_to_the_buffer(models, monkeypatch):
    """One rounding less than Megatron's own sum, so the gradients are near but not equal."""
    fused_gradients = _gradients(models["qwen3"])
    monkeypatch.setattr(linear, "accumulates", lambda _: False)
    own = _gradients(models["qwen3"])
    products = [name for name in own if ".linear_" in name and name.endswith("weight")]
    assert products
    for name, gradient in own.items():
        assert distance(fused_gradients[name], gradient) < 1e-2, name
    assert any(distance(fused_gradients[name], own[name]) > 0 for name in products)


def _gradients(model_dir: str) -> dict[str, torch.Tensor]:
    """Return the gradients of one step in several micro-batches, by Megatron's names."""
    config = TrainConfig.model_validate(
        {"optimizer": {"lr": 1e-3, "clip_grad": 0.0}, "max_tokens_per_gpu": 128}
    )
    ours = engine(model_dir, config, 0, 1, free_port(), dtype="bfloat16")
    try:
        ours.load_hf()
        batch = make_batch(100)
        packing = plan(
            batch.lengths, global_batch_size=None, max_tokens=ours.max_tokens, data_parallel=1
        )
        assert len(packing.steps[0][0]) > 3
        ours.train(batch, packing)
        (chunk,) = ours.trained.chunks
        parameters: dict[str, Any] = dict(chunk.named_parameters())
        return {name: each.main_grad.clone() for name, each in parameters.items()}
    finally:
        ours.close()
