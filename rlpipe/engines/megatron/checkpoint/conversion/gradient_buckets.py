"""Adam's state in gradient buckets: `distrib_optim_sharding_type` dp_reshardable.

    GradientBuckets(Checkpoint(folder), meta_model).read(name, {MASTER: "param"})

Each model parallel rank that saved has buckets of its own. They hold its parameters by position
only, in the order of the saved model, last one first. Transformer Engine's layers have another
order than Megatron's local ones (`_ORDERS`). Every read parameter is therefore compared: its
float32 value, rounded, must be the checkpoint's weight.

With expert parallelism, Megatron has a second optimizer for the experts. Its buckets belong to the
ranks of the experts' layout (expert tensor, expert and pipeline parallel).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.engines.megatron.checkpoint.conversion.meta_model import MetaModel
from rlpipe.engines.megatron.checkpoint.conversion.stored_names import FUSED_NORMS
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint
from rlpipe.errors import ConfigError, DataError

MASTER = "fp32_param"
"""The float32 value of a parameter, of which the weight is a rounded copy."""
BUCKET = re.compile(
    r"(?P<prefix>(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\."
    r"dp_group_idx_(?P<rank>\d+)\.gbuf_idx_(?P<buffer>\d+)\.dtype_\(.*\)\."
    r"bucket_idx_(?P<bucket>\d+))\.param"
)
"""Key of a bucket's master weights."""
_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(
    r"(?P<layer>.+)\.mlp\.experts\.local_experts\.(?P<number>\d+)\.(?P<linear>linear_fc\d)\..+"
)
_ALIGNMENT = 64
"""Megatron starts each parameter of a bucket at a multiple of this number of elements."""


@dataclass(frozen=True)
class _Place:
    """The position of a parameter in a bucket."""

    bucket: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Rank:
    """A model parallel rank that saved: its parameters in an optimizer, and their buckets."""

    names: list[str]
    """In the order of the local layers."""
    buckets: list[str]


