"""A whole model without memory behind it: which Megatron tensors it has, how they are called on
each side, where they lie in a checkpoint. One process stands for all ranks (TP = PP = EP = 1), so
every tensor is whole.

Not here: reading and writing (`hf_files`, `torch_dist`, `legacy`), running the model
(`engines.megatron.model.build`).
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

from rlpipe.config.train import ParallelConfig
from rlpipe.engines.megatron.bridges.bridge import layers_of, model_arguments, open_bridge, shown
from rlpipe.engines.megatron.groups import close_groups, open_groups
from rlpipe.engines.megatron.model.layers import PolicyModel
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

DTYPES = ("float32", "bfloat16", "float16")
_FIXED = {"vocab_size": "padded_vocab_size", "max_sequence_length": "max_position_embeddings"}
"""Arguments of GPTModel under the names that Megatron-LM has for them."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Process groups of this one process, which Megatron and mbridge ask for."""
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


class Skeleton:
    """The model of a directory with config.json. Process groups must be there (`alone`).

    `metadata`: how a checkpoint was laid out (its content metadata), if it is to be read. Raises:
    ConfigError.
    """

    def __init__(
        self, model_dir: str | Path, dtype: torch.dtype, *, metadata: dict[str, Any] | None = None
    ) -> None:
        keep: Any = dict.fromkeys(
            ("init_method", "output_layer_init_method", "embedding_init_method"), _leave_as_it_is
        )
        settings = {"use_cpu_initialization": True, **keep}
        self.bridge = open_bridge(str(model_dir), dtype, **settings)
        self.dtype = dtype
        self._model = _on_meta(self.bridge)
        state: dict[str, Any] = self._model.state_dict()
        self.theirs: dict[str, str] = dict(
            zip(state, shown(self.bridge, self._model).state_dict(), strict=True)
        )
        """Name in this model → in the layers that mbridge's and Megatron-LM's tables are written
        for."""
        found: Any = self._model.sharded_state_dict(
            metadata={"singleton_local_shards": False, **(metadata or {})}
        )
        self._places = {
            name: place for name, place in found.items() if not isinstance(place, ShardedObject)
        }
        self.objects: list[ShardedObject] = [
            place for place in found.values() if isinstance(place, ShardedObject)
        ]
        """What Megatron keeps beside the tensors; its local layers have nothing to say there, but
        it asks for it."""
        self.tensors: dict[str, torch.Tensor] = {name: state[name] for name in self._places}
        """Every tensor by name, on the meta device."""

    @property
    def tied(self) -> bool:
        """Is the output layer the embedding?"""
        return bool(getattr(self.bridge.hf_config, "tie_word_embeddings", False))

    def hf_names(self, name: str) -> list[str]:
        """The Hugging Face tensors that a Megatron tensor is made of."""
        return self.bridge._weight_name_mapping_mcore_to_hf(self.theirs[name])

    def to_hf(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """A Megatron tensor as Hugging Face's; views of it where possible. On the meta device:
        their shapes."""
        names, tensors = self.bridge._weight_to_hf_format(self.theirs[name], tensor)
        return dict(zip(names, tensors, strict=True))

    def from_hf(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A Megatron tensor of Hugging Face's, in the order of `hf_names`, in this model's dtype.

        Raises: ConfigError if it has another shape than the model's.
        """
        made = self.bridge._weight_to_mcore_format(self.theirs[name], list(tensors))
        expected = self.tensors[name]
        if made.shape != expected.shape:
            raise ConfigError(
                "a weight does not fit config.json",
                where=", ".join(self.hf_names(name)),
                found=tuple(made.shape),
                expected=tuple(expected.shape),
            )
        return made.to(expected.dtype)

    def place(self, name: str, tensor: torch.Tensor) -> Any:
        """The tensor with its place in a checkpoint, as Megatron saves and loads it."""
        return dataclasses.replace(self._places[name], data=tensor)

    def shards(self, name: str, tensor: torch.Tensor) -> list[ShardedTensor]:
        """The pieces that a tensor is stored as."""
        place = self.place(name, tensor)
        return (
            [*nested_values(place.build())] if isinstance(place, ShardedTensorFactory) else [place]
        )

    def parameter(self, name: str) -> torch.nn.Parameter | None:
        """The parameter of that name, which knows how it is divided over tensor parallel ranks;
        None for a buffer."""
        return dict(self._model.named_parameters()).get(name)


def arguments(bridge: LLMBridge) -> Namespace:
    """The architecture in the names of Megatron-LM's arguments: numbers, texts and lists of
    them."""
    config = {
        field.name: getattr(bridge.config, field.name)
        for field in dataclasses.fields(bridge.config)
    }
    model = {_FIXED.get(name, name): value for name, value in model_arguments(bridge).items()}
    hf_config: Any = bridge.hf_config
    own = {
        "vocab_size": hf_config.vocab_size,
        "untie_embeddings_and_output_weights": not getattr(hf_config, "tie_word_embeddings", False),
        "swiglu": config["gated_linear_unit"],
        "norm_epsilon": config["layernorm_epsilon"],
        "num_experts": config["num_moe_experts"],
        "params_dtype": str(bridge.dtype),
        "hf_config": json.loads(hf_config.to_json_string(use_diff=False)),
    }
    every = {
        name: value.name if isinstance(value, Enum) else value
        for name, value in {**config, **model, **own}.items()
    }
    return Namespace(**{name: value for name, value in every.items() if _is_plain(value)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _on_meta(bridge: LLMBridge) -> PolicyModel:
    with torch.device("meta"):
        return PolicyModel(
            config=bridge.config,
            transformer_layer_spec=layers_of(bridge),
            share_embeddings_and_output_weights=getattr(
                bridge.hf_config, "tie_word_embeddings", False
            ),
            **model_arguments(bridge),
        )


def _leave_as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
