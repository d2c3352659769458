"""The decoder of policy and critic, in Megatron's local layers or in Transformer Engine's.

`block_spec` chooses the layers. Of local layers it replaces attention, norms, SwiGLU and grouped
experts by the classes of this module (kernels: `fused`), of Transformer Engine's attention and
separate norms.

`PolicyModel` ends before the logits: its last pipeline stage returns the final hidden states. Only
the rows that a loss or a score reads become log-probs, a chunk at a time (`vocab`).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cached_property
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
from rlpipe.engines.megatron.model.fused import (
    query_key_value,
    recomputed_for_backward,
    rms_norm,
    swiglu,
)
from rlpipe.errors import ConfigError

TRANSFORMER_ENGINE = "transformer_engine"
"""Value of `transformer_impl`."""
# Low enough that padding never gets probability. Not -inf: user functions would make NaN of
# 0 × -inf.
PADDING_LOGIT = -1.0e30
# The function was private in older versions of torch.
grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm")  # noqa: B009


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm in one fused operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """RMSNorm with the factor 1 + weight, in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight.float()
        return torch.nn.functional.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)


class Norm:
    """RMSNorm or LayerNorm, marked so that gradients are summed over sequence parallel ranks."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_unused) -> torch.nn.Module:
        kind: Any = {"RMSNorm": RMSNorm, "LayerNorm": torch.nn.LayerNorm}[config.normalization]
        if config.layernorm_zero_centered_gamma:
            assert kind is RMSNorm
            kind = ZeroCentredRMSNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class FeedForward(MLP):
    """Megatron's MLP with a fused SwiGLU. Inputs of its matrix products are recomputed."""

    def __init__(self, config: TransformerConfig) -> None:
        # The arguments of Megatron's own specification of a local layer.
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
        with recomputed_for_backward(hidden_states):
            both, bias = self.linear_fc1(hidden_states)
        gated = swiglu(both if bias is None else both + bias)
        with recomputed_for_backward(gated):
            return self.linear_fc2(gated)


def _is_swiglu(config: TransformerConfig) -> bool:
    plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
    unfused = (
        not config.gradient_accumulation_fusion
        and not config.bias_activation_fusion
        and not config.use_te_activation_func
    )
    return (
        plain
        and unfused
        and config.gated_linear_unit
        and config.activation_func is torch.nn.functional.silu
    )


class Attention(SelfAttention):
    """Megatron's self-attention with fused split, normalisation and rotation of queries and keys.

    Models with latent attention, partial or interleaved rotation, an output gate, or key heads that
    tensor parallel ranks share use Megatron's own operations.
    """

    _angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *args: Any, **keywords: Any
    ) -> Any:
        rotation = keywords.get("rotary_pos_emb")
        layout = keywords.get("packed_seq_params")
        angles = None
        if (
            isinstance(layout, PackedLayout)
            and isinstance(rotation, torch.Tensor)
            and self._can_fuse(rotation)
        ):
            angles = layout.angles(rotation)
            # Megatron rotates unless this is None; `get_query_key_value_tensors` rotates instead.
            keywords["rotary_pos_emb"] = None
        # A module's own `__setattr__` is slow, and every layer is here in every micro-batch.
        object.__setattr__(self, "_angles", angles)
        return super().forward(hidden_states, attention_mask, *args, **keywords)

    def _can_fuse(self, rotation: torch.Tensor) -> bool:
        # The whole head is rotated, by one set of angles.
        return self._has_plain_heads and rotation.shape[1:] == (
            1,
            1,
            self.hidden_size_per_attention_head,
        )

    @cached_property
    def _has_plain_heads(self) -> bool:
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
            # Triton's ranges are powers of two.
            and size & (size - 1) == 0
            # No key head is shared by several tensor parallel ranks.
            and (config.num_query_groups or 0) >= self.world_size
            # YaRN's factor would scale cosine and sine.
            and _yarn_get_concentration_factor_from_config(config) == 1.0
        )

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, **keywords: Any
    ) -> Any:
        if self._angles is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **keywords)
        with (
            recomputed_for_backward(hidden_states)
            if not self.config.gradient_accumulation_fusion
            else nullcontext()
        ):
            product: Any = self.linear_qkv
            mixed, _ = product(hidden_states)
        query, key = (
            norm.weight if isinstance(norm, RMSNorm) else None
            for norm in (self.q_layernorm, self.k_layernorm)
        )
        cosine, sine = self._angles
        object.__setattr__(self, "_angles", None)
        grouped = mixed[:, 0].unflatten(-1, (self.num_query_groups_per_partition, -1))
        parts = query_key_value(grouped, query, key, cosine, sine, self.config.layernorm_epsilon)
        return tuple(part[:, None] for part in parts)


