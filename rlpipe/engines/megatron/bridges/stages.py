"""Weights by Hugging Face name: of one pipeline stage, which each can send by itself, and of all
stages on every rank.

Names, and how tensors of Megatron's are merged and cut, are mbridge's. Its own export asks all
stages who has each tensor, with three collectives of pickled objects for one (0.7 ms each on an
H200, also where there is one stage: 0.29 s of the 0.38 s that a push of 4B parameters took). Here
only tensors cross the pipeline, and a line that names some hundred MB of them at a time.

Not here: sending them to engines (`rlpipe.sync`), writing them as a directory (`export`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge
from megatron.core import parallel_state

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.bridges.bridge import shown

CROSSING_BYTES = 256 * 1024**2
"""Of tensors that are named to the other stages at once."""
Named = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank is in the pipeline."""

    stage: int
    stages: int
    speaks: bool
    """Is it the one rank of its stage that sends?"""


def place() -> Place:
    """This rank's. Process groups must be open."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    speaks = first and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return Place(parallel_state.get_pipeline_model_parallel_rank(), stages, speaks)


@torch.no_grad()
def whole_weights(bridge: LLMBridge, model: torch.nn.Module) -> Iterator[Named]:
    """Full tensors of all stages, in their order, on every rank. Collective: exhaust it on all of
    them. May alias the parameters."""
    here = place()
    for stage in range(here.stages):
        own = stage_weights(bridge, model) if stage == here.stage else None
        yield from _crossing(own, stage) if here.stages > 1 else own or ()


def _crossing(own: Iterator[Named] | None, stage: int) -> Iterator[Named]:
    """Its tensors on the ranks of a stage, the same on those of the others. Collective in the
    pipeline."""
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    source = dist.get_global_rank(group, stage)
    chunks = _chunks(own) if own is not None else None
    while True:
        chunk = next(chunks, []) if chunks is not None else []
        said: list[Any] = [[(name, tuple(tensor.shape), tensor.dtype) for name, tensor in chunk]]
        dist.broadcast_object_list(said, src=source, group=group, device=platform.device())
        if not said[0]:
            return
        if chunks is None:
            chunk = [
                (name, torch.empty(shape, dtype=dtype, device=platform.device()))
                for name, shape, dtype in said[0]
            ]
        for name, tensor in chunk:
            whole = tensor.contiguous()
            dist.broadcast(whole, src=source, group=group)
            yield name, whole


def _chunks(tensors: Iterable[Named]) -> Iterator[list[Named]]:
    chunk: list[Named] = []
    size_bytes = 0
    for name, tensor in tensors:
        chunk.append((name, tensor))
        size_bytes += tensor.nbytes
        if size_bytes >= CROSSING_BYTES:
            yield chunk
            chunk = []
            size_bytes = 0
    if chunk:
        yield chunk


@torch.no_grad()
def stage_weights(bridge: LLMBridge, model: torch.nn.Module) -> Iterator[Named]:
    """Full tensors of this rank's stage, on every rank of it. Collective in the stage: exhaust it
    on all of them.

    May alias the parameters. A tied output layer, which is the first stage's embedding once more,
    is left out.
    """
    known: Any = shown(bridge, model)
    whole: Any = bridge
    names = whole._weight_name_mapping_mcore_local_to_global(known, consider_ep=False)
    seen: set[str] = set()
    for local, parameter in _held(known):
        for name, parts in _gathered(names[local], parameter, whole):
            merged = (
                whole._weight_merge_across_tp(name, parts, parameter)
                if parts is not None
                else parameter
            )
            for hf_name, tensor in zip(*whole._weight_to_hf_format(name, merged), strict=True):
                if hf_name not in seen:
                    seen.add(hf_name)
                    yield hf_name, tensor.detach()


def _held(model: Any) -> Iterator[Named]:
    """Parameters, and the experts' biases of routers, which are buffers."""
    known = {"output_layer.weight"} if model.is_tied else set()
    for name, parameter in model.named_parameters():
        if name not in known:
            known.add(name)
            yield name, parameter
    for name, buffer in model.state_dict().items():
        if "expert_bias" in name and "_extra_state" not in name and name not in known:
            yield name, buffer.to(platform.device())


def _gathered(
    name: str, parameter: torch.Tensor, bridge: Any
) -> Iterator[tuple[str, list[torch.Tensor] | None]]:
    """Name and shards of each tensor that the ranks of the stage hold in this one's place; None for
    one that is whole."""
    mpu = bridge.mpu
    if ".mlp.experts.linear_fc" in name and mpu.ep_size > 1:
        prefix, number = name.split(".weight")
        each = bridge.config.num_moe_experts // mpu.ep_size
        for rank, expert in enumerate(_all_gathered(parameter, mpu.ep_size, mpu.ep_group)):
            yield (
                f"{prefix}.weight{each * rank + int(number)}",
                _all_gathered(expert, mpu.etp_size, mpu.etp_group),
            )
    elif getattr(parameter, "tensor_model_parallel", False):
        yield name, _all_gathered(parameter, mpu.tp_size, mpu.tp_group)
    else:
        yield name, None


def _all_gathered(tensor: torch.Tensor, size: int, group: Any) -> list[torch.Tensor]:
    if size <= 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor, group=group)
    return parts
