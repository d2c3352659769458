# ruff: noqa: N803 - Triton's constants are upper case
"""Triton kernels of the policy's forward and backward pass, and the functions that launch them.

Each kernel makes one pass over memory instead of torch's several. It computes in float32 for any
dtype of its tensors and rounds once, at the store. Equal inputs give equal bits: sums over programs
are made in a fixed order afterwards, or are sums of integers. `fused`, `vocab` and `state` have the
same functions in torch, for machines without CUDA and as the reference of tests.

Legend: L tokens, H width of a row, D head size, F feed-forward size, V vocabulary columns of this
rank. Rows are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Programs of a backward pass with weight gradients: 8 per multiprocessor of an H100 or H200.
PROGRAMS = 1056
# Elements per program: of a row of logits, and of a pointwise kernel.
COLUMNS = 4096
FLAT = 1024


@triton.jit
def _statistics(logits, targets, result, columns, rows, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    offsets = tl.arange(0, BLOCK)
    top = -1.0e30
    total = 0.0
    weighted = 0.0
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        scaled = (
            tl.load(start + first + offsets, mask=inside, other=-1.0e30).to(tl.float32)
            * inverse_temperature
        )
        scaled = tl.where(inside, scaled, -1.0e30)
        higher = tl.maximum(top, tl.max(scaled, 0))
        shrink = tl.exp(top - higher)
        below = scaled - higher
        mass = tl.where(inside, tl.exp(below), 0.0)
        weighted = shrink * (weighted + total * (top - higher)) + tl.sum(
            tl.where(mass > 0.0, mass * below, 0.0), 0
        )
        total = shrink * total + tl.sum(mass, 0)
        top = higher
    target = tl.load(targets + row)
    is_local = target >= 0
    chosen = tl.load(start + tl.where(is_local, target, 0)).to(tl.float32) * inverse_temperature
    tl.store(result + row, top)
    tl.store(result + rows + row, total)
    tl.store(result + 2 * rows + row, weighted)
    tl.store(result + 3 * rows + row, tl.where(is_local, chosen, 0.0))


def statistics(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return [4, n] float32 statistics of z = logits / temperature.

    The maximum, Σ exp(z - maximum), Σ exp(z - maximum) (z - maximum), and the target's z (0 if
    `targets` is -1: on another rank). Shapes: logits [n, V]; targets [n].
    """
    rows, columns = logits.shape
    result = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    _launch(_statistics, rows)(
        logits, targets, result, columns, rows, 1.0 / temperature, BLOCK=COLUMNS, num_warps=8
    )
    return result


