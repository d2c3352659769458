"""The adapters of a policy as one safetensors file, which the store has of every weight version.

    adapter_file(trained)               the bytes of the file, from all ranks
    load_adapter_file(trained, data)    set the adapters of this rank

Names are those of torch_dist checkpoints, with the number of the layer in the whole model:
`decoder.layers.3.self_attention.linear_qkv.adapters.q_proj.lora_A`. The file does not depend on the
parallel layout. The metadata has `train.lora` as JSON under the key `lora`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open

from rlpipe.config.train import LoraConfig
from rlpipe.engines.megatron.bridges.stages import NamedTensor, from_all_stages
from rlpipe.engines.megatron.checkpoint.adapters import LORA, check_same_adapters
from rlpipe.engines.megatron.checkpoint.first_adapters import MATRICES, fill, required_name
from rlpipe.engines.megatron.model.build import TrainedModel
from rlpipe.engines.megatron.model.lora import ADAPTERS, MARK, adapted_modules


def adapter_file(trained: TrainedModel) -> bytes | None:
    """Return the file on rank 0, None on other ranks and for a policy without adapters. Collective.

    Rank 0 holds the file in memory: 2 bytes for each number of the adapters in bfloat16.
    """
    if trained.lora is None:
        return None
    tensors = from_all_stages(trained.models, _chunk_adapters)
    if torch.distributed.get_rank() > 0:
        for _ in tensors:
            pass
        return None
    # Parameters are views of one buffer, and a file has each tensor on its own.
    content = {name: tensor.detach().cpu().clone() for name, tensor in tensors}
    return safetensors.torch.save(content, {LORA: trained.lora.model_dump_json()})


@torch.no_grad()
def load_adapter_file(trained: TrainedModel, data: bytes, where: str) -> None:
    """Set this rank's adapters from the bytes of a file. The optimizer state stays.

    `where`: the file's URL. Raises: TrainerError if the file has other adapters than the policy.
    """
    check_same_adapters(trained, _lora_of(_metadata(data)), where)
    tensors = safetensors.torch.load(data)
    for module in [each for model in trained.models for each in adapted_modules(model)]:
        for part in module.adapters:
            for matrix in MATRICES:
                fill(module, part, matrix, tensors[_name(module, part, matrix)])
    trained.optimizer.reload_model_params()


def peft_weights(trained: TrainedModel) -> Iterator[NamedTensor]:
    """Yield the whole matrices of all adapters by PEFT's names, on every rank. Collective.

    Exhaust the iterator on all ranks. Raises: ConfigError for an adapter without such a name.
    """

    def named(module: Any, part: str, matrix: str) -> str:
        return required_name(trained.bridge, module.weight_name, part, matrix, "sync.transport")

    return from_all_stages(trained.models, partial(_chunk_adapters, name=named))


class AdapterFile:
    """A file of adapters on disk, read as the checkpoint of a conversion (`torch_dist`)."""

    layout = None
    """A file has no layout of its own."""

    def __init__(self, path: Path) -> None:
        self.folder = path
        with safe_open(path, framework="pt", device="cpu") as file:
            self.lora = _lora_of(file.metadata())
            names = [*file.keys()]
            self.dtype: torch.dtype = file.get_tensor(names[0]).dtype

    def read(self, _model: Any, names: list[str]) -> dict[str, torch.Tensor]:
        """Return these tensors."""
        with safe_open(self.folder, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in names}


def _metadata(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])["__metadata__"]


def _lora_of(metadata: dict[str, str]) -> LoraConfig:
    return LoraConfig.model_validate_json(metadata[LORA])


def _name(module: Any, part: str, matrix: str) -> str:
    return f"{module.weight_name.removesuffix('.weight')}{MARK}{part}.{matrix}"


def _chunk_adapters(
    chunk: torch.nn.Module, name: Callable[[Any, str, str], str] = _name
) -> Iterator[NamedTensor]:
    """Yield the whole matrices of a chunk on every rank of its stage. Collective in the stage."""
    for module in adapted_modules(chunk):
        for part, adapter in module.adapters.items():
            for matrix in MATRICES:
                own = getattr(adapter, matrix).detach()
                dimension = module.split.get(f"{ADAPTERS}.{part}.{matrix}")
                if dimension is not None and module.tp_group.size() > 1:
                    parts = [torch.empty_like(own) for _ in range(module.tp_group.size())]
                    torch.distributed.all_gather(parts, own.contiguous(), group=module.tp_group)
                    own = torch.cat(parts, dimension)
                yield name(module, part, matrix), own
