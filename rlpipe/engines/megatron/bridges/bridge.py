"""Megatron's configuration and weights of a Hugging Face directory, by mbridge's interface.

`open_bridge` makes the bridge of a directory (its class: `registry`), `layers_of` and
`model_arguments` the arguments of the model, and `load_weights` fills a model. `stages` yields
weights by Hugging Face name.
mbridge's tables use the names of Transformer Engine's layers. Our layers are Megatron's local ones,
so mbridge gets models through `mbridge_view`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.config.arguments.names import PAD_TO

# isort: split
from mbridge.core import LLMBridge
from mbridge.core.parallel_states import ParallelStates
from mbridge.core.util import unwrap_model

from rlpipe.engines.megatron.bridges import (  # noqa: F401
    deepseek,
    dense,
    experts,
    gpt_oss,
    minimax,
    qwen_next,
    qwen_vision,
)
from rlpipe.engines.megatron.bridges.hf_config import read_config, yarn_fields
from rlpipe.engines.megatron.bridges.registry import bridge_class
from rlpipe.engines.megatron.bridges.weight_files import WeightFiles
from rlpipe.engines.megatron.model.layers import PolicyModel, block_spec
from rlpipe.engines.megatron.model.lora import MARK, merged_parameters
from rlpipe.engines.megatron.model.value_model import ValueModel
from rlpipe.engines.megatron.model.vision import VisionPolicy, refuse_critic
from rlpipe.errors import ConfigError

# Fields of TransformerConfig for our layers. mbridge's defaults need Transformer Engine, apex and
# CUDA. No auxiliary loss: Megatron multiplies it by the number of tokens, and `passes` never
# divides by that number.
LOCAL = {
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_router_load_balancing_type": "none",
    "gradient_accumulation_fusion": False,
    "attention_backend": "auto",
    "transformer_impl": "local",
}


def open_bridge(
    model_dir: str,
    dtype: torch.dtype,
    *,
    sizes: ParallelStates | None = None,
    pad_to: int = 1,
    **transformer: Any,
) -> LLMBridge:
    """Return the bridge for this directory.

    `transformer`: fields of TransformerConfig. `sizes`: the parallel layout; None: that of the open
    process groups. `pad_to`: as `pad_vocabulary`. Raises: ConfigError for a model that the trainer
    does not support.
    """
    hf_config = read_config(model_dir)
    layout = {} if sizes is None else {"parallel_states": sizes}
    bridge = with_own_table(hf_config, dtype, **layout)
    # Latent attention has another configuration class with other fields.
    fields = {field.name for field in dataclasses.fields(bridge.config)}
    bridge.set_extra_args(
        **{name: value for name, value in {**LOCAL, **transformer}.items() if name in fields}
    )
    # Megatron's configuration class has no such fields, and its GPT reads the attributes.
    for name, value in _yarn(bridge).items():
        setattr(bridge.config, name, value)
    pad_vocabulary(bridge, pad_to)
    return bridge


def _yarn(bridge: LLMBridge) -> dict[str, Any]:
    """Return the attributes for YaRN. Latent attention has fields of its own."""
    latent = getattr(bridge.config, "multi_latent_attention", False)
    return {} if latent else yarn_fields(bridge.hf_config)


def pad_vocabulary(bridge: LLMBridge, pad_to: int) -> None:
    """Pad the rows of embedding and output layer to a multiple of `pad_to` × TP.

    The rows of tokens come first, then padding rows of 0. By default TP is the multiple. Padding
    rows stay 0: no token reads them, and log-probs exclude them (`layers.PolicyModel`). Weights by
    Hugging Face name do not have them: mbridge adds them when it reads and removes them when it
    writes. Raises: ConfigError if `pad_to` is below 1.
    """
    if pad_to < 1:
        raise ConfigError(
            "the vocabulary cannot be padded to this multiple",
            where=f"train.megatron.{PAD_TO}",
            found=pad_to,
            expected="1 or more",
        )
    # Megatron-LM's default multiple, 128, would change the shapes, and so the state's digest, of
    # models that need no padding.
    target: Any = bridge
    multiple = pad_to * target.mpu.tp_size
    vocabulary = target.hf_config.vocab_size
    target.vocab_size = vocabulary
    target.padded_vocab_size = -(-vocabulary // multiple) * multiple
    target.make_vocab_size_divisible_by = (
        multiple if target.padded_vocab_size > vocabulary else None
    )


def model_arguments(bridge: LLMBridge) -> dict[str, Any]:
    """Return GPTModel's further arguments, with the padded vocabulary."""
    padded: Any = bridge.padded_vocab_size
    yarn = {"position_embedding_type": "yarn"} if _yarn(bridge) else {}
    vision = {"vision": tower} if (tower := getattr(bridge, "vision", None)) is not None else {}
    return bridge._get_gptmodel_args() | yarn | vision | {"vocab_size": padded}


