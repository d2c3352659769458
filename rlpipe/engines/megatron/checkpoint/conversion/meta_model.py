"""`MetaModel`: a full model on the meta device, for conversions.

It knows the names of the Megatron tensors on both sides and their shards in a checkpoint. One
process has the full model (TP = PP = EP = 1). `hf_files`, `torch_dist` and `legacy` read and write
the tensors. `arguments` returns the architecture under Megatron-LM's argument names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from rlpipe.config.train import LoraConfig, ParallelConfig
from rlpipe.engines.megatron.bridges.bridge import (
    layers_of,
    mbridge_view,
    model_arguments,
    model_class,
    open_bridge,
)
from rlpipe.engines.megatron.model.layers import PolicyModel
from rlpipe.engines.megatron.model.lora import MARK, add_adapters
from rlpipe.engines.megatron.model.prediction import prediction_spec
from rlpipe.engines.megatron.model.value_model import ValueModel
from rlpipe.engines.megatron.process_groups import close_groups, open_groups
from rlpipe.errors import ConfigError
from rlpipe.system.ports import free_port

# isort: split
from mbridge.core import LLMBridge
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

DTYPES = ("float32", "bfloat16", "float16")
_ARGUMENT_NAMES = {
    "vocab_size": "padded_vocab_size",
    "max_sequence_length": "max_position_embeddings",
}
"""Argument of GPTModel → its name in Megatron-LM."""


@contextlib.contextmanager
def single_process_groups() -> Iterator[None]:
    """Open process groups of this process alone. Megatron and mbridge need them."""
    open_groups(
        ParallelConfig(),
        rank=0,
        world_size=1,
        master=("127.0.0.1", free_port()),
        timeout_s=60.0,
        seed=0,
    )
    try:
        yield
    finally:
        close_groups()


class MetaModel:
    """The model of a directory with config.json. Needs open groups (`single_process_groups`).

    `metadata`: content metadata of the checkpoint to read, if any. `predicts`: with the layers for
    multi-token prediction. `critic`: with a value head in place of the output layer. `lora`: with
    adapters. Raises: ConfigError.
    """

    def __init__(
        self,
        model_dir: str | Path,
        dtype: torch.dtype,
        *,
        metadata: dict[str, Any] | None = None,
        predicts: bool = False,
        critic: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        keep: Any = dict.fromkeys(
            ("init_method", "output_layer_init_method", "embedding_init_method"), _keep_undefined
        )
        settings = {"use_cpu_initialization": True, **keep}
        self.bridge = open_bridge(str(model_dir), dtype, **settings)
        self.dtype = dtype
        self._critic = critic
        config: Any = self.bridge.config
        config.mtp_num_layers = getattr(self.bridge, "prediction_layers", 0) if predicts else None
        block = layers_of(self.bridge)
        further = {}
        if config.mtp_num_layers:
            further["mtp_block_spec"] = prediction_spec(config, block.layer_specs[-1])
        with torch.device("meta"):
            self._model = model_class(self.bridge, ValueModel if critic else PolicyModel)(
                config=config,
                transformer_layer_spec=block,
                share_embeddings_and_output_weights=self.tied,
                **model_arguments(self.bridge),
                **further,
            )
            if lora is not None:
                add_adapters(self._model, lora, seed=0)
        self._parameters = dict(self._model.named_parameters())
        state: dict[str, Any] = self._model.state_dict()
        # mbridge's models have no value head and no adapters.
        bridged = [
            name
            for name in state
            if not (critic and name.startswith("output_layer.")) and MARK not in name
        ]
        self.mbridge_names: dict[str, str] = dict(
            zip(bridged, mbridge_view(self.bridge, self._model).state_dict(), strict=True)
        ) | {name: name for name in state if name not in bridged}
        """Name in this model → name in mbridge's and Megatron-LM's (Transformer Engine) layers."""
        sharded: Any = self._model.sharded_state_dict(
            metadata={"singleton_local_shards": False, **(metadata or {})}
        )
        self._shards = {
            name: shard for name, shard in sharded.items() if not isinstance(shard, ShardedObject)
        }
        self.objects: list[ShardedObject] = [
            shard for shard in sharded.values() if isinstance(shard, ShardedObject)
        ]
        """Megatron's extra states. Empty for local layers, but Megatron requires them."""
        self.stored: dict[str, torch.Tensor] = {name: state[name] for name in self._shards}
        """Every tensor by name, on the meta device, with those of adapters."""
        self.tensors = {name: each for name, each in self.stored.items() if MARK not in name}
        """Every tensor by name, on the meta device, without adapters."""

    @property
    def tied(self) -> bool:
        """True if the output layer is the embedding."""
        tied = getattr(self.bridge.hf_config, "tie_word_embeddings", False)
        return bool(tied) and not self._critic

    def adapters(self, name: str) -> dict[tuple[str, str], str]:
        """Return the names of a weight's adapters by part and matrix, as ("q_proj", "lora_A")."""
        start = f"{name.removesuffix('.weight')}{MARK}"
        found = [each for each in self.stored if each.startswith(start)]
        parts = (each.removeprefix(start).partition(".") for each in found)
        return {(part, matrix): each for (part, _, matrix), each in zip(parts, found, strict=True)}

    def with_adapters(
        self, name: str, weight: torch.Tensor, adapters: dict[tuple[str, str], torch.Tensor]
    ) -> torch.Tensor:
        """Return a weight with its adapters merged. `adapters`: by part and matrix."""
        layer: Any = self._model.get_submodule(name.removesuffix(".weight"))
        parts = {part for part, _ in adapters}
        return layer.merged(
            weight, {part: (adapters[part, "lora_A"], adapters[part, "lora_B"]) for part in parts}
        )

    def hf_names(self, name: str) -> list[str]:
        """Return the names of the Hugging Face tensors of a Megatron tensor."""
        return self.bridge._weight_name_mapping_mcore_to_hf(self.mbridge_names[name])

    def to_hf(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a Megatron tensor into Hugging Face's tensors, by views where possible.

        Works on the meta device too.
        """
        names, tensors = self.bridge._weight_to_hf_format(self.mbridge_names[name], tensor)
        return dict(zip(names, tensors, strict=True))

    def from_hf(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Merge Hugging Face's tensors, in the order of `hf_names`, into a Megatron tensor.

        The result has this model's dtype. Raises: ConfigError if its shape is not the model's.
        """
        merged = self.bridge._weight_to_mcore_format(self.mbridge_names[name], list(tensors))
        expected = self.tensors[name]
        if merged.shape != expected.shape:
            raise ConfigError(
                "a weight does not have the shape of config.json",
                where=", ".join(self.hf_names(name)),
                found=tuple(merged.shape),
                expected=tuple(expected.shape),
            )
        return merged.to(expected.dtype)

    def merged(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Merge the parts of a tensor on the tensor parallel ranks, without padded vocabulary."""
        mbridge_name = self.mbridge_names[name]
        parameter: Any = self.parameter(name)
        if len(parts) > 1 and getattr(parameter, "tensor_model_parallel", False):
            original = self.bridge.mpu
            # mbridge merges by the sizes of the process groups. Show it those of the checkpoint.
            self.bridge.mpu = dataclasses.replace(original, tp_size=len(parts), etp_size=len(parts))
            try:
                full = self.bridge._weight_merge_across_tp(mbridge_name, parts, parameter)
            finally:
                self.bridge.mpu = original
        else:
            full = parts[0]
        if mbridge_name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            full = full[: self.tensors[name].shape[0]]
        return full

    def sharded(self, name: str, tensor: torch.Tensor, adam: str = "") -> Any:
        """Return the tensor as Megatron's ShardedTensor or ShardedTensorFactory.

        `adam`: the tensor is this one of the optimizer, of the parameter `name`.
        """
        if adam:
            own = self.sharded(name, torch.empty_like(self.tensors[name]))
            return make_sharded_optimizer_tensor(own, tensor, f"optimizer.state.{adam}")
        return dataclasses.replace(self._shards[name], data=tensor)

    def shards(self, name: str, tensor: torch.Tensor, adam: str = "") -> list[ShardedTensor]:
        """Return the pieces of a tensor in a checkpoint. `adam`: as in `sharded`."""
        sharded = self.sharded(name, tensor, adam)
        if isinstance(sharded, ShardedTensorFactory):
            return [*nested_values(sharded.build())]
        return [sharded]

    @property
    def parameter_names(self) -> list[str]:
        """Names of all parameters in the order of the model, which that of `tensors` is not."""
        return list(self._parameters)

    def parameter(self, name: str) -> torch.nn.Parameter | None:
        """Return the parameter of this name; None for a buffer.

        Its attributes say how it is split over tensor parallel ranks.
        """
        return self._parameters.get(name)


def arguments(bridge: LLMBridge) -> Namespace:
    """Return the architecture under Megatron-LM's argument names, as plain values."""
    config = {
        field.name: getattr(bridge.config, field.name)
        for field in dataclasses.fields(bridge.config)
    }
    model = {
        _ARGUMENT_NAMES.get(name, name): value for name, value in model_arguments(bridge).items()
    }
    hf_config: Any = bridge.hf_config
    derived = {
        "vocab_size": hf_config.vocab_size,
        "untie_embeddings_and_output_weights": not getattr(hf_config, "tie_word_embeddings", False),
        "swiglu": config["gated_linear_unit"],
        "norm_epsilon": config["layernorm_epsilon"],
        "num_experts": config["num_moe_experts"],
        "params_dtype": str(bridge.dtype),
        "hf_config": json.loads(hf_config.to_json_string(use_diff=False)),
    }
    values = {
        name: value.name if isinstance(value, Enum) else value
        for name, value in {**config, **model, **derived}.items()
    }
    return Namespace(**{name: value for name, value in values.items() if _is_plain(value)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _keep_undefined(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
