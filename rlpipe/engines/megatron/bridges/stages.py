"""Weights by Hugging Face name: `stage_weights` of a pipeline stage, `full_weights` of all stages.

Names, merging and splitting of Megatron's tensors are mbridge's. mbridge's own export finds the
stage of each tensor with three collectives of pickled objects. Each takes 0.7 ms on an H200, also
with one stage: 0.29 s of the 0.38 s of a push of 4B parameters. Here only tensors cross the
pipeline, and one message with the names of each chunk of 256 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge
from megatron.core import parallel_state

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.bridges.bridge import mbridge_view

# Tensors whose names go to the other stages in one message.
MAX_CHUNK_BYTES = 256 * 1024**2
NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PipelinePosition:
    """The position of a rank in the pipeline."""

    stage: int
    stages: int
    is_sender: bool
    """True on the one rank of its stage that sends weights."""


def pipeline_position() -> PipelinePosition:
    """Return this rank's position. Process groups must be open."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    return PipelinePosition(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stages=parallel_state.get_pipeline_model_parallel_world_size(),
        is_sender=first and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
    )


@torch.no_grad()
def full_weights(bridge: LLMBridge, chunks: Sequence[torch.nn.Module]) -> Iterator[NamedTensor]:
    """Yield the full tensors of all stages, in the order of the layers, on every rank.

    Collective: exhaust the iterator on all ranks. Tensors may alias the parameters. `chunks`: the
    model's chunks on this rank; every rank has the same number.
    """
    return from_all_stages(chunks, lambda chunk: stage_weights(bridge, [chunk]))


def from_all_stages(
    chunks: Sequence[torch.nn.Module],
    tensors_of: Callable[[torch.nn.Module], Iterator[NamedTensor]],
) -> Iterator[NamedTensor]:
    """Yield the tensors of the chunks of all stages on every rank. Collective, as `full_weights`.

    `tensors_of` yields the tensors of a chunk of this rank, equal on all ranks of the stage.
    """
    position = pipeline_position()
    for chunk in chunks:
        for stage in range(position.stages):
            own = tensors_of(chunk) if stage == position.stage else None
            yield from _broadcast_stage(own, stage) if position.stages > 1 else own or ()


def _broadcast_stage(own: Iterator[NamedTensor] | None, stage: int) -> Iterator[NamedTensor]:
    """Yield the stage's tensors on all ranks of the pipeline. Collective.

    `own`: the tensors on ranks of the stage, None on others.
    """
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    source = dist.get_global_rank(group, stage)
    chunks = _chunks(own) if own is not None else None
    while True:
        chunk = next(chunks, []) if chunks is not None else []
        message: list[Any] = [[(name, tuple(tensor.shape), tensor.dtype) for name, tensor in chunk]]
        dist.broadcast_object_list(message, src=source, group=group, device=platform.device())
        if not message[0]:
            return
        if chunks is None:
            chunk = [
                (name, torch.empty(shape, dtype=dtype, device=platform.device()))
                for name, shape, dtype in message[0]
            ]
        for name, tensor in chunk:
            # A split tensor can be a view with strides, and broadcast needs contiguous memory.
            full = tensor.contiguous()
            dist.broadcast(full, src=source, group=group)
            yield name, full


def _chunks(tensors: Iterable[NamedTensor]) -> Iterator[list[NamedTensor]]:
    chunk: list[NamedTensor] = []
    size_bytes = 0
    for name, tensor in tensors:
        chunk.append((name, tensor))
        size_bytes += tensor.nbytes
        if size_bytes >= MAX_CHUNK_BYTES:
            yield chunk
            chunk = []
            size_bytes = 0
    if chunk:
        yield chunk


@torch.no_grad()
def stage_weights(bridge: LLMBridge, chunks: Sequence[torch.nn.Module]) -> Iterator[NamedTensor]:
    """Yield the full tensors of these chunks of this rank's stage, on every rank of the stage.

    Collective in the stage: exhaust the iterator on all its ranks. Tensors may alias the
    parameters. A tied output layer is left out, because it is the first stage's embedding.
    """
    seen: set[str] = set()
    for chunk in chunks:
        for hf_name, tensor in _stacked(_chunk_tensors(bridge, chunk), bridge):
            if hf_name not in seen:
                seen.add(hf_name)
                yield hf_name, tensor.detach()


def _chunk_tensors(bridge: LLMBridge, chunk: torch.nn.Module) -> Iterator[NamedTensor]:
    view: Any = mbridge_view(bridge, chunk)
    mapping: Any = bridge
    names = mapping._weight_name_mapping_mcore_local_to_global(view, consider_ep=False)
    for local, parameter in _local_tensors(view):
        for name, parts in _gathered_parts(names[local], parameter, mapping):
            merged = (
                mapping._weight_merge_across_tp(name, parts, parameter)
                if parts is not None
                else parameter
            )
            yield from zip(*mapping._weight_to_hf_format(name, merged), strict=True)


def _stacked(tensors: Iterator[NamedTensor], bridge: LLMBridge) -> Iterator[NamedTensor]:
    """Stack tensors of experts that are one tensor in the file: `NAME[0]`, `NAME[1]`, …"""
    incomplete: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors:
        whole, bracket, number = name.partition("[")
        if not bracket:
            yield name, tensor
            continue
        parts = incomplete.setdefault(whole, {})
        parts[int(number.removesuffix("]"))] = tensor
        if len(parts) == bridge.config.num_moe_experts:
            yield whole, torch.stack([parts[i] for i in range(len(parts))])
            del incomplete[whole]


def _local_tensors(view: Any) -> Iterator[NamedTensor]:
    """Yield the merged parameters, and the routers' biases of experts, which are buffers."""
    seen = {"output_layer.weight"} if view.is_tied else set()
    for name, parameter in view.merged_parameters():
        if name not in seen:
            seen.add(name)
            yield name, parameter
    for name, buffer in view.state_dict().items():
        if "expert_bias" in name and "_extra_state" not in name and name not in seen:
            yield name, buffer.to(platform.device())


def _gathered_parts(
    name: str, parameter: torch.Tensor, bridge: Any
) -> Iterator[tuple[str, list[torch.Tensor] | None]]:
    """Yield the names and tensor parallel parts of the tensors that correspond to `parameter`.

    With expert parallelism, each rank of the stage holds another expert under this name. The parts
    are None for a tensor that is not split.
    """
    mpu = bridge.mpu
    if ".mlp.experts.linear_fc" in name and mpu.ep_size > 1:
        leaf = name.rstrip("0123456789")
        number = int(name[len(leaf) :])
        experts_per_rank = bridge.config.num_moe_experts // mpu.ep_size
        for rank, expert in enumerate(_all_gathered(parameter, mpu.ep_size, mpu.ep_group)):
            yield (
                f"{leaf}{experts_per_rank * rank + number}",
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
