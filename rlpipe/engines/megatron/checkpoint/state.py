"""The trained state of a rank and its digest.

The state: weights, main parameters, Adam's moments and step counts, and the position of the
schedule, of the policy and of a critic. Random numbers are not part of the state: they are derived
from the seed. `state_digest` and `weights_digest` are collective and equal on every rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.model.build import TrainedModel
from rlpipe.errors import TrainerError

# isort: split
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensorFactory,
)

if platform.CUDA_FOUND:
    from rlpipe.engines.megatron.model import kernels
else:
    kernels: Any = None

SHARDING_TYPE = "distrib_optim_sharding_type"
"""Key of the content metadata of Megatron's distributed optimizer."""
# Two odd multipliers, as signed 64-bit integers: one for each half of the hash.
_ODD_MULTIPLIERS = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64)


def check_optimizer_kind(
    trained: TrainedModel, content_metadata: dict[str, Any], folder: Path
) -> None:
    """Raises: TrainerError if one of the two is of Megatron's distributed optimizer alone.

    The two optimizers store tensors of other names and shapes.
    """
    stored = SHARDING_TYPE in content_metadata
    own = trained.chunks[0].ddp_config.use_distributed_optimizer
    if content_metadata and stored != own:
        raise TrainerError(
            "the checkpoint has the state of another kind of optimizer",
            where=str(folder),
            found=f"train.use_distributed_optimizer={str(stored).lower()}",
            expected=f"train.use_distributed_optimizer={str(own).lower()}, as configured",
            do="keep the key, or start a run with the weights alone (warm_start, model.start_from)",
        )


def inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield Megatron's optimizers that wrap one torch optimizer each and hold parameters."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            yield part


def initialize_adam_state(optimizer: Any) -> None:
    """Create the zero moments and step counts of every parameter.

    torch creates them lazily, and then the state before and after a restore would differ.
    """
    for part in inner_optimizers(optimizer):
        if not isinstance(part.optimizer, torch.optim.Adam):
            continue
        for group in part.optimizer.param_groups:
            # The fused Adam takes one kernel. It needs step counts on the parameters' device.
            group["fused"] = True
            group["foreach"] = False
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    for moment in ("exp_avg", "exp_avg_sq"):
                        state[moment] = torch.zeros_like(
                            parameter, memory_format=torch.preserve_format
                        )


