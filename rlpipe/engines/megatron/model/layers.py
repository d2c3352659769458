"""The decoder in Megatron's local (not Transformer Engine) layers, with attention, norms and SwiGLU
of our own (`fused`).

`PolicyModel` ends before the logits: its last pipeline stage returns the final hidden states, and
`vocab` turns only those rows that a loss or a score asks for into log-probs, a chunk at a time.
`ValueModel`, a critic, has one output in their place.

Not here: sizes and names (`bridge`), wrapping and optimizers (`model`).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from rlpipe.engines.megatron.model.attention import CoreAttention, PackedLayout
from rlpipe.engines.megatron.model.fused import query_key_value, remade, rms_norm, swiglu
from rlpipe.engines.megatron.model.grouped import GroupedExperts
from rlpipe.errors import ConfigError

PADDING_LOGIT = -1.0e30


class RMSNorm(torch.nn.RMSNorm):
    """torch's, in one operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class Norm:
    """RMSNorm or LayerNorm, marked so that its gradients are summed over sequence parallel
    ranks."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_unused) -> torch.nn.Module:
        assert not config.layernorm_zero_centered_gamma
        kind = {"RMSNorm": RMSNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class FeedForward(MLP):
    """Megatron's MLP, whose SwiGLU is one operation and whose matrix products do not keep what can
    be made again."""

    def __init__(self, config: TransformerConfig) -> None:
        """With what Megatron's own specification of a local layer says."""
        group: Any = parallel_state.get_tensor_model_parallel_group()
        super().__init__(
            config,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=group,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        per_token_scale: torch.Tensor | None = None,
        **keywords: Any,
    ) -> Any:
        if per_token_scale is not None or not _is_swiglu(self.config):
            return super().forward(hidden_states, per_token_scale, **keywords)
        with remade(hidden_states):
            both, bias = self.linear_fc1(hidden_states)
        gated = swiglu(both if bias is None else both + bias)
        with remade(gated):
            return self.linear_fc2(gated)


def _is_swiglu(config: TransformerConfig) -> bool:
    plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
    own = (
        not config.gradient_accumulation_fusion
        and not config.bias_activation_fusion
        and not config.use_te_activation_func
    )
    return (
        plain
        and own
        and config.gated_linear_unit
        and config.activation_func is torch.nn.functional.silu
    )


class Attention(SelfAttention):
    """Megatron's self-attention, whose queries and keys are split off, normalised and turned in one
    operation each.

    Where a model wants anything else of them (latent attention, partial or interleaved rotation, an
    output gate, key heads that tensor parallel ranks share), Megatron's own way is taken.
    """

    _angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *args: Any, **keywords: Any
    ) -> Any:
        rotation = keywords.get("rotary_pos_emb")
        layout = keywords.get("packed_seq_params")
        self._angles = None
        if (
            isinstance(layout, PackedLayout)
            and isinstance(rotation, torch.Tensor)
            and self._can_fuse(rotation)
        ):
            self._angles, keywords["rotary_pos_emb"] = layout.angles(rotation), None
        return super().forward(hidden_states, attention_mask, *args, **keywords)

    def _can_fuse(self, rotation: torch.Tensor) -> bool:
        config = self.config
        size = self.hidden_size_per_attention_head
        plain = not (
            config.rotary_interleaved
            or config.attention_output_gate
            or config.no_rope_freq
            or config.test_mode
        )
        norms = all(
            norm is None or isinstance(norm, RMSNorm | IdentityOp)
            for norm in (self.q_layernorm, self.k_layernorm)
        )
        return (
            plain
            and norms
            and rotation.shape[1:] == (1, 1, size)
            and size & (size - 1) == 0
            and (config.num_query_groups or 0) >= self.world_size
            and _yarn_get_concentration_factor_from_config(config) == 1.0
        )

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, **keywords: Any
    ) -> Any:
        if self._angles is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **keywords)
        with (
            remade(hidden_states) if not self.config.gradient_accumulation_fusion else nullcontext()
        ):
            product: Any = self.linear_qkv
            mixed, _ = product(hidden_states)
        query, key = (
            norm.weight if isinstance(norm, RMSNorm) else None
            for norm in (self.q_layernorm, self.k_layernorm)
        )
        (cosine, sine), self._angles = self._angles, None
        grouped = mixed[:, 0].unflatten(-1, (self.num_query_groups_per_partition, -1))
        parts = query_key_value(grouped, query, key, cosine, sine, self.config.layernorm_epsilon)
        return tuple(part[:, None] for part in parts)


