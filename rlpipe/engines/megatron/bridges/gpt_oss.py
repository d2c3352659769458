"""gpt-oss: attention with sinks and windows, experts and router with biases.

mbridge has no gpt-oss. Every second layer attends to a window. Each head has a sink: a logit of the
softmax without a value. Experts compute, with gate and up clamped to ±7,

    down(quick_gelu(gate) · (up + 1)),    quick_gelu(x) = x · sigmoid(1.702 x)

The file stacks the experts of a layer in one tensor: `experts.gate_up_proj` [E, H, 2 I], where
columns of gate and up alternate. `weight_files` reads an expert of it by the name
`gate_up_proj[3]`, and `stages` stacks such names. Files in MXFP4 are read too.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge
from megatron.core.activations import quick_gelu
from megatron.core.transformer.moe.experts import SequentialMLP

from rlpipe.engines.megatron.bridges.registry import own_family
from rlpipe.engines.megatron.model.layers import distinct_layers, require_own
from rlpipe.errors import ConfigError

_LAYER = "model.layers.{layer_number}"
_EXPERTS = f"{_LAYER}.mlp.experts"


class BiasedExperts(SequentialMLP):
    """Experts with biases, one after another.

    Megatron's experts add the bias in place to the result of a custom function, which torch refuses
    in training. Megatron also marks the bias of the second matrix as one of a sequence parallel
    layer, equal on all tensor parallel ranks. But each of these ranks has other experts: the sum
    over ranks would mix gradients, and the norm of the gradient would count one rank's biases.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        experts: Any = self.local_experts
        for expert in experts:
            bias = expert.linear_fc2.bias
            bias.sequence_parallel = False
            bias.tensor_model_parallel = True
            bias.partition_dim = 0
            bias.partition_stride = 1

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Compute the experts: [T, H] → [T, H], sorted by expert; None for Megatron's bias."""
        sizes = tokens_per_expert.tolist()
        parts = zip(
            self.local_experts,
            permuted_local_hidden_states.split(sizes),
            permuted_probs.split(sizes),
            strict=True,
        )
        return torch.cat([self._one(*part) for part in parts]), None

    def _one(self, expert: Any, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        both, bias = expert.linear_fc1(tokens)
        gate, up = (both + bias).chunk(2, -1)
        limit: Any = self.config.activation_func_clamp_value
        gated = self.config.activation_func(gate.clamp(max=limit)) * (
            up.clamp(-limit, limit) + self.config.glu_linear_offset
        )
        out, bias = expert.linear_fc2(gated)
        return ((out + bias) * weights[:, None]).to(tokens.dtype)


@own_family("gpt_oss")
class GptOss(LLMBridge):
    """gpt-oss-20b, gpt-oss-120b."""

    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
        **LLMBridge._ATTENTION_MAPPING,
        "self_attention.linear_proj.bias": [f"{_LAYER}.self_attn.o_proj.bias"],
        "self_attention.core_attention.softmax_offset": [f"{_LAYER}.self_attn.sinks"],
    }
    _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
        "pre_mlp_layernorm": [f"{_LAYER}.post_attention_layernorm.weight"],
        "mlp.router.weight": [f"{_LAYER}.mlp.router.weight"],
        "mlp.router.bias": [f"{_LAYER}.mlp.router.bias"],
        "mlp.experts.linear_fc1.weight": [f"{_EXPERTS}.gate_up_proj"],
        "mlp.experts.linear_fc1.bias": [f"{_EXPERTS}.gate_up_proj_bias"],
        "mlp.experts.linear_fc2.weight": [f"{_EXPERTS}.down_proj"],
        "mlp.experts.linear_fc2.bias": [f"{_EXPERTS}.down_proj_bias"],
    }

    def _build_config(self) -> Any:
        hf_config: Any = self.hf_config
        if self.mpu.etp_size > 1:
            raise ConfigError(
                "each tensor parallel rank of an expert would add the expert's whole bias",
                where="train.parallel.expert_tensor_parallel_size",
                found=self.mpu.etp_size,
                expected=1,
                do="split experts with train.parallel.expert_model_parallel_size",
            )
        if self.extra_args.get("moe_grouped_gemm"):
            raise ConfigError(
                "grouped matrix products have no biases, and this model's experts have some",
                where="train.megatron.moe_grouped_gemm",
                found=True,
                expected=False,
                do="remove the key",
            )
        return self._build_base_config(
            activation_func=quick_gelu,
            activation_func_clamp_value=7.0,
            glu_linear_offset=1.0,
            add_bias_linear=True,
            add_qkv_bias=True,
            softmax_type="learnable",
            # Megatron counts the tokens before the query, transformers also the query.
            window_size=(hf_config.sliding_window - 1, 0),
            window_attn_skip_freq=[
                int(kind == "sliding_attention") for kind in hf_config.layer_types
            ],
            num_moe_experts=hf_config.num_local_experts,
            moe_router_topk=hf_config.num_experts_per_tok,
            moe_router_pre_softmax=False,
            moe_router_score_function="softmax",
            moe_router_bias_update_rate=0.0,
            moe_ffn_hidden_size=hf_config.intermediate_size,
        )

    @staticmethod
    def adapted(block: Any) -> Any:
        """Replace the experts of `layers.block_spec` by `BiasedExperts`."""
        for layer in distinct_layers(block):
            experts = layer.submodules.mlp.submodules.experts
            require_own("mlp.experts", experts.module, SequentialMLP)
            experts.module = BiasedExperts
        return block

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        # mbridge's own method finds the number of an expert in names of weights alone.
        ranks = self.mpu.ep_size
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
        if ranks == 1 or not consider_ep:
            return names
        first = (self.config.num_moe_experts or 0) // ranks * self.mpu.ep_rank
        return {local: _shifted(name, first) for local, name in names.items()}

    def _weight_name_mapping_mlp(self, name: str) -> list[str]:
        leaf, number = split_expert(name)
        (stacked,) = super()._weight_name_mapping_mlp(leaf)
        return [stacked if number is None else f"{stacked}[{number}]"]

    def _weight_merge_across_tp(
        self,
        mcore_weights_name: str,
        mcore_weights: list[torch.Tensor],
        param: torch.Tensor,
    ) -> torch.Tensor:
        if len(mcore_weights) == 1:
            return mcore_weights[0]
        return super()._weight_merge_across_tp(mcore_weights_name, mcore_weights, param)

    def _weight_to_mcore_format(
        self, mcore_weights_name: str, hf_weights: list[torch.Tensor]
    ) -> torch.Tensor:
        weight = super()._weight_to_mcore_format(mcore_weights_name, hf_weights)
        if ".mlp.experts." not in mcore_weights_name:
            return weight
        if ".linear_fc1." in mcore_weights_name:
            weight = torch.cat([weight[..., ::2], weight[..., 1::2]], -1)
        return weight.mT if weight.ndim == 2 else weight

    def _weight_to_hf_format(
        self, mcore_weights_name: str, mcore_weights: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]:
        names, weights = super()._weight_to_hf_format(mcore_weights_name, mcore_weights)
        if ".mlp.experts." not in mcore_weights_name:
            return names, weights
        weight = mcore_weights.mT if mcore_weights.ndim == 2 else mcore_weights
        if ".linear_fc1." in mcore_weights_name:
            weight = torch.stack(weight.chunk(2, -1), -1).flatten(-2)
        return names, [weight]


def split_expert(name: str) -> tuple[str, int | None]:
    """Return a name of Megatron's without the number of the expert at its end, and the number."""
    if ".mlp.experts." not in name:
        return name, None
    leaf = name.rstrip("0123456789")
    return leaf, int(name[len(leaf) :])


def _shifted(name: str, first: int) -> str:
    leaf, number = split_expert(name)
    return name if number is None else f"{leaf}{first + number}"