class GradientBuckets:
    """The buckets of a checkpoint. Raises: ConfigError if their order is unknown."""

    def __init__(self, checkpoint: Checkpoint, meta_model: MetaModel) -> None:
        self._checkpoint = checkpoint
        self._meta_model = meta_model
        args: Any = checkpoint.args
        self._tensor = int(getattr(args, "tensor_model_parallel_size", 1))
        self._pipeline = int(getattr(args, "pipeline_model_parallel_size", 1))
        self._expert = int(getattr(args, "expert_model_parallel_size", 1))
        self._expert_tensor = int(
            getattr(args, "expert_tensor_parallel_size", None) or self._tensor
        )
        if getattr(args, "virtual_pipeline_model_parallel_size", None):
            raise _unread(checkpoint, "several pipeline stages on a rank")
        self._places: dict[str, list[_Place]] = {}
        """Parameter → its place on each rank that has a part of it."""
        for ranks in self._optimizers():
            self._places |= self._found_places(ranks)

    def has(self, state: str) -> bool:
        """True if the buckets have this tensor of every parameter."""
        bucket = next(iter(self._places.values()))[0].bucket
        return f"{bucket}.{state}" in self._checkpoint.tensor_sizes

    def read(self, name: str, states: dict[str, str]) -> dict[str, torch.Tensor]:
        """Return state → full tensor of a parameter.

        `states`: state → its name in the buckets, with MASTER. Raises: DataError if the master is
        not that of the weight.
        """
        found = {
            state: self._read(name, self._places[name], stored) for state, stored in states.items()
        }
        if not self._is_weight(name, found[MASTER]):
            raise DataError(
                "the optimizer state is in another order than the model's parameters",
                where=f"{self._checkpoint.folder}: {name}",
                do="take the weights only: model.source.megatron_optimizer=false (--no-load-optim)",
            )
        return found

    def _read(self, name: str, places: Sequence[_Place], stored: str) -> torch.Tensor:
        parts = [
            self._checkpoint.read_range(
                f"{place.bucket}.{stored}", place.start, math.prod(place.shape)
            ).view(place.shape)
            for place in places
        ]
        return self._meta_model.merged(name, parts)

    def _is_weight(self, name: str, master: torch.Tensor) -> bool:
        weight = self._checkpoint.read(self._meta_model, [name])[name]
        return torch.equal(master.to(weight.dtype), weight)

    def _optimizers(self) -> list[list[_Rank]]:
        """Return the ranks of each optimizer: of all parameters, or of the experts separately."""
        buckets: dict[int, dict[int, list[str]]] = {}
        matches = map(BUCKET.fullmatch, self._checkpoint.tensor_sizes)
        for match in sorted(filter(None, matches), key=lambda match: int(match["bucket"])):
            if match["buffer"] != "0":
                raise _unread(self._checkpoint, "gradient buffers of several dtypes")
            of_ranks = buckets.setdefault(int(match["optimizer"] or 0), {})
            of_ranks.setdefault(int(match["rank"]), []).append(match["prefix"])
        if sorted(buckets) == [0]:
            return [self._ranks(self._names_by_rank(), buckets[0])]
        if sorted(buckets) == [0, 1]:
            experts = self._names_of_experts_by_rank()
            return [
                self._ranks(self._names_by_rank(with_experts=False), buckets[0]),
                self._ranks(experts, buckets[1]),
            ]
        raise _unread(self._checkpoint, f"the optimizers {sorted(buckets)}")

    def _ranks(
        self, names_by_rank: list[list[str]], buckets_by_rank: dict[int, list[str]]
    ) -> list[_Rank]:
        """Raises: ConfigError if other ranks have buckets than those with parameters."""
        expected = {number for number, names in enumerate(names_by_rank) if names}
        if buckets_by_rank.keys() != expected:
            raise _unread(
                self._checkpoint,
                f"buckets of {len(buckets_by_rank)} model parallel ranks, and parameters of "
                f"{len(expected)}",
            )
        return [
            _Rank(names, buckets_by_rank.get(number, []))
            for number, names in enumerate(names_by_rank)
        ]

    def _found_places(self, ranks: Sequence[_Rank]) -> dict[str, list[_Place]]:
        """Return the places of every parameter, in the order that gives the stored weights."""
        for order in _ORDERS:
            places = self._places_in(order, ranks)
            if places is not None and all(
                self._is_weight(name, self._read(name, places[name], "param"))
                for name in _sample(places)
            ):
                return places
        raise _unread(self._checkpoint, "an unknown order of parameters")

    def _places_in(
        self, order: Callable[[Sequence[str]], list[str]], ranks: Sequence[_Rank]
    ) -> dict[str, list[_Place]] | None:
        """Return parameter → its place on each tensor parallel rank; None if sizes do not fit."""
        places: dict[str, list[_Place]] = {}
        for rank in ranks:
            found = self._walk(order(rank.names), rank.buckets)
            if found is None:
                return None
            for name, place in found.items():
                # The last stage has a copy of a tied embedding under the same name.
                if len(places.setdefault(name, [])) < self._tensor_ranks(name):
                    places[name].append(place)
        return places

    def _walk(self, names: Sequence[str], buckets: Sequence[str]) -> dict[str, _Place] | None:
        """Place the parameters one after the other, from the last one to the first."""
        sizes = iter(buckets)
        places = {}
        bucket = ""
        size = end = 0
        for name in reversed(names):
            shape = self._local_shape(name)
            if end == size:
                bucket = next(sizes, "")
                if not bucket:
                    return None
                (size,) = self._checkpoint.tensor_sizes[f"{bucket}.param"]
                end = 0
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + math.prod(shape)
            if end > size:
                return None
            places[name] = _Place(bucket, start, shape)
        return places if end == size and next(sizes, None) is None else None

    def _local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter on one tensor parallel rank."""
        shape = list(self._meta_model.tensors[name].shape)
        if name in (_EMBEDDING, "output_layer.weight"):
            # The checkpoint may have another padding of the vocabulary.
            shape[0] = self._checkpoint.tensor_sizes[name][0]
        parameter: Any = self._meta_model.parameter(name)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] //= self._tensor_ranks(name)
        return tuple(shape)

    def _tensor_ranks(self, name: str) -> int:
        return self._expert_tensor if _EXPERT.fullmatch(name) else self._tensor

    def _names_by_rank(self, *, with_experts: bool = True) -> list[list[str]]:
        """Return the parameters of each rank, tensor parallel ranks of a stage together."""
        return [
            [name for name in names if with_experts or not _EXPERT.fullmatch(name)]
            for names in map(self._of_stage, range(self._pipeline))
            for _ in range(self._tensor)
        ]

    def _names_of_experts_by_rank(self) -> list[list[str]]:
        """Return the experts' parameters of each rank of the experts' layout."""
        config: Any = self._meta_model.bridge.config
        on_each_rank = config.num_moe_experts // self._expert
        names_by_rank = []
        for stage in range(self._pipeline):
            owners: list[list[str]] = [[] for _ in range(self._expert)]
            for name in self._of_stage(stage):
                if match := _EXPERT.fullmatch(name):
                    owners[int(match["number"]) // on_each_rank].append(name)
            names_by_rank += [names for names in owners for _ in range(self._expert_tensor)]
        return names_by_rank

    def _of_stage(self, stage: int) -> list[str]:
        """Return the parameters of a pipeline stage."""
        layers = self._layers_of(stage)
        is_last = stage == self._pipeline - 1
        names = []
        for name in self._meta_model.parameter_names:
            if match := _LAYER.fullmatch(name):
                here = int(match[1]) in layers
            elif name.startswith("embedding."):
                here = stage == 0
            else:
                here = is_last
            if here:
                names.append(name)
        if self._meta_model.tied and is_last and self._pipeline > 1:
            names.append(_EMBEDDING)
        return names

    def _layers_of(self, stage: int) -> range:
        args: Any = self._checkpoint.args
        total = self._meta_model.bridge.config.num_layers
        first = getattr(args, "decoder_first_pipeline_num_layers", None)
        last = getattr(args, "decoder_last_pipeline_num_layers", None)
        even_stages = self._pipeline - (first is not None) - (last is not None)
        even_layers = total - (first or 0) - (last or 0)
        each = even_layers // even_stages if even_stages else 0
        sizes = [each] * even_stages
        if first is not None:
            sizes.insert(0, first)
        if last is not None:
            sizes.append(last)
        begin = sum(sizes[:stage])
        return range(begin, begin + sizes[stage])


def _unread(checkpoint: Checkpoint, found: str) -> ConfigError:
    return ConfigError(
        "the optimizer state of this checkpoint cannot be read",
        where=str(checkpoint.folder),
        found=f"dp_reshardable with {found}",
        expected="distrib_optim_sharding_type fully_reshardable",
        do="save it with --dist-ckpt-optim-fully-reshardable, or take the weights only: "
        "model.source.megatron_optimizer=false (--no-load-optim)",
    )


def _sample(names: Iterable[str]) -> list[str]:
    """Return the parameters of the first layer, and of the first layer with experts."""
    experts = [match["layer"] for match in map(_EXPERT.fullmatch, names) if match]
    starts = tuple(f"{layer}." for layer in ("decoder.layers.0", *experts[:1]))
    return [name for name in names if name.startswith(starts)]


def _fused_norms(names: Sequence[str]) -> list[str]:
    """Return the names in the order of Transformer Engine's layers.

    A norm there belongs to the linear layer after it: its weight is before the layer's own.
    """
    norms: dict[str, list[str]] = {}
    for name in names:
        for linear, norm in FUSED_NORMS.items():
            layer, found, _ = name.partition(f".{norm}.")
            if found and f"{layer}.{linear}.weight" in names:
                norms.setdefault(f"{layer}.{linear}", []).append(name)
    moved = {name for of_linear in norms.values() for name in of_linear}
    ordered = []
    for name in names:
        ordered += norms.pop(name.rpartition(".")[0], [])
        if name not in moved:
            ordered.append(name)
    return ordered


def _grouped_experts(names: Sequence[str]) -> list[str]:
    """Return the names in the order of Transformer Engine's grouped linear layers.

    The first linear layers of all experts precede the second ones.
    """
    starts: dict[str, int] = {}

    def position(numbered: tuple[int, str]) -> tuple[int, str]:
        number, name = numbered
        match = _EXPERT.fullmatch(name)
        if match is None:
            return number, ""
        return starts.setdefault(match["layer"], number), match["linear"]

    return [name for _, name in sorted(enumerate(names), key=position)]


_ORDERS: tuple[Callable[[Sequence[str]], list[str]], ...] = (
    lambda names: _fused_norms(_grouped_experts(names)),
    _fused_norms,
    _grouped_experts,
    list,
)
"""Orders of a model's parameters, from that of its local layers."""
