"""Qwen2.5-VL and Qwen3-VL: a language model in Megatron's layers, transformers' vision tower.

Each frequency of the rotation reads the position in time, height or width (`mrope_section`). In
Qwen2.5-VL the three parts follow each other. In Qwen3-VL they alternate, and the rest is time.
"""

from __future__ import annotations

from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge

from rlpipe.engines.megatron.bridges.hf_config import rope_of
from rlpipe.engines.megatron.bridges.registry import own_family
from rlpipe.engines.megatron.model.vision import PREFIX, ImageLayout


class ReadsImages:
    """Names and settings of a vision tower. Mix in before a bridge of the language model."""

    tower = "visual."
    """Start of the tower's names in the file."""
    hf_config: Any

    @property
    def vision(self) -> Any:
        """The configuration of the tower."""
        return self.hf_config.whole.vision_config

    @property
    def image_layout(self) -> ImageLayout:
        """How the model reads images."""
        return ImageLayout(
            image_token=self.hf_config.whole.image_token_id,
            merge=self.vision.spatial_merge_size,
            axes=self._axes(rope_of(self.hf_config)["mrope_section"]),
        )

    def _axes(self, sections: list[int]) -> tuple[int, ...]:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        if mcore_weights_name.startswith(PREFIX):
            return [self.tower + mcore_weights_name.removeprefix(PREFIX)]
        language: Any = super()
        return language._weight_name_mapping_mcore_to_hf(mcore_weights_name)

    def _weight_split_across_tp(
        self, mcore_weights_name: str, mcore_weights: torch.Tensor, param: Any, tp_split_size: int
    ) -> Any:
        if mcore_weights_name.startswith(PREFIX):
            return [mcore_weights] * tp_split_size
        language: Any = super()
        return language._weight_split_across_tp(
            mcore_weights_name, mcore_weights, param, tp_split_size
        )


@own_family("qwen2_5_vl")
class Qwen25Vision(ReadsImages, Qwen2Bridge):
    """Qwen2.5-VL: a Qwen2 with a vision tower."""


@own_family("qwen3_vl")
class Qwen3Vision(ReadsImages, Qwen3Bridge):
    """Qwen3-VL: a Qwen3 with a vision tower."""

    tower = "model.visual."

    def _axes(self, sections: list[int]) -> tuple[int, ...]:
        axes = [0] * sum(sections)
        for axis in (1, 2):
            places = range(axis, 3 * sections[axis], 3)
            axes[places.start : places.stop : places.step] = [axis] * len(places)
        return tuple(axes)

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        names = super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)
        if mcore_weights_name.startswith(PREFIX):
            return names
        start = "model."
        return [
            f"{start}language_model.{name.removeprefix(start)}" if name.startswith(start) else name
            for name in names
        ]