class GroupedExperts(SequentialMLP):
    """SwiGLU experts by grouped matrix products (`train.megatron.moe_grouped_gemm`).

    Without Transformer Engine, Megatron computes one expert after another. With 128 small experts,
    a GPU mostly waits for kernel launches. Here a layer has two grouped products forward and four
    backward, by `torch.nn.functional.grouped_mm` (on CUDA: CUTLASS kernels for bfloat16, whose
    sizes must be multiples of 8). Each expert keeps its own parameters, so names, checkpoints,
    exports and gradients are equal to Megatron's. One layer's expert weights are copied next to
    each other during its forward and its backward pass: extra memory of one layer. With tensor
    parallelism the dispatcher sums the results of the shards.
    """

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> Any:
        """Return the output [T, H] and no bias.

        Shapes: hidden states [T, H], sorted by expert; tokens_per_expert [experts]; weights of the
        outputs [T].
        """
        tokens = permuted_local_hidden_states
        if not len(tokens) or self.config.moe_apply_probs_on_input:
            return super().forward(tokens, tokens_per_expert, permuted_probs)
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        experts: Any = self.local_experts
        hidden = swiglu(
            grouped_linear(tokens, ends, [expert.linear_fc1.weight for expert in experts])
        )
        weighted = (hidden * permuted_probs.unsqueeze(-1)).to(hidden.dtype)
        output = grouped_linear(weighted, ends, [expert.linear_fc2.weight for expert in experts])
        return output, None


