"""`attend`: attention over packed segments on CUDA in 16 bit, by the fastest installed library.

`backend` chooses the library once in a process:

| backend | package | remark |
|---|---|---|
| transformer_engine | transformer_engine | uses cuDNN's kernels or FlashAttention 3 |
| flash_attention_3 | flash_attn_interface | FlashAttention for Hopper |
| flash_attention_2 | flash_attn | newer than the copy in torch |
| torch | torch | always installed: FlashAttention 2, `torch.nn.attention.varlen` |

All support key heads that several query heads share, and segments with more keys than queries:
query i of m then sees all keys but the last m - 1 - i (the causal mask from the bottom right). All
are deterministic if torch is set to be deterministic.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Segments:
    """The queries and keys of n segments."""

    queries: torch.Tensor
    """[n + 1] int32: start of each segment's queries, and the end of the last."""
    keys: torch.Tensor
    """[n + 1] int32: start of each segment's keys, and the end of the last."""
    longest_query: int
    longest_key: int

    @property
    def positional(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return self.queries, self.keys, self.longest_query, self.longest_key


Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments, float], torch.Tensor]
"""(query [L, heads, D], key [L', groups, D], value [L', groups, D], segments, scale) → [L, heads,
D]."""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Return [L, heads, value size], by the backend of this process.

    Values may be narrower than queries and keys, as in latent attention.
    """
    missing = query.shape[-1] - value.shape[-1]
    padded = torch.nn.functional.pad(value, (0, missing)) if missing else value
    out = _function(backend())(query, key, padded, segments, scale)
    return out[..., : value.shape[-1]] if missing else out


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return attention whose softmax has one more logit for each head, by torch's FlashAttention.

    y = Σ_j p_j v_j,    p_j = exp(s_j) / (exp(sink) + Σ_i exp(s_i))

    `sinks`: [heads]. `window`: the number of keys before the query that it sees; None: all.
    """
    result: Any = _AttentionWithSinks.apply(query, key, value, sinks, segments, scale, window)
    return result


class _AttentionWithSinks(torch.autograd.Function):
    """FlashAttention computes without sinks. With its log-sum l of exp(s_j), L = log(e^l + e^sink):

    y = exp(l - L) · output,    d sink = -Σ_queries exp(sink - L) · (dy · y)

    FlashAttention's backward pass computes p_j = exp(s_j - l) and p_j (dy · v_j - dy · y). Given L
    for l and y for its output, these are the gradients with sinks.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, segments: Segments, scale: float, window):
        ctx.arguments = (
            (*segments.positional, 0.0, True),
            {
                "scale": scale,
                "window_size_left": -1 if window is None else window,
                "window_size_right": 0,
            },
        )
        positional, keywords = ctx.arguments
        out, log_sum, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *positional, False, **keywords
        )
        with_sink = torch.logaddexp(log_sum, sinks.float()[:, None])
        out = (out * (log_sum - with_sink).exp().T[..., None]).to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, with_sink, state, unused)
        return out

    @staticmethod
    def backward(ctx, *grads):
        query, key, value, sinks, out, with_sink, state, unused = ctx.saved_tensors
        positional, keywords = ctx.arguments
        grad = grads[0].contiguous()
        to_inputs = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, with_sink, *positional, state, unused, **keywords
        )
        share = (sinks.float()[:, None] - with_sink).exp()
        to_sinks = -(share * (grad.float() * out.float()).sum(-1).T).sum(1).to(sinks.dtype)
        return *to_inputs, to_sinks, None, None, None


@functools.cache
def backend() -> str:
    """Return the name of the backend in use, a key of BACKENDS."""
    chosen = next(
        name
        for name, (package, _) in BACKENDS.items()
        if importlib.util.find_spec(package) is not None
    )
    _LOG.info("backend of packed attention: %s", chosen)
    return chosen


@functools.cache
def _function(name: str) -> Backend:
    return BACKENDS[name][1]()


def _torch() -> Backend:
    # torch 2.10 to 2.13 differ in the arguments for the causal mask, the scale and shared key
    # heads.
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = (
        {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    )
    options |= {"enable_gqa": True} if "enable_gqa" in known else {}

    def function(query, key, value, segments: Segments, scale: float) -> torch.Tensor:
        scaled: dict[str, Any] = options | {"scale": scale} if "scale" in known else options
        if "scale" not in known:
            query = query * (scale * query.shape[-1] ** 0.5)
        result: Any = varlen_attn(query, key, value, *segments.positional, **scaled)
        return result

    return function


def _flash_attention(module: str) -> Backend:
    varlen = importlib.import_module(module).flash_attn_varlen_func

    def function(query, key, value, segments: Segments, scale: float) -> torch.Tensor:
        result = varlen(
            query,
            key,
            value,
            *segments.positional,
            softmax_scale=scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return result[0] if isinstance(result, tuple) else result

    return function


def _transformer_engine() -> Backend:
    attention = importlib.import_module("transformer_engine.pytorch").DotProductAttention

    @functools.cache
    def module(heads: int, groups: int, size: int, scale: float) -> Any:
        return attention(
            heads,
            size,
            num_gqa_groups=groups,
            attention_dropout=0.0,
            qkv_format="thd",
            softmax_scale=scale,
        )

    def function(query, key, value, segments: Segments, scale: float) -> torch.Tensor:
        result = module(query.shape[1], key.shape[1], query.shape[2], scale)(
            query,
            key,
            value,
            qkv_format="thd",
            cu_seqlens_q=segments.queries,
            cu_seqlens_kv=segments.keys,
            max_seqlen_q=segments.longest_query,
            max_seqlen_kv=segments.longest_key,
            attn_mask_type="padding_causal_bottom_right",
        )
        return result.view(query.shape)

    return function


BACKENDS: dict[str, tuple[str, Callable[[], Backend]]] = {
    "transformer_engine": ("transformer_engine", _transformer_engine),
    "flash_attention_3": (
        "flash_attn_interface",
        functools.partial(_flash_attention, "flash_attn_interface"),
    ),
    "flash_attention_2": ("flash_attn", functools.partial(_flash_attention, "flash_attn")),
    "torch": ("torch", _torch),
}
"""Name → (required package, factory of the function), in the order of preference."""
