"""`PredictsFurther`: names and weights of layers for multi-token prediction (MTP), by family.

Megatron's layer has two norms, a projection, a layer like the model's last, and a final norm. Files
have such a layer in one of two forms:

- after the last layer of the model: `model.layers.61.enorm.weight` (DeepSeek, GLM);
- with a prefix of its own: `mtp.layers.0.…` (Qwen3-Next, Qwen3.5), `model.mtp_layers.0.…` (MiMo).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge

_MEGATRON = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")


@dataclass(frozen=True)
class PredictionNames:
    """Names in the file. `{number}` is the number of the layer, from 0 or after the model's."""

    count_key: str
    """Key of config.json with the number of layers."""
    layer: str
    """Prefix of a layer's attention and MLP."""
    own: tuple[str, str, str, str]
    """Norm of the embedding, norm of the hidden state, projection, final norm."""
    after_layers: bool = False
    """True if layers are numbered after those of the model."""
    hidden_first: bool = False
    """True if the projection reads hidden state and embedding; Megatron's reads the reverse."""
    default_count: int = 0
    """Number of layers if config.json lacks the key."""

    @property
    def leaves(self) -> Mapping[str, str]:
        """Name in Megatron's layer → name in the file."""
        return dict(zip(_MEGATRON, self.own, strict=True))


AFTER_LAYERS = PredictionNames(
    count_key="num_nextn_predict_layers",
    layer="model.layers.{number}",
    own=(
        "model.layers.{number}.enorm.weight",
        "model.layers.{number}.hnorm.weight",
        "model.layers.{number}.eh_proj.weight",
        "model.layers.{number}.shared_head.norm.weight",
    ),
    after_layers=True,
)
"""Names of DeepSeek-V3 and GLM."""


class PredictsFurther(LLMBridge):
    """Base of bridges whose layers for multi-token prediction can be trained."""

    prediction: ClassVar[PredictionNames] = AFTER_LAYERS

    @property
    def prediction_layers(self) -> int:
        """The number of layers for multi-token prediction."""
        found = getattr(self.hf_config, self.prediction.count_key, None)
        return self.prediction.default_count if found is None else found

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        if not mcore_weights_name.startswith("mtp.layers."):
            return super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)
        _, _, index, leaf = mcore_weights_name.split(".", 3)
        names = self.prediction
        hf_config: Any = self.hf_config
        first = hf_config.num_hidden_layers if names.after_layers else 0
        number = first + int(index)
        if leaf in names.leaves:
            return [names.leaves[leaf].format(number=number)]
        inner = leaf.replace("transformer_layer.", f"decoder.layers.{number}.", 1)
        found = super()._weight_name_mapping_mcore_to_hf(inner)
        prefix = names.layer.format(number=number)
        return [name.replace(f"model.layers.{number}", prefix, 1) for name in found]

    def _weight_to_mcore_format(
        self, mcore_weights_name: str, hf_weights: list[torch.Tensor]
    ) -> torch.Tensor:
        weight = super()._weight_to_mcore_format(mcore_weights_name, hf_weights)
        return _swapped(weight) if self._swaps(mcore_weights_name) else weight

    def _weight_to_hf_format(
        self, mcore_weights_name: str, mcore_weights: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        if self._swaps(mcore_weights_name):
            mcore_weights = _swapped(mcore_weights)
        return super()._weight_to_hf_format(mcore_weights_name, mcore_weights)

    def _swaps(self, name: str) -> bool:
        return self.prediction.hidden_first and name.endswith(".eh_proj.weight")


def _swapped(weight: torch.Tensor) -> torch.Tensor:
    """Swap the halves of the columns of a matrix."""
    return weight.roll(weight.shape[1] // 2, 1)