def parameter_groups(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups of Megatron's optimizers, which may be chained."""
    yield from state.get("param_groups", [])
    for part in state.values():
        if isinstance(part, dict):
            yield from parameter_groups(part)


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of each parameter group."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]


def adam_states(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state dicts of the torch optimizers inside Megatron's, which may be chained."""
    if "param_groups" in state and "state" in state:
        yield state
        return
    for part in state.values():
        if isinstance(part, dict):
            yield from adam_states(part)


def named_weights(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and the persistent buffers of this rank's model by name.

    The names of several chunks begin with the chunk's number. Buffers matter: DeepSeek's routers
    balance experts by a bias that no optimizer holds.
    """
    for number, chunk in enumerate(chunks):
        chunk_prefix = f"{number}." if len(chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            yield f"{chunk_prefix}{name}", parameter.detach()
        for prefix, module in chunk.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{chunk_prefix}{prefix}.{name}", buffer


def named_state(trained: TrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of this rank's state by a stable name."""
    for name, tensor in named_weights(trained.models):
        yield f"model.{name}", tensor
    for i, part in enumerate(inner_optimizers(trained.optimizer)):
        for g, group in enumerate(part.optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                yield f"optimizer.{i}.{g}.{p}.main", parameter.detach()
                for key, value in sorted(part.optimizer.state[parameter].items()):
                    if torch.is_tensor(value):
                        yield f"optimizer.{i}.{g}.{p}.{key}", value


def state_digest(*models: TrainedModel) -> str:
    """Return the digest over all ranks' state of the policy, then of the critic. Collective."""
    return combined_digest(
        *[
            _digest(f"schedule {trained.scheduler.num_steps}", named_state(trained))
            for trained in models
        ]
    )


def weights_digest(trained: TrainedModel) -> str:
    """Return the digest over all ranks' weights alone. Collective."""
    return _digest("weights", named_weights(trained.models))


def combined_digest(*digests: str) -> str:
    """Return the digest of a state from the digests of policy and critic.

    A policy alone keeps its own digest. The result does not depend on whether policy and critic
    share ranks.
    """
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())


def _digest(header: str, named: Iterable[tuple[str, torch.Tensor]]) -> str:
    entries = [(name, tensor, _content(tensor)) for name, tensor in named]
    device_hashes = [content for *_, content in entries if isinstance(content, torch.Tensor)]
    # One transfer for all hashes.
    host_hashes = iter(
        [row.tobytes() for row in torch.stack(device_hashes).cpu().numpy()] if device_hashes else []
    )
    digest = xxhash.xxh3_128()
    digest.update(header.encode())
    for name, tensor, content in entries:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(next(host_hashes) if isinstance(content, torch.Tensor) else content)
    by_rank: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, digest.hexdigest())
    return xxhash.xxh3_128_hexdigest("".join(by_rank).encode())


def _content(tensor: torch.Tensor) -> torch.Tensor | memoryview:
    """Return the bytes of a CPU tensor, or the device hash of a CUDA tensor."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.is_cuda:
        return device_hash(flat)
    if not len(flat) or not tensor.is_contiguous():
        return flat.numpy().data  # empty, or a copy that the memoryview keeps alive
    # Not by NumPy: a storage that NumPy has viewed cannot be resized to 0 any more (`memory`).
    return memoryview((ctypes.c_uint8 * len(flat)).from_address(flat.data_ptr()))


def device_hash(flat: torch.Tensor, chunk: int = 2**26) -> torch.Tensor:
    """Return a 128-bit hash [2] int64 of a [n] uint8 tensor, on its device.

    The hash is two sums, modulo 2^64, over mixed 64-bit words and their positions. Integer sums do
    not depend on their order, so the hash does not depend on kernels or on `chunk` (in words).
    """
    words = flat
    if len(flat) % 8 or flat.data_ptr() % 8:
        words = flat.new_zeros(-(-len(flat) // 8) * 8)
        words[: len(flat)] = flat
    words = words.view(torch.int64)
    sums = words.new_zeros(2)
    if flat.is_cuda:
        kernels.hash_(words, sums, *_ODD_MULTIPLIERS)
        return sums
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk]
        position = torch.arange(start, start + len(part), device=part.device)
        for i, multiplier in enumerate(_ODD_MULTIPLIERS):
            sums[i] += _mixed(part, position, multiplier).sum()
    return sums


def _mixed(words: torch.Tensor, position: torch.Tensor, odd: int) -> torch.Tensor:
    """Mix each word invertibly, differently at every position."""
    mixed = (words ^ (position * odd)) * odd
    mixed = (mixed ^ (mixed >> 29)) * odd
    return mixed ^ (mixed >> 32)


def in_same_chain(loaded: dict[Any, Any], request: dict[Any, Any]) -> dict[Any, Any]:
    """Return a loaded state with the optimizers of the request.

    Megatron chains an optimizer of the dense weights and one of the experts where expert
    parallelism is larger than 1. Tensors have the same names in both cases, and only the other
    values of a checkpoint (groups of parameters, steps) are those of its own chain.
    """
    if all(isinstance(key, int) for key in loaded) if 0 in request else 0 not in loaded:
        return loaded
    step = max(_steps(loaded), default=0)
    state = with_plain_values(loaded, request)
    for group in parameter_groups(state):
        group["step"] = step
    for one in adam_states(state):
        one["state"]["common_step"] = torch.tensor(float(step))
    return state


def _steps(state: Any) -> Iterator[int]:
    """Yield the step counts of all optimizers."""
    for name, value in state.items():
        if name in ("step", "common_step"):
            yield int(value)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                yield from _steps(part)


def with_plain_values(loaded: Any, request: Any) -> Any:
    """Return the request with loaded tensors: a file of tensors alone has no other values."""
    if isinstance(request, dict):
        return {
            name: with_plain_values(_entry(loaded, name), value) for name, value in request.items()
        }
    if isinstance(request, list):
        return [with_plain_values(_entry(loaded, i), value) for i, value in enumerate(request)]
    is_loaded = isinstance(request, ShardedBase | ShardedTensorFactory | LocalNonpersistentObject)
    return loaded if is_loaded else request


def _entry(container: Any, key: Any) -> Any:
    """Return an entry of a dict or list, in which Megatron leaves out empty parts."""
    if isinstance(container, dict):
        return container.get(key)
    return container[key] if isinstance(container, list) and key < len(container) else None