def model_class(bridge: LLMBridge, kind: type[PolicyModel]) -> type[PolicyModel]:
    """Return the class of this directory's model. `kind`: that of a model of text.

    Raises: ConfigError for a critic that would read images.
    """
    if not hasattr(bridge, "vision"):
        return kind
    if issubclass(kind, ValueModel):
        refuse_critic(bridge)
    return VisionPolicy


def layers_of(bridge: LLMBridge, stage: int | None = None, chunk: int | None = None) -> Any:
    """Return the layer specification of a pipeline stage's chunk for GPTModel.

    `stage`, `chunk` and errors: as `block_spec`.
    """
    block = block_spec(bridge.config, stage, chunk)
    adapted = getattr(bridge, "adapted", None)
    return block if adapted is None else adapted(block)


@torch.no_grad()
def load_weights(bridge: LLMBridge, models: Sequence[torch.nn.Module], model_dir: str) -> None:
    """Load the directory's safetensors into the models, a parameter at a time. Collective.

    Raises: ConfigError if weights are missing.
    """
    views = [mbridge_view(bridge, model) for model in models]
    bridge.load_weights(views, model_dir, memory_efficient=True)
    bridge.safetensor_io = None


def mbridge_view(bridge: LLMBridge, model: torch.nn.Module) -> Any:
    """Return a view of the model with the names of mbridge's tables.

    It has `state_dict`, `named_parameters` and `merged_parameters`, in the model's order, without
    adapters.
    """
    return _MbridgeView(model, bridge)


def with_own_table(hf_config: Any, dtype: torch.dtype, **more: Any) -> LLMBridge:
    """Make the bridge of this model, with its own copy of the class's table of names.

    `more`: further arguments of the bridge.
    """
    # The constructor of a tied model edits the table of its class. Give the edited copy to the
    # instance and restore the class.
    kind = bridge_class(hf_config.model_type)
    owner: Any = next(base for base in kind.__mro__ if "_DIRECT_MAPPING" in vars(base))
    table = owner._DIRECT_MAPPING
    owner._DIRECT_MAPPING = dict(table)
    try:
        bridge: Any = kind(hf_config, dtype, **more)
        bridge._DIRECT_MAPPING = owner._DIRECT_MAPPING
        bridge._get_safetensor_io = WeightFiles
    finally:
        owner._DIRECT_MAPPING = table
    return bridge


class _MbridgeView:
    """The attributes of a model that mbridge reads, with Transformer Engine's names.

    The view has no value head.
    """

    def __init__(self, model: torch.nn.Module, bridge: LLMBridge) -> None:
        self._model: Any = unwrap_model(model)
        self._critic = isinstance(self._model, ValueModel)
        self.is_tied = self._model.share_embeddings_and_output_weights
        self._latent = bool(getattr(bridge.config, "multi_latent_attention", False))
        self.decoder = self._model.decoder
        self._layers_with_experts: set[int | None] = {
            i for i, layer in enumerate(self.decoder.layers) if hasattr(layer.mlp, "router")
        }
        if getattr(self._model, "mtp", None) is not None:
            last = self._model.mtp.layers[-1].transformer_layer
            self._layers_with_experts |= {None} if hasattr(last.mlp, "router") else set()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            self._name(name): value
            for name, value in self._model.state_dict().items()
            if self._is_known(name)
        }

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return (
            (self._name(name), parameter)
            for name, parameter in self._model.named_parameters()
            if self._is_known(name)
        )

    def merged_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `named_parameters` with adapters merged into their layers."""
        return (
            (self._name(name), tensor)
            for name, tensor in merged_parameters(self._model)
            if self._is_known(name)
        )

    def _is_known(self, name: str) -> bool:
        return not (self._critic and name.startswith("output_layer.")) and MARK not in name

    def _name(self, name: str) -> str:
        head, found, rest = name.partition("decoder.layers.")
        if found:
            number, _, leaf = rest.partition(".")
            return f"{head}{found}{number}.{self._leaf(leaf, int(number))}"
        head, found, leaf = name.partition(".transformer_layer.")
        return f"{head}{found}{self._leaf(leaf, None)}" if found else name

    def _leaf(self, leaf: str, number: int | None) -> str:
        """Return the name within a layer. None: a layer for multi-token prediction."""
        if leaf.startswith("input_layernorm.") and not self._latent:
            return leaf.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if leaf.startswith("pre_mlp_layernorm.") and number not in self._layers_with_experts:
            return leaf.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        if self._latent and ".q_layernorm." in leaf:
            return leaf.replace(".q_layernorm.", ".linear_q_up_proj.layer_norm_")
        if self._latent and ".kv_layernorm." in leaf:
            return leaf.replace(".kv_layernorm.", ".linear_kv_up_proj.layer_norm_")
        if ".experts.local_experts." in leaf:
            before, _, after = leaf.partition(".local_experts.")
            expert, _, after = after.partition(".")
            return f"{before}.{after}{expert}"
        return leaf
