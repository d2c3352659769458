"""Low-rank adapters (LoRA) on the linear layers of a policy: `train.lora`.

    y = W x + alpha / rank · B (A x),   A [rank, in], B [out, rank]

W is frozen; A and B are trained. B starts at 0, so the first policy is the model without adapters.
A starts uniform in ±1 / sqrt(in), as in PEFT. Names, shapes and scale are PEFT's. Megatron stores
queries, keys and values in one matrix, and gate and up projection in another. Each of their parts
has adapters of its own, whose outputs are put into Megatron's order (`_Adapted.joined`).

Tensor parallel ranks split B of a column parallel layer and A of a row parallel layer as they split
the layer; they hold the other matrix whole. Only vectors of `rank` numbers a token are sent.

`check_adapters` refuses models, `add_adapters` changes a built model, `initialize` sets the first
values, and `merged_parameters` yields weights for engines and exports.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch.nn.functional import linear

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.config.train import LORA_TARGETS, LoraConfig, TrainConfig
from rlpipe.errors import ConfigError

# isort: split
from mbridge.core import LLMBridge
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    copy_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

WHERE = "train.lora"
ADAPTERS = "adapters"
"""Name of the adapters in their layer: `….linear_qkv.adapters.q_proj.lora_A`."""
MARK = f".{ADAPTERS}."
LAYERS = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_proj": ("o_proj",),
    "mlp.linear_fc1": ("gate_proj", "up_proj"),
    "mlp.linear_fc2": ("down_proj",),
}
"""Megatron's layer → PEFT's names of its parts, in the order of the rows."""


class Adapter(torch.nn.Module):
    """The two matrices of one part of a layer, on this rank."""

    def __init__(self, rows: int, columns: int, rank: int, like: torch.Tensor) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.lora_A = torch.nn.Parameter(torch.zeros(rank, columns, **kind))
        self.lora_B = torch.nn.Parameter(torch.zeros(rows, rank, **kind))


@dataclass(frozen=True)
class Rows:
    """The order of a layer's rows on this rank: `blocks` times the rows of each part."""

    blocks: int
    sizes: dict[str, int]
    """Part → its rows in a block."""


