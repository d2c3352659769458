"""`GatedDeltaNet`: linear attention of Qwen3-Next and Qwen3.5 over packed segments.

Megatron-core's module of the same name refuses packed sequences and needs packages for CUDA. This
one computes each segment from a state of 0, with Megatron's own chunked formula in torch. For each
value head, with q, k of its key head, normalised to length 1:

    S_t = exp(g_t) S_{t-1} + k_t β_t (v_t - exp(g_t) S_{t-1}ᵀ k_t)ᵀ,    o_t = S_tᵀ q_t / sqrt(K)
    β = sigmoid(b),    g = -exp(A_log) · softplus(a + dt_bias)
    out = out_proj(norm(o) · silu(z))

q, k and v pass a causal convolution of each channel, and SiLU, first.

A_log stays float32 in a model of 16 bit. exp(A_log) is the rate of decay over all earlier tokens,
and bfloat16 would change it by up to 0.8 %. SGLang 0.5.21 holds it in float32 (`models/qwen3_next`,
`models/qwen3_5`; sgl-project/sglang#19961), as Qwen3.5's files do (NVIDIA/Megatron-LM#3634).
Megatron-core 0.16 and slime round it. Every other parameter has the model's dtype in SGLang and
here: dt_bias, and the norm, which Qwen3.5's files have in float32. transformers computes the decay
in float32 of the dtype that it loads.

Legend: L local packed tokens, G key heads of a rank, R value heads of a key head, K and V sizes of
a key and a value head, n segments of a block, l tokens of its longest segment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import conv1d, pad, rms_norm, silu, softplus

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from rlpipe.engines.megatron.model.attention import PackedLayout
from rlpipe.engines.megatron.model.layers import Attention

SPLIT_BY_HEADS = ("conv_weight", "A_log", "dt_bias")
"""Parameters that tensor parallel ranks split along their first dimension."""


class GatedDeltaNet(MegatronModule):
    """Linear attention with the gated delta rule: [L, 1, H] → [L, 1, H].

    Rows of `in_proj_qkvz`, `in_proj_ba` and `conv_weight` are grouped by key head, so that a
    contiguous part of them belongs to a tensor parallel rank: q, k, v, z; b, a; q, k, v.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self._group: Any = parallel_state.get_tensor_model_parallel_group()
        self._key_size: int = config.linear_key_head_dim or 0
        self._value_size: int = config.linear_value_head_dim or 0
        key_heads: int = config.linear_num_key_heads or 0
        value_heads: int = config.linear_num_value_heads or 0
        ranks = self._group.size()
        self._key_heads = key_heads // ranks
        self._values_per_key = value_heads // key_heads
        per_key = 2 * self._key_size + 2 * self._values_per_key * self._value_size
        self.in_proj_qkvz = self._column_parallel(key_heads * per_key)
        self.in_proj_ba = self._column_parallel(2 * value_heads)
        channels = per_key - self._values_per_key * self._value_size
        self.conv_weight = self._split(
            self._key_heads * channels, 1, config.linear_conv_kernel_dim or 0
        )
        self.A_log = self._split(value_heads // ranks, dtype=torch.float32)
        self.dt_bias = self._split(value_heads // ranks)
        self.norm_weight = torch.nn.Parameter(
            torch.empty(self._value_size, dtype=config.params_dtype)
        )
        self.out_proj: Any = RowParallelLinear(
            value_heads * self._value_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method or torch.nn.init.zeros_,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self._group,
        )

    def _column_parallel(self, rows: int) -> Any:
        return ColumnParallelLinear(
            self.config.hidden_size,
            rows,
            config=self.config,
            init_method=self.config.init_method or torch.nn.init.zeros_,
            bias=False,
            gather_output=False,
            tp_group=self._group,
        )

    def _split(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        parameter: Any = torch.nn.Parameter(
            torch.empty(shape, dtype=dtype or self.config.params_dtype)
        )
        parameter.tensor_model_parallel = True
        parameter.partition_dim = 0
        parameter.partition_stride = 1
        return parameter

    def _apply(self, fn: Any, recurse: bool = True) -> GatedDeltaNet:
        """Apply a function such as `bfloat16()` of Megatron's Float16Module, but not to A_log."""
        exact = self.A_log.data
        super()._apply(fn, recurse)
        if self.A_log.dtype != torch.float32:
            self.A_log.data = exact.to(self.A_log.device)
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        *,
        packed_seq_params: Any = None,
        **_unused: Any,
    ) -> Any:
        """Return the output, and None for Megatron's bias."""
        layout = packed_seq_params
        assert isinstance(layout, PackedLayout) and layout.cp_size == 1
        assert attention_mask is None
        mixed = self.in_proj_qkvz(hidden_states)[0][:, 0].unflatten(-1, (self._key_heads, -1))
        rates = self.in_proj_ba(hidden_states)[0][:, 0].unflatten(-1, (self._key_heads, -1))
        width = self._values_per_key * self._value_size
        convolved, gate = mixed.split((mixed.shape[-1] - width, width), -1)
        beta, decay = self._rates(rates)
        parts = []
        for block in layout.blocks:
            rows = block.queries.flatten()
            shape = block.queries.shape
            parts.append(
                self._attend(
                    convolved.index_select(0, rows).unflatten(0, shape),
                    beta.index_select(0, rows).unflatten(0, shape),
                    decay.index_select(0, rows).unflatten(0, shape),
                ).flatten(0, 1)
            )
        out = torch.cat(parts).index_select(0, layout.order)
        gated = self._gated_norm(out, gate.reshape(out.shape))
        return self.out_proj(gated.flatten(1)[:, None])

    def _rates(self, rates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return β and g [L, value heads] of b and a [L, G, 2 R]."""
        b, a = rates.chunk(2, -1)
        decay = -self.A_log.exp() * softplus(a.flatten(1).float() + self.dt_bias)
        return b.flatten(1).sigmoid(), decay

    def _attend(
        self, convolved: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
    ) -> torch.Tensor:
        """Return o [n, l, value heads, V] of a block.

        Shapes: convolved [n, l, G, 2 K + R V]; beta, decay [n, l, value heads].
        """
        grouped = convolved.shape[2:]
        channels = convolved.flatten(2).transpose(1, 2)
        # Padding on the left makes the convolution causal. Padding of a block is on the right.
        left = self.conv_weight.shape[-1] - 1
        channels = silu(
            conv1d(pad(channels, (left, 0)), self.conv_weight, groups=channels.shape[1])
        )
        mixed = channels.transpose(1, 2).unflatten(2, grouped)
        query, key, value = mixed.split(
            (self._key_size, self._key_size, self._values_per_key * self._value_size), -1
        )
        repeats = self._values_per_key
        return torch_chunk_gated_delta_rule(
            _unit(query).repeat_interleave(repeats, 2),
            _unit(key).repeat_interleave(repeats, 2),
            value.unflatten(-1, (repeats, self._value_size)).flatten(2, 3),
            g=decay,
            beta=beta,
        )[0].to(value.dtype)

    def _gated_norm(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        # Ranks have different heads and the same weight, so its gradient is summed over ranks.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self._group)
        normed = rms_norm(out.float(), weight.shape, None, self.config.layernorm_epsilon)
        return (weight * normed.to(out.dtype) * silu(gate.float())).to(out.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict | None = None,
        tp_group: Any = None,
    ) -> Any:
        """Return the parameters for a checkpoint, as split over tensor parallel ranks."""
        own = {name: getattr(self, name) for name in (*SPLIT_BY_HEADS, "norm_weight")}
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(SPLIT_BY_HEADS, 0),
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._group
            )
        return state


def _unit(heads: torch.Tensor) -> torch.Tensor:
    """Return vectors of length 1 in float32, as x / sqrt(Σx² + 1e-6)."""
    values = heads.float()
    return values * torch.rsqrt(values.square().sum(-1, keepdim=True) + 1e-6)


class MixedAttention:
    """`GatedDeltaNet` or `Attention`, by the layer's number."""

    def __new__(
        cls, config: TransformerConfig, *args: Any, layer_number: int, **keywords: Any
    ) -> Any:
        kinds = config.linear_attention_freq
        assert isinstance(kinds, list)
        # Layers for multi-token prediction come after the model's and have full attention.
        if layer_number <= len(kinds) and kinds[layer_number - 1]:
            return GatedDeltaNet(config)
        return Attention(config, *args, layer_number=layer_number, **keywords)
