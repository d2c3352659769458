"""From a Hugging Face directory to Megatron's configuration and weights and back, by mbridge.

mbridge's tables are written in the names of Transformer Engine layers; ours are the local ones, so
models are shown to it through `_Renamed`. What else differs from what it expects is mended here (a
class-wide table that a tied model edits) and in `bridges`, a file for each family and for what is
read of a directory.

Not here: building the model (`model`), its weights by Hugging Face name (`stages`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.config.arguments.names import PAD_TO

# isort: split
import mbridge
from mbridge.core import LLMBridge
from mbridge.core.bridge import _MODEL_REGISTRY as BRIDGES
from mbridge.core.parallel_states import ParallelStates
from mbridge.core.util import unwrap_model

from rlpipe.engines.megatron.bridges import experts, llama  # noqa: F401
from rlpipe.engines.megatron.bridges.deepseek import DeepseekV3
from rlpipe.engines.megatron.bridges.files import WeightFiles
from rlpipe.engines.megatron.bridges.glm4 import Glm4
from rlpipe.engines.megatron.bridges.hf_config import read_config
from rlpipe.engines.megatron.model.layers import ValueModel, block_spec
from rlpipe.errors import ConfigError

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
}
"""What the layers of `layers.py` need (mbridge's defaults ask for Transformer Engine, apex and
CUDA), and no auxiliary loss: Megatron multiplies that one by the number of tokens, which `passes`
never divides by."""


def open_bridge(
    model_dir: str,
    dtype: torch.dtype,
    *,
    sizes: ParallelStates | None = None,
    pad_to: int = 1,
    **transformer: Any,
) -> LLMBridge:
    """mbridge's bridge for this directory. `transformer`: fields of TransformerConfig. `sizes`: the
    parallel layout; None: that of the process groups, which must exist already. `pad_to`: as
    `pad_vocabulary`.

    Raises: ConfigError for a model that the trainer does not compute.
    """
    hf_config = read_config(model_dir)
    more = {} if sizes is None else {"parallel_states": sizes}
    bridge = with_own_table(BRIDGES[hf_config.model_type], hf_config, dtype, **more)
    known = {f.name for f in dataclasses.fields(bridge.config)}
    bridge.set_extra_args(
        **{name: value for name, value in {**LOCAL, **transformer}.items() if name in known}
    )
    pad_vocabulary(bridge, pad_to)
    return bridge


def pad_vocabulary(bridge: LLMBridge, pad_to: int) -> None:
    """Let embedding and output layer have a multiple of `pad_to` × TP rows: those of tokens, then
    padding, which is 0.

    By default as few as tensor parallelism needs, and none where TP divides the vocabulary.
    (Megatron-LM's default is 128; that would change the shapes, and so the state's digest, of
    models that need no padding.) Padding rows stay 0: no token is looked up there, and log-probs
    leave them out (`layers.PolicyModel`). Weights by Hugging Face name never have them: mbridge
    adds them when it reads, and cuts them off when it writes. Raises: ConfigError if `pad_to` is
    not 1 or more.
    """
    if pad_to < 1:
        raise ConfigError(
            "the vocabulary cannot be padded to this",
            where=f"train.megatron.{PAD_TO}",
            found=pad_to,
            expected="1 or more",
        )
    known: Any = bridge
    unit = pad_to * known.mpu.tp_size
    vocabulary = known.hf_config.vocab_size
    known.vocab_size = vocabulary
    known.padded_vocab_size = -(-vocabulary // unit) * unit
    known.make_vocab_size_divisible_by = unit if known.padded_vocab_size > vocabulary else None


def model_arguments(bridge: LLMBridge) -> dict[str, Any]:
    """What GPTModel takes beside Megatron's configuration and its layers, with the size of the
    padded vocabulary."""
    padded: Any = bridge.padded_vocab_size
    return bridge._get_gptmodel_args() | {"vocab_size": padded}


def layers_of(bridge: LLMBridge, stage: int | None = None) -> Any:
    """The layers of a pipeline stage, as GPTModel takes them. `stage`, and what it raises: as
    `block_spec`."""
    block = block_spec(bridge.config, stage)
    return bridge.adapted(block) if isinstance(bridge, Glm4 | DeepseekV3) else block


@torch.no_grad()
def load_weights(bridge: LLMBridge, models: Sequence[torch.nn.Module], model_dir: str) -> None:
    """Fill the models from the directory's safetensors, a parameter at a time. Collective.

    Raises: ConfigError if weights are missing.
    """
    shown: Any = [_Renamed(model, bridge) for model in models]
    bridge.load_weights(shown, model_dir, memory_efficient=True)
    bridge.safetensor_io = None


def shown(bridge: LLMBridge, model: torch.nn.Module) -> Any:
    """The model as mbridge is shown it: `state_dict` and `named_parameters`, in their order, by the
    names of its tables."""
    return _Renamed(model, bridge)


def with_own_table(
    kind: type[LLMBridge], hf_config: Any, dtype: torch.dtype, **more: Any
) -> LLMBridge:
    """mbridge's bridge of this kind (`more`: its further arguments).

    A tied model edits its class's mapping when a bridge is made; the edit is given to the instance,
    and undone.
    """
    owner: Any = next(base for base in kind.__mro__ if "_DIRECT_MAPPING" in vars(base))
    table = owner._DIRECT_MAPPING
    owner._DIRECT_MAPPING = dict(table)
    try:
        bridge: Any = mbridge.AutoBridge.from_config(hf_config, dtype=dtype, **more)
        bridge._DIRECT_MAPPING = owner._DIRECT_MAPPING
        bridge._get_safetensor_io = WeightFiles
    finally:
        owner._DIRECT_MAPPING = table
    return bridge


class _Renamed:
    """What mbridge asks of a model (decoder, state_dict, named_parameters), in Transformer Engine's
    names; no value head."""

    def __init__(self, model: torch.nn.Module, bridge: LLMBridge) -> None:
        self._model: Any = unwrap_model(model)
        self._critic = isinstance(self._model, ValueModel)
        self.is_tied = self._model.share_embeddings_and_output_weights
        self._latent = bool(getattr(bridge.config, "multi_latent_attention", False))
        self.decoder = self._model.decoder
        self._routed = {
            i for i, layer in enumerate(self.decoder.layers) if hasattr(layer.mlp, "router")
        }

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

    def _is_known(self, name: str) -> bool:
        return not (self._critic and name.startswith("output_layer."))

    def _name(self, name: str) -> str:
        head, found, rest = name.partition("decoder.layers.")
        if not found:
            return name
        number, _, leaf = rest.partition(".")
        return f"{head}{found}{number}.{self._leaf(leaf, int(number))}"

    def _leaf(self, leaf: str, number: int) -> str:
        if leaf.startswith("input_layernorm.") and not self._latent:
            return leaf.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if leaf.startswith("pre_mlp_layernorm.") and number not in self._routed:
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