def block_spec(config: TransformerConfig, stage: int | None = None) -> Any:
    """A pipeline stage's layers (a TransformerBlockSubmodules, whose own annotations are narrower
    than its use).

    Megatron's specification of local layers is taken, and some of its parts are replaced. `stage`:
    None is this rank's. Raises: ConfigError if a part to replace is not Megatron's own: a changed
    specification would be ignored.
    """
    plain = copy.copy(config)
    plain.moe_grouped_gemm = False  # of Megatron's own, which needs other packages
    # Looked up when it is called: a hook of the user may have put another function there.
    block: Any = gpt_layer_specs.get_gpt_decoder_block_spec(
        plain, use_transformer_engine=False, normalization=config.normalization, pp_rank=stage
    )
    for layer in distinct_layers(block):
        attention = layer.submodules.self_attention
        mlp = layer.submodules.mlp
        require_own("core_attention", attention.submodules.core_attention, DotProductAttention)
        attention.submodules.core_attention = CoreAttention
        if attention.module is SelfAttention:
            attention.module = Attention
        if getattr(mlp, "module", None) is MLP:
            require_own("mlp.linear_fc1", mlp.submodules.linear_fc1, ColumnParallelLinear)
            require_own("mlp.linear_fc2", mlp.submodules.linear_fc2, RowParallelLinear)
            layer.submodules.mlp = FeedForward
        elif config.moe_grouped_gemm and getattr(mlp, "module", None) is MoELayer:
            require_own("mlp.experts", mlp.submodules.experts.module, SequentialMLP)
            mlp.submodules.experts = _grouped(config, mlp.submodules.experts)
        _use_our_norm(layer.submodules)
        _use_our_norm(attention.submodules)
    require_own("layer_norm", block.layer_norm, WrappedTorchNorm, gpt_layer_specs.LNImpl)
    block.layer_norm = Norm
    return block


def distinct_layers(block: Any) -> list[Any]:
    """The specifications of a block's layers, each once: layers of one kind share theirs."""
    return list({id(layer): layer for layer in block.layer_specs}.values())


def require_own(part: str, found: Any, *own: type) -> None:
    """Raises: ConfigError if a part of the specification of layers is not one of Megatron's own
    classes, which are replaced."""
    found = getattr(found, "module", found)
    if found in own:
        return
    raise ConfigError(
        "this Megatron-LM has other layers, which the trainer would replace by its own",
        where=f"{gpt_layer_specs.get_gpt_decoder_block_spec.__module__}.get_gpt_decoder_block_spec: {part}",
        found=f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', found)}",
        expected=" or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in own),
        do="leave the specification of layers as Megatron-core has it; change the model in rlpipe.engines.megatron.model.layers",
    )


def _grouped(config: TransformerConfig, experts: Any) -> Any:
    assert not config.add_bias_linear and _is_swiglu(config), (
        "bridges.supported accepts no other experts"
    )
    return ModuleSpec(module=GroupedExperts, submodules=experts.submodules)


def _use_our_norm(submodules) -> None:
    for name, value in vars(submodules).items():
        if value is WrappedTorchNorm:
            setattr(submodules, name, Norm)


class PolicyModel(GPTModel):
    """A GPT whose last stage returns hidden states [L, 1, H] (sharded over L if sequence parallel),
    not logits."""

    _vocabulary: int | None = None

    def _postprocess(self, hidden_states, *_args, **_keywords):
        return hidden_states

    def output_rows(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n, H] hidden states of those positions, on every tensor parallel rank, in the weights'
        dtype."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
            return hidden_states[:, 0].index_select(0, rows).to(self._output_shard().dtype)
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        return hidden_states[:, 0].index_select(0, rows).to(self._output_shard().dtype)

    def pad(self, vocabulary: int) -> None:
        """Say how many tokens there are really: the rows of embedding and output layer beyond are
        padding, which is 0."""
        self._vocabulary = vocabulary

    @property
    def first_token(self) -> int:
        """The token of the first row of this rank's shard of the output layer."""
        return self.pg_collection.tp.rank() * len(self._output_shard())

    def output_weight(self) -> torch.Tensor:
        """[≤ V / TP, H] this rank's shard of the output layer (the embedding if they are tied),
        without padding."""
        weight = self._output_shard()
        tokens = self._num_tokens()
        return weight if tokens == len(weight) else weight[:tokens]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, V / TP] float32 of hidden states [n, H]; those of padding are so low that they never
        get probability.

        (Not -inf, with which functions of the user would make NaN of 0 × -inf.)
        """
        found = torch.nn.functional.linear(rows, self._output_shard()).float()
        tokens = self._num_tokens()
        if tokens < found.shape[1]:
            found[:, tokens:] = PADDING_LOGIT
        return found

    def _num_tokens(self) -> int:
        """Rows of this rank's shard that are no padding."""
        rows = len(self._output_shard())
        vocabulary = self.vocab_size if self._vocabulary is None else self._vocabulary
        return min(max(vocabulary - self.first_token, 0), rows)

    def _output_shard(self) -> torch.Tensor:
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        assert weight is not None, "not on the last pipeline stage"
        return weight


class ValueHead(torch.nn.Module):
    """One number per position: w·h + b in float32, whatever the dtype of the model. The same on all
    tensor parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] → [n] float32."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())[
            :, 0
        ]


class ValueModel(PolicyModel):
    """A GPT with a value head, which begins at 0, in place of its output layer."""

    def __init__(self, **keywords: Any) -> None:
        keywords["share_embeddings_and_output_weights"] = False
        super().__init__(**keywords)
        if self.post_process:
            self.output_layer = ValueHead(self.config)

    def values(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[n] float32 at those positions, on every tensor parallel rank.

        All of them compute the same loss, so a sequence parallel rank takes its own part of the
        gradient; nothing is summed.
        """
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=group
            )
        return self.output_layer(hidden_states[:, 0].index_select(0, rows))