def grouped_linear(
    tokens: torch.Tensor, ends: torch.Tensor, weights: list[torch.Tensor]
) -> torch.Tensor:
    """Multiply each group of tokens by the group's own weight.

    Shapes: tokens [T, K], sorted by group; ends [groups] int32, the end of each group; weights
    [N, K] each; returns [T, N].
    """
    result: Any = _GroupedLinear.apply(tokens, ends, *weights)
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, ends, *weights):
        ctx.save_for_backward(tokens, ends, *weights)
        return grouped_mm(tokens, torch.stack(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx, *grads):
        tokens, ends, *weights = ctx.saved_tensors
        incoming = grads[0].contiguous()
        to_tokens = (
            grouped_mm(incoming, torch.stack(weights), offs=ends)
            if ctx.needs_input_grad[0]
            else None
        )
        to_weights = grouped_mm(incoming.mT, tokens, offs=ends)
        return to_tokens, None, *to_weights.unbind()


def block_spec(
    config: TransformerConfig, stage: int | None = None, chunk: int | None = None
) -> Any:
    """Return the specification of a chunk's layers (a TransformerBlockSubmodules).

    It is Megatron's specification of local layers, or of Transformer Engine's layers
    (`transformer_impl`), with some parts replaced. `stage`: the pipeline stage, None is this
    rank's. `chunk`: its number with virtual pipelining, else None. Raises: ConfigError if a part to
    replace is not Megatron's own, because its change would be ignored.
    """
    fused = config.transformer_impl == TRANSFORMER_ENGINE
    plain = copy.copy(config)
    # Megatron's own grouped experts need Transformer Engine.
    plain.moe_grouped_gemm = fused and config.moe_grouped_gemm
    # Looked up at each call: a user hook may have replaced the function in this module.
    block: Any = gpt_layer_specs.get_gpt_decoder_block_spec(
        plain,
        use_transformer_engine=fused,
        normalization=config.normalization,
        vp_stage=chunk,
        pp_rank=stage,
    )
    for layer in distinct_layers(block):
        if fused:
            _adapt_fused_layer(layer)
        else:
            _adapt_local_layer(layer, config)
    norms = _fused_norms() if fused else (WrappedTorchNorm, gpt_layer_specs.LNImpl)
    require_own("layer_norm", block.layer_norm, *norms)
    block.layer_norm = Norm
    return block


def _adapt_local_layer(layer: Any, config: TransformerConfig) -> None:
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
        assert not config.add_bias_linear and _is_swiglu(config), (
            "bridges.supported refuses all other experts"
        )
        mlp.submodules.experts = ModuleSpec(
            module=GroupedExperts, submodules=mlp.submodules.experts.submodules
        )
    _use_our_norm(layer.submodules, (WrappedTorchNorm,))
    _use_our_norm(attention.submodules, (WrappedTorchNorm,))


def _adapt_fused_layer(layer: Any) -> None:
    """Use our attention and norms in a layer of Transformer Engine.

    Its norms before linear layers are part of those layers. Tensors in checkpoints have the same
    names as those of a local layer.
    """
    attention = layer.submodules.self_attention
    core = gpt_layer_specs.TESpecProvider().core_attention()
    require_own("core_attention", attention.submodules.core_attention, core)
    attention.submodules.core_attention = CoreAttention
    _use_our_norm(layer.submodules, _fused_norms())
    _use_our_norm(attention.submodules, _fused_norms())
    if getattr(layer.submodules.mlp, "module", None) is MoELayer:
        # Megatron's local layers store the norm before experts under the name of a dense layer.
        layer.submodules.sharded_state_dict_keys_map = {
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"
        }


def _fused_norms() -> tuple[type, ...]:
    provider = gpt_layer_specs.TESpecProvider()
    return (
        gpt_layer_specs.TENorm,
        provider.layer_norm(rms_norm=True),
        provider.layer_norm(rms_norm=True, for_qk=True),
    )


def distinct_layers(block: Any) -> list[Any]:
    """Return the specifications of a block's layers, each once. Layers of one kind share one."""
    return list({id(layer): layer for layer in block.layer_specs}.values())


def require_own(part: str, module: Any, *own: type) -> None:
    """Raises: ConfigError if a part of a layer specification is none of Megatron's classes
    `own`."""
    module = getattr(module, "module", module)
    if module in own:
        return
    function = gpt_layer_specs.get_gpt_decoder_block_spec
    raise ConfigError(
        "this Megatron-LM has its own layers, which the trainer would replace",
        where=f"{function.__module__}.get_gpt_decoder_block_spec: {part}",
        found=f"{getattr(module, '__module__', '')}.{getattr(module, '__qualname__', module)}",
        expected=" or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in own),
        do="restore Megatron-core's specification of layers; change the model in "
        "rlpipe.engines.megatron.model.layers",
    )


def _use_our_norm(submodules, norms: tuple[type, ...]) -> None:
    for name, value in vars(submodules).items():
        if value in norms:
            setattr(submodules, name, Norm)


class PolicyModel(GPTModel):
    """A GPT whose last stage returns hidden states, not logits.

    The hidden states are [L, 1, H], sharded over L with sequence parallelism.

    Legend: L local packed tokens, n rows, H hidden size, V padded vocabulary.
    """

    _vocabulary: int | None = None

    def _postprocess(self, hidden_states, *_args, **keywords):
        if not self.predicts_further():
            return hidden_states
        names = ("input_ids", "position_ids", "attention_mask", "packed_seq_params")
        rotation = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
        further = self.mtp(
            hidden_states=hidden_states.detach(),
            embedding=self._constant_embedding,
            **{name: keywords[name] for name in (*names, *rotation)},
        )
        # The block returns its input first.
        return torch.cat([hidden_states, further[len(hidden_states) :]])

    def predicts_further(self) -> bool:
        """True if the hidden states of layers for multi-token prediction follow the model's."""
        return bool(self.mtp_process and self.training and torch.is_grad_enabled())

    def _constant_embedding(self, **keywords: Any) -> torch.Tensor:
        return self.embedding(**keywords).detach()

    def output_rows(self, hidden_states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [n, H] at `rows`, on every tensor parallel rank.

        Their dtype is that of the weights.
        """
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
            return hidden_states[:, 0].index_select(0, rows).to(self._output_shard().dtype)
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        return hidden_states[:, 0].index_select(0, rows).to(self._output_shard().dtype)

    def set_vocabulary(self, vocabulary: int) -> None:
        """Set the number of real tokens. Later rows of embedding and output layer are padding."""
        self._vocabulary = vocabulary

    @property
    def first_token(self) -> int:
        """Token of the first row of this rank's shard of the output layer."""
        return self.pg_collection.tp.rank() * len(self._output_shard())

    def output_weight(self) -> torch.Tensor:
        """Return this rank's shard of the output layer without padding: [≤ V / TP, H].

        A tied model returns the embedding.
        """
        weight = self._output_shard()
        tokens = self._num_tokens()
        return weight if tokens == len(weight) else weight[:tokens]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, V / TP] float32 of hidden states [n, H].

        Logits of padding are PADDING_LOGIT.
        """
        logits = torch.nn.functional.linear(rows, self._output_shard()).float()
        tokens = self._num_tokens()
        if tokens < logits.shape[1]:
            logits[:, tokens:] = PADDING_LOGIT
        return logits

    def _num_tokens(self) -> int:
        """Return the number of rows of this rank's shard that are not padding."""
        rows = len(self._output_shard())
        vocabulary = self.vocab_size if self._vocabulary is None else self._vocabulary
        return min(max(vocabulary - self.first_token, 0), rows)

    def _output_shard(self) -> torch.Tensor:
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        assert weight is not None, "not on the last pipeline stage"
        return weight