class _Adapted:
    """A linear layer with adapters. Its class is set by `add_adapters`."""

    weight: torch.Tensor
    adapters: Any
    """Part → Adapter: a ModuleDict."""
    scale: float
    seed: str
    rows: Rows
    tp_group: Any
    weight_name: str
    """mbridge's name of the weight, with the number of the layer in the whole model."""
    split: dict[str, int]
    """Parameter of the layer → the dimension that tensor parallel ranks split, for checkpoints."""

    def joined(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return outputs [..., rows] of the layer from those of its parts, [..., rows of a part].

        A part without adapters is 0.
        """
        like = next(iter(parts.values()))
        blocks = self.rows.blocks
        every = [
            parts[name].unflatten(-1, (blocks, size))
            if name in parts
            else like.new_zeros(*like.shape[:-1], blocks, size)
            for name, size in self.rows.sizes.items()
        ]
        return torch.cat(every, -1).flatten(-2)

    def merged(self, weight: torch.Tensor, adapters: dict[str, tuple[Any, Any]]) -> torch.Tensor:
        """Return `weight` + scale · B A, summed in float32, in the weight's dtype.

        `adapters`: part → (A, B).
        """
        products = {name: (b.float() @ a.float()).mT for name, (a, b) in adapters.items()}
        change = self.joined(products).mT * self.scale
        return (weight.float() + change).to(weight.dtype)

    def merged_weight(self) -> torch.Tensor:
        """Return this rank's part of the merged weight."""
        parts = {name: (each.lora_A, each.lora_B) for name, each in self.adapters.items()}
        merged = self.merged(self.weight, parts)
        copy_tensor_model_parallel_attributes(merged, self.weight)
        return merged

    def _a(self) -> torch.Tensor:
        return torch.cat([each.lora_A for each in self.adapters.values()])

    def _outputs(self, inner: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., rows] for A x of all parts, [..., parts × rank]."""
        pieces = (inner * self.scale).chunk(len(self.adapters), -1)
        return self.joined(
            {
                name: linear(piece, each.lora_B)
                for (name, each), piece in zip(self.adapters.items(), pieces, strict=True)
            }
        )

    def sharded_state_dict(self: Any, prefix="", sharded_offsets=(), metadata: Any = None) -> Any:
        """Return the layer's shards, with those of its adapters."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self.split,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class AdaptedColumn(_Adapted, ColumnParallelLinear):
    """A column parallel layer with adapters: each rank has all of A and its rows of B."""

    def forward(self, input_: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        result: Any = ColumnParallelLinear.forward(self, input_, *args, **keywords)
        output, bias = result
        inner = linear(input_, self._a())
        if self.sequence_parallel:
            inner = gather_from_sequence_parallel_region(inner, group=self.tp_group)
        else:
            # Backward: sum over the ranks' rows of B.
            inner = copy_to_tensor_model_parallel_region(inner, group=self.tp_group)
        return output + self._outputs(inner), bias


class AdaptedRow(_Adapted, RowParallelLinear):
    """A row parallel layer with adapters: each rank has its columns of A and all of B."""

    def forward(self, input_: torch.Tensor) -> Any:
        result: Any = RowParallelLinear.forward(self, input_)
        output, bias = result
        inner = linear(input_, self._a())
        reduce: Any = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        return output + self._outputs(reduce(inner, group=self.tp_group)), bias


def check_adapters(bridge: LLMBridge, train: TrainConfig) -> None:
    """Raises: ConfigError if `train.lora` cannot be used with this model."""
    lora = train.lora
    if lora is None:
        return
    config: Any = bridge.config
    hf_config: Any = bridge.hf_config
    targets = set(lora.target_modules)
    feed_forward = targets & {"gate_proj", "up_proj", "down_proj"}
    groups = config.num_query_groups or config.num_attention_heads
    reasons = {
        "its attention has other matrices": getattr(config, "multi_latent_attention", False)
        or config.attention_output_gate,
        f"{', '.join(sorted(feed_forward))} of experts": config.num_moe_experts and feed_forward,
        "its feed-forward layers have no gate": not config.gated_linear_unit,
        "tensor parallel ranks share key heads": config.tensor_model_parallel_size > groups,
        "train.megatron.mtp_num_layers": bool(config.mtp_num_layers),
        "train.megatron.transformer_impl": config.transformer_impl != "local",
    }
    if found := next((text for text, refused in reasons.items() if refused), None):
        attention = [name for name in LORA_TARGETS if name not in feed_forward]
        raise ConfigError(
            "adapters are not supported for this model",
            where=WHERE,
            found=f"{found} (model_type: {hf_config.model_type})",
            expected="local layers of attention and of dense gated feed-forward layers",
            do=f"set train.lora.target_modules: [{', '.join(attention)}]"
            if config.num_moe_experts and feed_forward
            else "remove train.lora, or what was found",
        )


def add_adapters(model: Any, lora: LoraConfig, seed: int) -> None:
    """Freeze a model and add adapters to its layers. Their values are set by `initialize`.

    `seed`: of the first values. Raises: ConfigError if the model has no layer of a target.
    """
    model.requires_grad_(False)
    missing = set(lora.target_modules)
    for layer in model.decoder.layers:
        for path, parts in LAYERS.items():
            wanted = [part for part in parts if part in lora.target_modules]
            module = _submodule(layer, path)
            if module is None or not wanted:
                continue
            missing -= set(wanted)
            _adapt(module, wanted, lora, _rows(layer, path, module, parts))
            module.seed = f"{seed} {layer.layer_number} {path}"
            module.weight_name = f"decoder.layers.{layer.layer_number - 1}.{path}.weight"
    if missing and len(model.decoder.layers):
        raise ConfigError(
            "the model has no layers of these names",
            where=f"{WHERE}.target_modules",
            found=", ".join(sorted(missing)),
        )
    if model.config.recompute_granularity is not None:
        require_gradient_of_input(model)


def _submodule(layer: torch.nn.Module, path: str) -> Any:
    owner, _, name = path.partition(".")
    module = getattr(getattr(layer, owner, None), name, None)
    return module if isinstance(module, ColumnParallelLinear | RowParallelLinear) else None


def _rows(layer: Any, path: str, module: Any, parts: tuple[str, ...]) -> Rows:
    if path == "self_attention.linear_qkv":
        attention = layer.self_attention
        size: int = attention.hidden_size_per_attention_head
        groups = attention.num_query_groups_per_partition
        queries = attention.num_attention_heads_per_partition // groups
        return Rows(groups, dict(zip(parts, (queries * size, size, size), strict=True)))
    rows = module.weight.shape[0]
    return Rows(1, {part: rows // len(parts) for part in parts})


def _adapt(module: Any, wanted: list[str], lora: LoraConfig, rows: Rows) -> None:
    is_column = isinstance(module, ColumnParallelLinear)
    # Both have the attributes of the class that they replace.
    module.__class__ = AdaptedColumn if is_column else AdaptedRow
    module.scale = lora.scale
    module.rows = rows
    columns = module.weight.shape[1]
    module.adapters = torch.nn.ModuleDict(
        {
            part: Adapter(rows.blocks * rows.sizes[part], columns, lora.rank, module.weight)
            for part in wanted
        }
    )
    module.split = {"weight": 0, "bias": 0} if is_column else {"weight": 1}
    for part, adapter in module.adapters.items():
        name, dimension = ("lora_B", 0) if is_column else ("lora_A", 1)
        module.split[f"{ADAPTERS}.{part}.{name}"] = dimension
        set_tensor_model_parallel_attributes(getattr(adapter, name), True, dimension, 1)
        # Each rank sees some of the tokens only: Megatron sums these gradients over ranks.
        whole: Any = adapter.lora_A if is_column else adapter.lora_B
        whole.sequence_parallel = module.sequence_parallel


def require_gradient_of_input(model: Any) -> None:
    """Have the layers of a model compute gradients although its embedding is frozen.

    A recomputed layer whose input needs no gradient gets none for its parameters.
    """
    if model.pre_process:
        model.embedding.register_forward_hook(_require_gradient)


def _require_gradient(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


@torch.no_grad()
def initialize(models: Iterable[torch.nn.Module]) -> None:
    """Set the first values of all adapters, if any. They do not depend on the parallel layout."""
    for model in models:
        for module in adapted_modules(model):
            _initialize(module)


def _initialize(module: Any) -> None:
    group = module.tp_group
    for part, adapter in module.adapters.items():
        digest = sha256(f"{module.seed} {part}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        rank, columns = adapter.lora_A.shape
        parts = group.size() if isinstance(module, AdaptedRow) else 1
        whole = torch.empty(rank, columns * parts)
        bound = 1 / math.sqrt(columns * parts)
        whole.uniform_(-bound, bound, generator=generator)
        own = whole.chunk(parts, 1)[group.rank() if parts > 1 else 0]
        adapter.lora_A.copy_(own)
        adapter.lora_B.zero_()


def adapted_modules(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the layers with adapters (`_Adapted`)."""
    return (module for module in model.modules() if isinstance(module, _Adapted))


def adapter_weights(models: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the adapters' parameters on this rank."""
    return [
        parameter.detach()
        for model in models
        for name, parameter in model.named_parameters()
        if MARK in name
    ]


def merged_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a model by name, with its adapters merged into their layers.

    A merged weight is a new tensor with the tensor parallel attributes of its layer's.
    """
    adapted = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, _Adapted)
    }
    for name, parameter in model.named_parameters():
        if MARK not in name:
            yield name, adapted[name].merged_weight() if name in adapted else parameter
