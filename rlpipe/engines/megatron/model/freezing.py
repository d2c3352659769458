"""Frozen parameters: `train.freeze_params_name_list` and `train.only_train_params_name_list`.

Each list has Python regular expressions; `re.search` looks for them in names of parameters. Names
are those of Megatron with Transformer Engine's layers, for every implementation of layers; so are
those in checkpoints. Layers and experts have their numbers in the whole model: a list freezes the
same parameters in every layout. (slime searches the names of each pipeline stage, where layers
begin at 0.)

    embedding.word_embeddings.weight
    decoder.layers.12.self_attention.linear_qkv.weight
    decoder.layers.12.self_attention.linear_qkv.layer_norm_weight     norm before the layer
    decoder.layers.12.mlp.experts.linear_fc1.weight7                  expert 7
    output_layer.weight

A tied embedding has two names, that of the embedding and that of the output layer. A frozen
parameter has `requires_grad` False before gradient buffers and the optimizer are made, so it is in
neither of them. `freeze` changes a built model, `check_names` refuses lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError

# isort: split
from mbridge.core import LLMBridge
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.layers import linear_with_frozen_weight

from rlpipe.engines.megatron.bridges.bridge import mbridge_view
from rlpipe.engines.megatron.model.lora import require_gradient_of_input
from rlpipe.engines.megatron.model.value_model import ValueModel

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
_EXPERT = re.compile(r"(.*\.experts\..*?)\d+")
_WORD = re.compile(r"[A-Za-z_]\w*")


def freeze(bridge: LLMBridge, chunks: Sequence[Any], train: TrainConfig) -> None:
    """Freeze parameters of a model's chunks on this rank. Collective.

    A critic's value head stays trained. Raises: ConfigError on every rank, as `check_names`.
    """
    if not train.frozen_names:
        return
    names = [name for chunk in chunks for name, _ in _named(bridge, chunk)]
    trained = [name for chunk in chunks for name in _freeze_chunk(bridge, chunk, train)]
    if any(isinstance(_inner(chunk), ValueModel) and chunk.post_process for chunk in chunks):
        names.append(OUTPUT_LAYER)
        trained.append(OUTPUT_LAYER)
    partly = _frozen_parts(bridge, chunks)
    found: list[Any] = [None] * dist.get_world_size()
    matched = {pattern for pattern in _patterns(train) if _matches(names, [pattern])}
    dist.all_gather_object(found, (matched, bool(trained), partly))
    everywhere = {pattern for each, _, _ in found for pattern in each}
    check_names(train, names, matched=everywhere, trains=any(trains for _, trains, _ in found))
    kinds = [kind for _, _, parts in found for kind in parts]
    is_split = len({kind for kind, _ in kinds}) < len(set(kinds))
    for chunk in chunks:
        _keep_gradients(chunk, keep_graph=is_split)


def for_frozen(optimizer: Any) -> ChainedOptimizer:
    """Return Megatron's optimizer in a form that can be saved if parts of a model are frozen.

    Without the parts that have no parameters on any rank, such as the one of all weights but
    experts. A distributed optimizer may have no parameters on this rank.
    """
    parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            part.__class__ = _PerhapsEmpty
    return ChainedOptimizer(parts)


class _PerhapsEmpty(DistributedOptimizer):
    """A distributed optimizer that may have no parameters on this rank."""

    def state_dict(self) -> Any:
        """Return Megatron's state, which has the step count of a parameter, or a count of 0."""
        inner: Any = self.optimizer
        if any(group["params"] for group in inner.param_groups):
            return super().state_dict()
        groups = [
            {**{name: value for name, value in group.items() if name != "params"}, "step": 0.0}
            for group in inner.state_dict()["param_groups"]
        ]
        return {"optimizer": {"param_groups": groups}}


