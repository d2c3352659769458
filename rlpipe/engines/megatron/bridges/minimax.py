"""MiniMax-M2: partial rotation, norms over the features of all heads, sigmoid router with biases.

mbridge has no MiniMax. The weights have Mixtral's names. transformers does not read the file's
`rotary_dim` but `partial_rotary_factor`; `hf_config` computes the second from the first.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.models.mixtral import MixtralBridge
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from rlpipe.engines.megatron.bridges.registry import own_family
from rlpipe.engines.megatron.model.layers import Attention, distinct_layers, require_own
from rlpipe.errors import ConfigError

_LAYER = "model.layers.{layer_number}"


class HeadsNorm(torch.nn.Module):
    """RMSNorm over the features of all heads.

    y = x / sqrt(mean(x²) + eps) · weight,  mean over the heads of all tensor parallel ranks.

    Each rank holds the weight of its own heads.
    """

    def __init__(self, config: TransformerConfig, heads: int, head_size: int) -> None:
        """Make the norm of this rank's `heads`."""
        super().__init__()
        self._eps = config.layernorm_epsilon
        self._group: Any = parallel_state.get_tensor_model_parallel_group()
        self.weight: Any = torch.nn.Parameter(
            torch.ones(heads * head_size, dtype=config.params_dtype)
        )
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = 0
        self.weight.partition_stride = 1

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalise [L, 1, heads, head size]."""
        rows = heads.flatten(2).float()
        squares = rows.square().sum(-1, keepdim=True)
        # Every rank uses the sum for its own heads, so the gradients of the sum are summed too.
        total = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(squares, group=self._group), group=self._group
        )
        size = rows.shape[-1] * self._group.size()
        normed = (rows * torch.rsqrt(total / size + self._eps)).to(heads.dtype)
        return (normed * self.weight).view_as(heads)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> Any:
        """Return the weight for a checkpoint, as split over tensor parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class NormOfAllHeadsAttention(Attention):
    """Self-attention with `HeadsNorm` of queries and keys."""

    def __init__(self, config: TransformerConfig, *args: Any, **keywords: Any) -> None:
        super().__init__(config, *args, **keywords)
        size = self.hidden_size_per_attention_head
        self.q_norm = HeadsNorm(config, self.num_attention_heads_per_partition, size)
        self.k_norm = HeadsNorm(config, self.num_query_groups_per_partition, size)

    def _can_fuse(self, rotation: torch.Tensor) -> bool:
        return False

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, **keywords: Any
    ) -> Any:
        """Return queries, keys and values of this rank's heads: [L, 1, heads, head size] each."""
        query, key, value = super().get_query_key_value_tensors(hidden_states, *args, **keywords)
        return self.q_norm(query), self.k_norm(key), value


@own_family("minimax_m2")
class MiniMaxM2(MixtralBridge):
    """MiniMax-M2, M2.1, M2.5."""

    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]] = {
        **MixtralBridge._ATTENTION_MAPPING,
        "self_attention.q_norm.weight": [f"{_LAYER}.self_attn.q_norm.weight"],
        "self_attention.k_norm.weight": [f"{_LAYER}.self_attn.k_norm.weight"],
    }
    _MLP_MAPPING: ClassVar[dict[str, list[str]]] = {
        **MixtralBridge._MLP_MAPPING,
        "mlp.router.expert_bias": [f"{_LAYER}.block_sparse_moe.e_score_correction_bias"],
    }

    def _build_base_config(self, *args: Any, **fields: Any) -> Any:
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": True,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_dtype": "fp32",
        }
        return super()._build_base_config(*args, **fields)

    def _get_gptmodel_args(self) -> dict[str, Any]:
        hf_config: Any = self.hf_config
        return {**super()._get_gptmodel_args(), "rotary_percent": hf_config.partial_rotary_factor}

    def adapted(self, block: Any) -> Any:
        """Replace the attention of `layers.block_spec` by `NormOfAllHeadsAttention`.

        Raises: ConfigError if tensor parallel ranks would share key heads.
        """
        config = self.config
        groups = config.num_query_groups or config.num_attention_heads
        if groups < config.tensor_model_parallel_size:
            raise ConfigError(
                "tensor parallel ranks would share key heads, and this model's norm is over all "
                "key heads",
                where="train.parallel.tensor_model_parallel_size",
                found=config.tensor_model_parallel_size,
                expected=f"at most the {groups} key heads",
            )
        for layer in distinct_layers(block):
            require_own("self_attention", layer.submodules.self_attention.module, Attention)
            layer.submodules.self_attention.module = NormOfAllHeadsAttention
        return block
