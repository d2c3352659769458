"""`VisionPolicy`: a policy that reads images, with transformers' vision tower on its first stage.

The tower's features replace the embeddings of an image's placeholder tokens. Qwen3-VL also adds
features of the tower's earlier layers to the hidden states after its first decoder layers. The
tower is whole on every rank of the first stage. Tensor parallel ranks compute equal features and
gradients. Context parallel ranks compute all images of their samples and use those of their own
tokens.

Legend: L local packed tokens, m of them of images, P patches, I images, F features of all images.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from transformers import PretrainedConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.model.layers import PolicyModel
from rlpipe.errors import ConfigError

TOWERS: tuple[Any, ...] = (Qwen2_5_VisionTransformerPretrainedModel, Qwen3VLVisionModel)
"""Classes of transformers, each with its class of configurations."""
PREFIX = "vision."
"""Start of the names of the tower's parameters."""


@dataclass(slots=True, frozen=True)
class ImageLayout:
    """How a model reads images."""

    image_token: int
    """The placeholder token."""
    merge: int
    """A token stands for merge × merge patches."""
    axes: tuple[int, ...]
    """[D / 2]: which position rotates each frequency: 0 time, 1 height, 2 width."""


@dataclass(slots=True, frozen=True)
class ImageInputs:
    """The images of a micro-batch. All tensors but `grids` are on the device."""

    pixels: torch.Tensor
    """[P, values of a patch] float32."""
    grids: torch.Tensor
    """[I, 3] int64: patches in time, height and width."""
    tokens: torch.Tensor
    """[m] int64: the local tokens of images."""
    features: torch.Tensor
    """[m] int64, index into F: the feature of each of these tokens."""


class VisionRotation(torch.nn.Module):
    """Angles of the tower's positions, in float32.

    transformers keeps the frequencies in a buffer, which a model in bfloat16 would round.
    """

    def __init__(self, size: int, theta: float) -> None:
        super().__init__()
        self._size = size
        self._theta = theta

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the angles [P, size] of positions [P, 2] (row, column)."""
        steps = torch.arange(0, self._size, 2, dtype=torch.float, device=positions.device)
        return (positions.unsqueeze(-1) * (1.0 / self._theta ** (steps / self._size))).flatten(1)


def check_vision(bridge: Any, train: TrainConfig) -> None:
    """Raises: ConfigError for arguments that a model with images does not have."""
    if not hasattr(bridge, "vision"):
        return
    reasons = {
        "train.custom_model_provider_path": train.custom_model_provider_path,
        "train.megatron.transformer_impl": bridge.config.transformer_impl != "local",
        "train.lora": train.lora,
    }
    if _deep_features(bridge.vision):
        # The features are inputs of several layers, which neither reaches.
        reasons |= {
            "train.parallel.pipeline_model_parallel_size": (
                train.parallel.pipeline_model_parallel_size > 1
            ),
            "train.megatron.recompute_granularity": bridge.config.recompute_granularity == "full",
        }
    if key := next((key for key, refused in reasons.items() if refused), None):
        raise ConfigError(
            "the trainer does not have this for a model that reads images",
            where=key,
            found=_kind(bridge),
            do="remove the key, or use a model of text",
        )


def refuse_critic(bridge: LLMBridge) -> NoReturn:
    """Raises: ConfigError for a critic of a model that reads images."""
    raise ConfigError(
        "a critic cannot read images",
        where="advantage.advantage_estimator",
        found=_kind(bridge),
        do="use an estimator without a critic, such as grpo",
    )


def _deep_features(vision: PretrainedConfig) -> int:
    """Return the number of decoder layers that get features of the tower."""
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _kind(bridge: LLMBridge) -> str:
    hf_config: Any = bridge.hf_config
    return f"model_type: {hf_config.model_type}"


def vision_tower(config: PretrainedConfig) -> torch.nn.Module:
    """Return a tower of transformers with random weights, in float32."""
    (kind,) = (kind for kind in TOWERS if isinstance(config, kind.config_class))
    tower: Any = kind._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    rotation = tower.rotary_pos_emb
    tower.rotary_pos_emb = VisionRotation(rotation.dim, rotation.theta)
    return tower


class VisionPolicy(PolicyModel):
    """A policy of text and images. `vision`: the tower's configuration."""

    def __init__(self, *arguments: Any, vision: PretrainedConfig, **keywords: Any) -> None:
        # The features must be in the embeddings before these are split over the ranks.
        super().__init__(*arguments, scatter_embedding_sequence_parallel=False, **keywords)
        if self.pre_process:
            self.vision = vision_tower(vision).to(self.config.params_dtype)
            for number in range(_deep_features(vision)):
                self.decoder.layers[number].register_forward_hook(
                    partial(_add_features, number), with_kwargs=True
                )

    def forward(
        self, input_ids, position_ids, attention_mask, *arguments: Any, images=None, **keywords: Any
    ) -> Any:
        """Return the hidden states, as `PolicyModel`. `images`: ImageInputs, or None for text."""
        if self.pre_process:
            layout = keywords["packed_seq_params"]
            embedded, layout.deep_features = self._embeddings(input_ids, position_ids, images)
            keywords["decoder_input"] = embedded
        return super().forward(input_ids, position_ids, attention_mask, *arguments, **keywords)

    def _embeddings(
        self, tokens: torch.Tensor, positions: torch.Tensor, images: ImageInputs | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the decoder's input, and what to add after each of its first layers.

        Each is [L, 1, H], split over L with sequence parallelism.
        """
        embedded = self.embedding(input_ids=tokens, position_ids=positions)
        is_trained = any(parameter.requires_grad for parameter in self.vision.parameters())
        deep: list[torch.Tensor] = []
        if images is not None:
            with nullcontext() if is_trained else torch.no_grad():
                features, *deeper = self._features(images.pixels, images.grids)
            embedded = _placed(features, images, embedded)
            deep = [_placed(each, images, torch.zeros_like(embedded)) for each in deeper]
        elif is_trained and self.training and torch.is_grad_enabled():
            # Megatron's reduction waits for a gradient of every parameter of a bucket.
            for each in self._features(*self._no_image()):
                embedded = embedded + 0.0 * each.sum()
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            embedded, *deep = (
                scatter_to_sequence_parallel_region(each, group=group) for each in (embedded, *deep)
            )
        return embedded, deep

    def _features(self, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        """Return the features [F, H] of patches [P, values]: the tower's, then earlier layers'."""
        vision: Any = self.vision
        output = vision(pixels.to(vision.dtype), grid_thw=grids.to(pixels.device))
        return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]

    def _no_image(self) -> tuple[torch.Tensor, torch.Tensor]:
        vision: Any = self.vision
        weight = vision.patch_embed.proj.weight
        side = vision.spatial_merge_size
        pixels = torch.zeros(side * side, weight[0].numel(), device=weight.device)
        return pixels, torch.tensor([[1, side, side]])


def _placed(features: torch.Tensor, images: ImageInputs, hidden: torch.Tensor) -> torch.Tensor:
    """Return hidden states [L, 1, H] with the features at the images' tokens."""
    chosen = features.index_select(0, images.features).to(hidden.dtype)
    return hidden.index_copy(0, images.tokens, chosen[:, None])


def _add_features(
    number: int, _layer: Any, _arguments: Any, keywords: dict[str, Any], output: Any
) -> Any:
    """Add the features for a decoder layer to its output: a forward hook."""
    deep = keywords["packed_seq_params"].deep_features
    if not deep:
        return None
    hidden, *more = output
    return (hidden + deep[number], *more)