def check_names(
    train: TrainConfig,
    names: Sequence[str],
    *,
    matched: set[str] | None = None,
    trains: bool | None = None,
) -> None:
    """Check the lists of `train` against the names of parameters.

    `matched`, `trains`: patterns that match on any rank, and whether any rank trains a parameter;
    None: `names` are those of the whole model. Raises: ConfigError for a pattern that matches no
    name, and if no parameter is trained.
    """
    patterns = _patterns(train)
    if matched is None:
        matched = {pattern for pattern in patterns if _matches(names, [pattern])}
        trains = any(not _is_frozen(train, [name]) for name in names)
    where = f"train.{next(iter(train.frozen_names))}"
    if missing := [pattern for pattern in patterns if pattern not in matched]:
        raise ConfigError(
            "no parameter has such a name",
            where=where,
            found=", ".join(missing),
            expected="Python regular expressions for Megatron's names of parameters, such as "
            + ", ".join(nearest_names(missing[0], names)),
        )
    if not trains:
        raise ConfigError(
            "every parameter is frozen",
            where=where,
            found=", ".join(patterns),
            do="remove a pattern of freeze_params_name_list, or add one to "
            "only_train_params_name_list",
        )


def nearest_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return up to three names with words like those of a pattern, of the last layers."""
    by_word = {word: name for name in names for word in _WORD.findall(name)}
    words = sorted(_WORD.findall(re.sub(r"\\.", ".", pattern)), key=len, reverse=True)
    near = [
        by_word[match]
        for word in words
        for match in get_close_matches(word, [*by_word], n=2, cutoff=0.5)
    ]
    return [*dict.fromkeys([*near, *by_word.values()])][:3]


def _patterns(train: TrainConfig) -> tuple[str, ...]:
    return next(iter(train.frozen_names.values()))


def _matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _is_frozen(train: TrainConfig, names: Sequence[str]) -> bool:
    matches = _matches(names, _patterns(train))
    return matches if train.freeze_params_name_list else not matches


def _inner(chunk: Any) -> Any:
    return getattr(chunk, "module", chunk)


def _named(bridge: LLMBridge, chunk: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of a chunk by name, a tied one by both names.

    Without a value head, which is never frozen.
    """
    mapping: Any = bridge
    view = mbridge_view(bridge, chunk)
    whole = mapping._weight_name_mapping_mcore_local_to_global(view)
    found = [(whole[name], parameter) for name, parameter in view.named_parameters()]
    if not view.is_tied:
        return found
    both = (EMBEDDING, OUTPUT_LAYER)
    return [
        (alias, parameter)
        for name, parameter in found
        for alias in (both if name in both else (name,))
    ]


def _freeze_chunk(bridge: LLMBridge, chunk: Any, train: TrainConfig) -> list[str]:
    """Freeze a chunk's parameters and return the names of those that are trained."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in _named(bridge, chunk):
        names.setdefault(parameter, []).append(name)
    for parameter, aliases in names.items():
        if _is_frozen(train, aliases):
            parameter.requires_grad_(False)
    return [aliases[0] for parameter, aliases in names.items() if parameter.requires_grad]


def _frozen_parts(bridge: LLMBridge, chunks: Sequence[Any]) -> set[tuple[str, bool]]:
    """Return the weights of experts without their numbers, and if one of them is trained."""
    return {
        (found[1], parameter.requires_grad)
        for chunk in chunks
        for name, parameter in _named(bridge, chunk)
        if (found := _EXPERT.fullmatch(name))
    }


def _keep_gradients(chunk: Any, *, keep_graph: bool) -> None:
    """Keep the gradients of trained parameters that Megatron would leave out.

    `keep_graph`: ranks train different experts of a layer. Their transfers of gradients need all
    ranks, so a backward pass may not end earlier on one of them.
    """
    model = _inner(chunk)
    recomputes = model.config.recompute_granularity is not None
    is_frozen = model.pre_process and not model.embedding.word_embeddings.weight.requires_grad
    if is_frozen and (recomputes or keep_graph):
        require_gradient_of_input(model)
    for module in model.modules():
        if (
            isinstance(module, ColumnParallelLinear)
            and module.weight is not None
            and not module.weight.requires_grad
            and getattr(module, "bias", None) is not None
            and module.bias.requires_grad
        ):
            # Megatron's function for frozen weights gives no gradient to the bias.
            module._forward_impl = partial(_frozen_linear)


def _frozen_linear(input: torch.Tensor, weight: torch.Tensor, bias: Any = None, **more: Any) -> Any:
    output = linear_with_frozen_weight(input, weight, None, **more)
    return output if bias is None else output + bias
