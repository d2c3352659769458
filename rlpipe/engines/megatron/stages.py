"""The weights of one pipeline stage by Hugging Face name, without those of the others: what each stage can send by itself.

As mbridge's export, but that nothing crosses the pipeline. Inside a stage tensors are gathered over tensor and expert parallel
ranks as there.

Not here: all weights on every rank (`bridge.export_weights`), sending them (`rlpipe.sync.staged`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge
from megatron.core import parallel_state

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.bridge import _Renamed


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
def stage_weights(bridge: LLMBridge, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors of this rank's stage, on every rank of it. Collective in the stage: exhaust it on all of them.

    May alias the parameters. A tied output layer, which is the first stage's embedding once more, is left out.
    """
    shown: Any = _Renamed(model, bridge)
    whole: Any = bridge
    names = whole._weight_name_mapping_mcore_local_to_global(shown, consider_ep=False)
    seen: set[str] = set()
    for local, parameter in _held(shown):
        for name, parts in _gathered(names[local], parameter, whole):
            merged = whole._weight_merge_across_tp(name, parts, parameter) if parts is not None else parameter
            for hf_name, tensor in zip(*whole._weight_to_hf_format(name, merged), strict=True):
                if hf_name not in seen:
                    seen.add(hf_name)
                    yield hf_name, tensor.detach()


def _held(shown: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the experts' biases of routers, which are buffers."""
    known = {"output_layer.weight"} if shown._model.share_embeddings_and_output_weights else set()
    for name, parameter in shown.named_parameters():
        if name not in known:
            known.add(name)
            yield name, parameter
    for name, buffer in shown.state_dict().items():
        if "expert_bias" in name and "_extra_state" not in name and name not in known:
            yield name, buffer.to(platform.device())


def _gathered(name: str, parameter: torch.Tensor, bridge: Any) -> Iterator[tuple[str, list[torch.Tensor] | None]]:
    """Name and shards of each tensor that the ranks of the stage hold in this one's place; None for one that is whole."""
    mpu = bridge.mpu
    if ".mlp.experts.linear_fc" in name and mpu.ep_size > 1:
        prefix, number = name.split(".weight")
        each = bridge.config.num_moe_experts // mpu.ep_size
        for rank, expert in enumerate(_all_gathered(parameter, mpu.ep_size, mpu.ep_group)):
            yield f"{prefix}.weight{each * rank + int(number)}", _all_gathered(expert, mpu.etp_size, mpu.etp_group)
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
