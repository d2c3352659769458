"""Batched attention over SGLang's paged cache for CPUs.

SGLang's `torch_native` backend runs one `scaled_dot_product_attention` per request and layer. With
a small model and hundreds of short requests that loop takes most of the time. `decode` and `extend`
pad requests of similar length to one call. `cpu_launch` installs them through SGLang's hook
registry. Sliding windows, cross attention and encoders go to SGLang's function unchanged.

B requests, E new tokens of a request (padded), M tokens in its cache (padded), H query heads, K
key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

_PADDED_TOKENS = 65536
"""Maximum of cached tokens gathered at once (B·M). Bounds the copies of keys and values."""
_PADDED_SCORES = 16_000_000
"""Maximum of attention scores at once (B·E·M). Bounds the mask."""

_KNOWN = {"scaling", "enable_gqa", "causal", "is_cross_attn", "sliding_window_size"}
"""Options of the batched kernel. With any other option SGLang's function runs."""


def decode(
    original: Callable[..., Any], backend: Any, *tensors: Any, **options: Any
) -> torch.Tensor:
    """Compute one new token per request.

    Replaces SGLang's `_run_sdpa_forward_decode` with the same arguments, effect and result.
    """
    query, output, k_cache, v_cache, req_to_token, requests, totals, encoder = tensors
    if not _is_covered(encoder, options):
        return original(backend, *tensors, **options)
    news = torch.ones_like(totals)
    _attend(
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        requests,
        totals,
        totals - 1,
        news,
        options["scaling"],
    )
    return output


def extend(
    original: Callable[..., Any], backend: Any, *tensors: Any, **options: Any
) -> torch.Tensor:
    """Compute several new tokens per request after a cached prefix.

    Replaces SGLang's `_run_sdpa_forward_extend` with the same arguments, effect and result.
    """
    query, output, k_cache, v_cache, req_to_token, requests, totals, prefixes, news, encoder = (
        tensors
    )
    if not options["causal"] or not _is_covered(encoder, options):
        return original(backend, *tensors, **options)
    _attend(
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        requests,
        totals,
        prefixes,
        news,
        options["scaling"],
    )
    return output


def _is_covered(encoder_lens: Any, options: dict[str, Any]) -> bool:
    window = options.get("sliding_window_size")
    return (
        encoder_lens is None
        and not options.get("is_cross_attn")
        and (window is None or window < 0)
        and set(options) <= _KNOWN
    )


def _attend(
    query, output, k_cache, v_cache, req_to_token, requests, totals, prefixes, news, scaling
) -> None:
    """Write softmax(q·k/√D + causal mask)·v of every new token into `output`.

    Shapes: query and output [ΣE, H, D]; caches [slots, K, D]; requests, totals, prefixes, news [B].
    """
    starts = torch.cumsum(news, 0) - news
    for part in _similar_lengths(totals, news):
        total = totals[part]
        prefix = prefixes[part]
        new = news[part]
        width = int(new.max())
        length = int(total.max())
        step = torch.arange(width)
        real = step < new[:, None]
        rows = starts[part][:, None] + torch.minimum(step, new[:, None] - 1)
        position = torch.arange(length)
        slots = (
            req_to_token[requests[part], :length].long().masked_fill(position >= total[:, None], 0)
        )
        visible = position <= (prefix[:, None] + step)[:, :, None]
        answer = _padded_attention(
            query[rows], k_cache[slots], v_cache[slots], visible[:, None], scaling
        )
        output[rows[real]] = answer[real].to(output.dtype)


def _padded_attention(query, keys, values, visible, scaling):
    """Compute attention of padded requests.

    Shapes: query [B, E, H, D]; keys, values [B, M, K, D]; visible [B, 1, E, M] bool; returns
    [B, E, H, D].
    """
    batch, width, heads, size = query.shape
    key_heads = keys.shape[2]
    value_size = values.shape[3]
    share = heads // key_heads
    stacked = (
        query.view(batch, width, key_heads, share, size)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, key_heads, share * width, size)
    )
    answer = scaled_dot_product_attention(
        stacked,
        keys.permute(0, 2, 1, 3).to(query.dtype),
        values.permute(0, 2, 1, 3).to(query.dtype),
        attn_mask=visible.repeat(1, 1, share, 1),
        scale=scaling,
    )
    answer = answer.view(batch, key_heads, share, width, value_size).permute(0, 3, 1, 2, 4)
    return answer.reshape(batch, width, heads, value_size)


def _similar_lengths(totals, news) -> Iterator[torch.Tensor]:
    """Yield indices of requests to run together.

    Padding is at most twice the content, and the memory bounds hold.
    """
    order = sorted(zip(totals.tolist(), news.tolist(), range(len(totals)), strict=True))
    part: list[int] = []
    shortest = widest = 0
    for total, new, index in order:
        widest = max(widest, new) if part else new
        count = len(part) + 1
        too_much = count * total > _PADDED_TOKENS or count * widest * total > _PADDED_SCORES
        if part and (total > 2 * shortest + 16 or too_much):
            yield torch.tensor(part)
            part = []
            widest = new
        if not part:
            shortest = total
        part.append(index)
    if part:
        yield torch.tensor(part)