@triton.jit
def _gradient(
    logits,
    targets,
    log_totals,
    entropies,
    grad_log_probs,
    grad_entropies,
    columns,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = logits + row * columns + column
    log_prob = tl.load(at, mask=inside, other=0.0).to(tl.float32) * inverse_temperature - tl.load(
        log_totals + row
    )
    prob = tl.exp(log_prob)
    grad_log_prob = tl.load(grad_log_probs + row)
    gradient = grad_log_prob * (tl.where(column == tl.load(targets + row), 1.0, 0.0) - prob)
    if WITH_ENTROPY:
        log_prob = tl.where(prob > 0.0, log_prob, 0.0)  # 0 × -inf of a masked token would be NaN.
        gradient -= tl.load(grad_entropies + row) * prob * (log_prob + tl.load(entropies + row))
    tl.store(at, (gradient * inverse_temperature).to(logits.dtype.element_ty), mask=inside)


def gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    log_totals: torch.Tensor,
    entropies: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropies: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """Overwrite logits [n, V] with their gradient. Other arguments are [n].

    `log_totals` are over all ranks' columns.
    """
    rows, columns = logits.shape
    _launch(_gradient, rows, -(-columns // COLUMNS))(
        logits,
        targets,
        log_totals,
        entropies,
        grad_log_probs.contiguous(),
        grad_log_probs if grad_entropies is None else grad_entropies.contiguous(),
        columns,
        1.0 / temperature,
        WITH_ENTROPY=grad_entropies is not None,
        BLOCK=COLUMNS,
        num_warps=8,
    )
    return logits


@triton.jit
def _swiglu(both, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(both + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    linear = tl.load(both + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * width + column,
        (gate * tl.sigmoid(gate) * linear).to(out.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _swiglu_backward(grad, both, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(both + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    linear = tl.load(both + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    incoming = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = incoming * linear * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(out + row * 2 * width + column, of_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(
        out + row * 2 * width + width + column,
        (incoming * gate * sigmoid).to(out.dtype.element_ty),
        mask=inside,
    )


def swiglu(both: torch.Tensor) -> torch.Tensor:
    """Return silu(a) · b [L, F] of `both` = (a, b) [L, 2 F]."""
    rows = both.shape[0]
    width = both.shape[1] // 2
    out = both.new_empty(rows, width)
    _launch(_swiglu, rows, -(-width // FLAT))(both, out, width, BLOCK=FLAT, num_warps=4)
    return out


def swiglu_backward(grad: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """Return the gradient [L, 2 F] at `both` from the gradient [L, F] at the result of `swiglu`."""
    rows = both.shape[0]
    width = both.shape[1] // 2
    out = torch.empty_like(both)
    _launch(_swiglu_backward, rows, -(-width // FLAT))(
        grad, both, out, width, BLOCK=FLAT, num_warps=4
    )
    return out


@triton.jit
def _rms_norm(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * width + column, (values * scale * factor).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _rms_norm_backward(
    grad, x, weight, out, parts, rows, width, eps, programs, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros([BLOCK], tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for step in range(tl.cdiv(rows, programs)):
        row = program + step * programs
        start = row * width
        real = inside & (row < rows)
        values = tl.load(x + start + column, mask=real, other=0.0).to(tl.float32)
        incoming = tl.load(grad + start + column, mask=real, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
        normal = values * scale
        of_weight += incoming * normal
        incoming = incoming * factor
        mean = tl.sum(incoming * normal, 0) / width
        tl.store(
            out + start + column,
            (scale * (incoming - normal * mean)).to(out.dtype.element_ty),
            mask=real,
        )
    tl.store(parts + program * width + column, of_weight, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean x² + eps) · weight over the last dimension of x [L, H]."""
    rows, width = x.shape
    out = torch.empty_like(x)
    block = 1 << (width - 1).bit_length()
    _launch(_rms_norm, rows)(x, weight, out, width, eps, BLOCK=block, num_warps=_warps(block))
    return out


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients at x [L, H] and at the weight [H]."""
    rows, width = x.shape
    out = torch.empty_like(x)
    programs = max(1, min(PROGRAMS, rows))
    block = 1 << (width - 1).bit_length()
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _launch(_rms_norm_backward, programs)(
        grad,
        x,
        weight,
        out,
        parts,
        rows,
        width,
        eps,
        programs,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out, parts.sum(0).to(weight.dtype)


@triton.jit
def _head_start(row, heads, group, mixed_stride, group_stride, offset, HALF: tl.constexpr):
    token = (row // heads).to(tl.int64)
    head = row % heads
    return (
        token * mixed_stride + (head // group) * group_stride + (head % group) * 2 * HALF + offset
    )[:, None]


@triton.jit
def _inverse_rms(first, second, eps, HALF: tl.constexpr):
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
    return 1.0 / tl.sqrt(mean + eps)[:, None]


@triton.jit
def _heads(
    mixed,
    weight,
    cosine,
    sine,
    out,
    rows,
    heads,
    group,
    mixed_stride,
    group_stride,
    offset,
    eps,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = (row < rows)[:, None]
    token = (row // heads).to(tl.int64)
    half = tl.arange(0, HALF)[None, :]
    start = _head_start(row, heads, group, mixed_stride, group_stride, offset, HALF)
    first = tl.load(mixed + start + half, mask=real, other=0.0).to(tl.float32)
    second = tl.load(mixed + start + HALF + half, mask=real, other=0.0).to(tl.float32)
    if NORM:
        scale = _inverse_rms(first, second, eps, HALF)
        first *= scale * tl.load(weight + half).to(tl.float32)
        second *= scale * tl.load(weight + HALF + half).to(tl.float32)
    cos = tl.load(cosine + token[:, None] * HALF + half, mask=real, other=0.0)
    sin = tl.load(sine + token[:, None] * HALF + half, mask=real, other=0.0)
    target = out + row.to(tl.int64)[:, None] * 2 * HALF + half
    tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=real)
    tl.store(target + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=real)


@triton.jit
def _heads_backward(
    grad,
    mixed,
    weight,
    cosine,
    sine,
    out,
    parts,
    rows,
    heads,
    group,
    mixed_stride,
    group_stride,
    offset,
    eps,
    programs,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
):
    half = tl.arange(0, HALF)[None, :]
    of_first = tl.zeros([HALF], tl.float32)
    of_second = tl.zeros([HALF], tl.float32)
    program = tl.program_id(0)
    for step in range(tl.cdiv(tl.cdiv(rows, ROWS), programs)):
        row = (program + step * programs) * ROWS + tl.arange(0, ROWS)
        real = (row < rows)[:, None]
        token = (row // heads).to(tl.int64)
        start = _head_start(row, heads, group, mixed_stride, group_stride, offset, HALF)
        cos = tl.load(cosine + token[:, None] * HALF + half, mask=real, other=0.0)
        sin = tl.load(sine + token[:, None] * HALF + half, mask=real, other=0.0)
        source = grad + row.to(tl.int64)[:, None] * 2 * HALF + half
        rotated_first = tl.load(source, mask=real, other=0.0).to(tl.float32)
        rotated_second = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
        grad_first = rotated_first * cos + rotated_second * sin
        grad_second = rotated_second * cos - rotated_first * sin
        if NORM:
            first = tl.load(mixed + start + half, mask=real, other=0.0).to(tl.float32)
            second = tl.load(mixed + start + HALF + half, mask=real, other=0.0).to(tl.float32)
            scale = _inverse_rms(first, second, eps, HALF)
            first = first * scale
            second = second * scale
            of_first += tl.sum(grad_first * first, 0)
            of_second += tl.sum(grad_second * second, 0)
            grad_first *= tl.load(weight + half).to(tl.float32)
            grad_second *= tl.load(weight + HALF + half).to(tl.float32)
            mean = ((tl.sum(grad_first * first, 1) + tl.sum(grad_second * second, 1)) / (2 * HALF))[
                :, None
            ]
            grad_first = scale * (grad_first - first * mean)
            grad_second = scale * (grad_second - second * mean)
        tl.store(out + start + half, grad_first.to(out.dtype.element_ty), mask=real)
        tl.store(out + start + HALF + half, grad_second.to(out.dtype.element_ty), mask=real)
    if NORM:
        column = program * 2 * HALF + tl.arange(0, HALF)
        tl.store(parts + column, of_first)
        tl.store(parts + column + HALF, of_second)


def heads(
    mixed: torch.Tensor,
    weight: torch.Tensor | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    *,
    group: int,
    offset: int,
    eps: float,
) -> torch.Tensor:
    """Return the `group` heads at `offset` of every group: [L, groups × group, D].

    The heads are normalised (if there is a weight [D]) and rotated. Shapes: mixed [L, groups,
    width]; cosine and sine [L, D / 2].
    """
    tokens, groups, width = mixed.shape
    half = cosine.shape[1]
    out = mixed.new_empty(tokens, groups * group, 2 * half)
    rows = tokens * groups * group
    _launch(_heads, -(-rows // 16))(
        mixed,
        weight,
        cosine,
        sine,
        out,
        rows,
        groups * group,
        group,
        groups * width,
        width,
        offset,
        eps,
        NORM=weight is not None,
        HALF=half,
        ROWS=16,
        num_warps=4,
    )
    return out


def heads_backward(
    grad: torch.Tensor,
    mixed: torch.Tensor,
    weight: torch.Tensor | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    out: torch.Tensor,
    *,
    group: int,
    offset: int,
    eps: float,
) -> torch.Tensor | None:
    """Write the gradient at these heads into `out` [L, groups, width].

    Returns the gradient at the weight [D].
    """
    tokens, groups, width = mixed.shape
    half = cosine.shape[1]
    rows = tokens * groups * group
    # 32 rows: 134 µs for 16k tokens of Qwen3-0.6B on an H200, 16 rows 213 µs.
    programs = max(1, min(PROGRAMS, -(-rows // 32)))
    parts = torch.empty(programs, 2 * half, dtype=torch.float32, device=mixed.device)
    _launch(_heads_backward, programs)(
        grad,
        mixed,
        weight,
        cosine,
        sine,
        out,
        parts,
        rows,
        groups * group,
        group,
        groups * width,
        width,
        offset,
        eps,
        programs,
        NORM=weight is not None,
        HALF=half,
        ROWS=32,
        num_warps=4,
    )
    return None if weight is None else parts.sum(0).to(weight.dtype)


@triton.jit
def _hash(words, result, number, first_odd, second_odd, BLOCK: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < number
    word = tl.load(words + column, mask=inside, other=0)
    first = (word ^ (column * first_odd)) * first_odd
    first = (first ^ (first >> 29)) * first_odd
    second = (word ^ (column * second_odd)) * second_odd
    second = (second ^ (second >> 29)) * second_odd
    tl.atomic_add(result, tl.sum(tl.where(inside, first ^ (first >> 32), 0), 0))
    tl.atomic_add(result + 1, tl.sum(tl.where(inside, second ^ (second >> 32), 0), 0))


def hash_(words: torch.Tensor, result: torch.Tensor, first_odd: int, second_odd: int) -> None:
    """Add to result [2] int64 the hash of words [n] int64, modulo 2^64.

    The hash is two sums over the words, mixed with their positions and one odd number each.
    """
    if len(words):
        _launch(_hash, -(-len(words) // (4 * FLAT)))(
            words, result, len(words), first_odd, second_odd, BLOCK=4 * FLAT
        )


def _launch(kernel: Any, *grid: int) -> Any:
    return kernel[grid]


def _warps(block: int) -> int:
    return min(16, max(1, block // 256))
