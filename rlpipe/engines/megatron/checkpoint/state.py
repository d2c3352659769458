"""What the trained state is, and its digest.

The state: weights, main parameters, Adam's moments and step counts, and how far the schedule is, of
the policy and of a critic if there is one. Random numbers are not part of it: they are derived from
the seed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import xxhash

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.model.build import Trained

if platform.CUDA_FOUND:
    from rlpipe.engines.megatron.model import kernels
else:
    kernels: Any = None

_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers that wrap one torch optimizer each and hold parameters."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            yield part


def fill_adam(optimizer: Any) -> None:
    """Give every parameter its zero moments and step 0 now, so that a state before and after a
    restore looks the same. torch's Adam takes its step in one kernel (`fused`), which wants the
    step counts beside the parameters."""
    for part in inner_optimizers(optimizer):
        if not isinstance(part.optimizer, torch.optim.Adam):
            continue
        for group in part.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    state["exp_avg"] = torch.zeros_like(
                        parameter, memory_format=torch.preserve_format
                    )
                    state["exp_avg_sq"] = torch.zeros_like(
                        parameter, memory_format=torch.preserve_format
                    )


def weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank's model computes with, by name: parameters, and buffers that are saved, such
    as the bias by which a router of DeepSeek's kind balances its experts, which no optimizer
    holds."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def tensors(trained: Trained) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of this rank's state by a stable name."""
    for name, tensor in weights(trained.model):
        yield f"model.{name}", tensor
    for i, part in enumerate(inner_optimizers(trained.optimizer)):
        for g, group in enumerate(part.optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                yield f"optimizer.{i}.{g}.{p}.main", parameter.detach()
                for key, value in sorted(part.optimizer.state[parameter].items()):
                    if torch.is_tensor(value):
                        yield f"optimizer.{i}.{g}.{p}.{key}", value


def state_digest(*models: Trained) -> str:
    """Digest over all ranks' state of the policy (and then of the critic), the same on every rank.
    Collective."""
    return joined(*[_digest(trained) for trained in models])


def weights_digest(trained: Trained) -> str:
    """Digest over all ranks' weights alone, the same on every rank. Collective."""
    return _digest_of("weights", weights(trained.model))


def joined(*digests: str) -> str:
    """The digest of a state that has parts, from theirs: of the policy alone it is the policy's.
    Parts of the same ranks, or each in ranks of its own, are the same state."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())


def _digest(trained: Trained) -> str:
    return _digest_of(f"schedule {trained.scheduler.num_steps}", tensors(trained))


def _digest_of(about: str, named: Iterable[tuple[str, torch.Tensor]]) -> str:
    found = [(name, tensor, _content(tensor)) for name, tensor in named]
    hashes = iter(_on_host([content for *_, content in found if isinstance(content, torch.Tensor)]))
    digest = xxhash.xxh3_128()
    digest.update(about.encode())
    for name, tensor, content in found:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(next(hashes) if isinstance(content, torch.Tensor) else content)
    everyone: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, digest.hexdigest())
    return xxhash.xxh3_128_hexdigest("".join(everyone).encode())


def _content(tensor: torch.Tensor) -> torch.Tensor | memoryview:
    """The bytes of a tensor in CPU memory; of one on CUDA its hash, made and left there.

    (Not by way of NumPy: a storage that was ever shown to it cannot be emptied any more, see
    `memory`.)
    """
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.is_cuda:
        return on_device_hash(flat)
    if not len(flat) or not tensor.is_contiguous():
        return flat.numpy().data  # of nothing, or of a copy, which it keeps
    return memoryview((ctypes.c_uint8 * len(flat)).from_address(flat.data_ptr()))


def _on_host(hashes: list[torch.Tensor]) -> list[bytes]:
    return [row.tobytes() for row in torch.stack(hashes).cpu().numpy()] if hashes else []


def on_device_hash(flat: torch.Tensor, chunk: int = 2**26) -> torch.Tensor:
    """[2] int64, 128 bits of a [n] uint8 tensor: two sums over mixed 64-bit words and their
    positions, modulo 2^64.

    Integer sums do not depend on their order, so neither does the hash on kernels or `chunk` (in
    words).
    """
    words = flat
    if len(flat) % 8 or flat.data_ptr() % 8:
        words = flat.new_zeros(-(-len(flat) // 8) * 8)
        words[: len(flat)] = flat
    words = words.view(torch.int64)
    sums = words.new_zeros(2)
    if flat.is_cuda:
        kernels.hash_(words, sums, *_ODD)
        return sums
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk]
        position = torch.arange(start, start + len(part), device=part.device)
        for i, odd in enumerate(_ODD):
            sums[i] += _mixed(part, position, odd).sum()
    return sums


def _mixed(words: torch.Tensor, position: torch.Tensor, odd: int) -> torch.Tensor:
    """An invertible mix of each word, another one at every position."""
    mixed = (words ^ (position * odd)) * odd
    mixed = (mixed ^ (mixed >> 29)) * odd
    return mixed ^ (mixed >> 32)
