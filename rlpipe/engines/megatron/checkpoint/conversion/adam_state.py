"""Adam's state in a checkpoint of Megatron-LM, by parameter and in any of its formats.

    AdamState(Checkpoint(folder), meta_model).read("decoder.layers.0.mlp.linear_fc1.weight")

| `distrib_optim_sharding_type` | stored tensors |
|---|---|
| none, fully_reshardable | as the parameter, under the parameter's name |
| fully_sharded_model_space (before Megatron-core 0.15) | the same names; each rank's part is flat |
| dp_reshardable (Megatron-LM's default) | gradient buckets of each model parallel rank |

A bucket has parameters by position only, in the order of the model that was saved. Transformer
Engine's layers have another order than Megatron's local ones. Every read parameter is therefore
compared: its float32 value, rounded, must be the checkpoint's weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.engines.megatron.checkpoint.conversion.meta_model import MetaModel
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint, Unit
from rlpipe.errors import ConfigError, DataError

MASTER = "fp32_param"
"""The float32 value of a parameter, of which the weight is a rounded copy."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER_NAMES = (MASTER, "param")
_BUCKET = re.compile(
    r"(?P<prefix>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\."
    r"gbuf_idx_\d+\.dtype_\(.*\)\.bucket_idx_(?P<bucket>\d+))\.param"
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_ALIGNMENT = 64
"""Megatron starts each parameter of a bucket at a multiple of this number of elements."""


class AdamState:
    """The optimizer state of a checkpoint.

    Raises: DataError if the checkpoint has none; ConfigError for a format that is not read.
    """

    def __init__(self, checkpoint: Checkpoint, meta_model: MetaModel) -> None:
        self._checkpoint = checkpoint
        self._meta_model = meta_model
        self._buckets = None if _is_named(checkpoint) else _Buckets(checkpoint, meta_model)
        self._last: tuple[str, dict[str, torch.Tensor]] | None = None
        self._names = {moment: moment for moment in MOMENTS}
        if (master := self._stored_name(_MASTER_NAMES)) is not None:
            self._names[MASTER] = master

    @property
    def step(self) -> int:
        """Steps that Adam has taken. Raises: DataError if the number is missing."""
        steps = set(_steps(self._checkpoint.common.get("optimizer")))
        if not steps:
            name = r"optimizer\.distributed\.dp_group_idx_\d+\.optimizer"
            steps = set(_steps(self._checkpoint.read_objects(name)))
        if len(steps) != 1:
            raise DataError(
                "the checkpoint has no single number of Adam's steps",
                where=str(self._checkpoint.folder),
                found=sorted(steps) or None,
            )
        return steps.pop()

    @property
    def schedule_steps(self) -> int:
        """Optimizer steps of the learning rate schedule. Megatron counts samples."""
        scheduler = self._checkpoint.common.get("opt_param_scheduler") or {}
        batch = getattr(self._checkpoint.args, "global_batch_size", None)
        if "num_steps" not in scheduler or not batch:
            return self.step
        return int(scheduler["num_steps"]) // int(batch)

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Return state → full float32 tensor of a parameter: MASTER and MOMENTS.

        Raises: DataError.
        """
        if self._buckets is not None:
            return self._buckets.read(name, self._names)
        found = {
            state: self._checkpoint.read(self._meta_model, [name], stored)[name]
            for state, stored in self._names.items()
        }
        if MASTER not in found:  # float32 weights are their own masters
            found[MASTER] = self._checkpoint.read(self._meta_model, [name])[name].float()
        return found

    def units(self) -> Iterator[Unit]:
        """Yield every tensor of the optimizer, for a writer of checkpoints."""
        for name, weight in self._meta_model.tensors.items():
            if self._meta_model.parameter(name) is None:
                continue  # a buffer
            empty = torch.empty_like(weight, dtype=torch.float32)
            for state in (MASTER, *MOMENTS):
                yield Unit(name, self._meta_model.shards(name, empty, state), adam=state)

    def tensor(self, unit: Unit) -> torch.Tensor:
        """Return the tensor of a unit. Units of one parameter are read at once."""
        if self._last is None or self._last[0] != unit.name:
            self._last = (unit.name, self.read(unit.name))
        return self._last[1][unit.adam]

    def _stored_name(self, names: Sequence[str]) -> str | None:
        keys = self._checkpoint.tensor_sizes
        if self._buckets is not None:
            return next((name for name in names if self._buckets.has(name)), None)
        starts = {name: f"optimizer.state.{name}." for name in names}
        return next(
            (name for name, start in starts.items() if any(key.startswith(start) for key in keys)),
            None,
        )


def _is_named(checkpoint: Checkpoint) -> bool:
    """True if Adam's tensors have the names of parameters; False if they are in buckets."""
    for key in checkpoint.tensor_sizes:
        if match := re.match(r"(chained_\d+\.)?optimizer\.state\.exp_avg\.", key):
            if match[1]:
                raise _unread(checkpoint, "separate optimizers of experts (chained_…)")
            return True
        if _BUCKET.fullmatch(key):
            return False
    raise DataError(
        "the checkpoint has no optimizer state",
        where=str(checkpoint.folder),
        do="take its weights only: model.source.megatron_optimizer=false (--no-load-optim)",
    )


def _unread(checkpoint: Checkpoint, found: str) -> ConfigError:
    return ConfigError(
        "the optimizer state of this checkpoint cannot be read",
        where=str(checkpoint.folder),
        found=found,
        expected="distrib_optim_sharding_type fully_reshardable",
        do="save it with --dist-ckpt-optim-fully-reshardable, or take the weights only: "
        "model.source.megatron_optimizer=false (--no-load-optim)",
    )


def _steps(state: Any) -> Iterator[int]:
    """Yield the numbers of steps in an optimizer's state dict."""
    if isinstance(state, dict):
        for key, value in state.items():
            if key in ("step", "common_step") and value is not None:
                yield int(value)
            else:
                yield from _steps(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _steps(value)


@dataclass(frozen=True)
class _Place:
    """The position of a parameter in a bucket."""

    bucket: str
    start: int
    shape: tuple[int, ...]


class _Buckets:
    """Gradient buckets: the parameters of one model parallel rank, last one first."""

    def __init__(self, checkpoint: Checkpoint, meta_model: MetaModel) -> None:
        self._checkpoint = checkpoint
        self._meta_model = meta_model
        args: Any = checkpoint.args
        self._tensor = int(getattr(args, "tensor_model_parallel_size", 1))
        self._pipeline = int(getattr(args, "pipeline_model_parallel_size", 1))
        if getattr(args, "virtual_pipeline_model_parallel_size", None):
            raise _unread(checkpoint, "dp_reshardable with several pipeline stages on a rank")
        matches = [match for key in checkpoint.tensor_sizes if (match := _BUCKET.fullmatch(key))]
        if any(match["prefix"].startswith("chained_") for match in matches):
            raise _unread(checkpoint, "dp_reshardable with separate optimizers of experts")
        self._by_rank: dict[int, list[str]] = {}
        for match in sorted(matches, key=lambda match: int(match["bucket"])):
            self._by_rank.setdefault(int(match["rank"]), []).append(match["prefix"])
        if len(self._by_rank) != self._tensor * self._pipeline:
            raise _unread(checkpoint, f"buckets of {len(self._by_rank)} model parallel ranks")
        self._places = self._found_places()

    def has(self, state: str) -> bool:
        """True if the buckets have this tensor of every parameter."""
        return f"{self._by_rank[0][0]}.{state}" in self._checkpoint.tensor_sizes

    def read(self, name: str, names: dict[str, str]) -> dict[str, torch.Tensor]:
        """Return state → full tensor. `names`: state → its name in the buckets."""
        found = {state: self._read(name, stored) for state, stored in names.items()}
        if not self._is_weight(name, found[MASTER]):
            raise DataError(
                "the optimizer state is in another order than the model's parameters",
                where=f"{self._checkpoint.folder}: {name}",
                do="take the weights only: model.source.megatron_optimizer=false (--no-load-optim)",
            )
        return found

    def _read(self, name: str, stored: str) -> torch.Tensor:
        parts = [
            self._checkpoint.read_range(
                f"{place.bucket}.{stored}", place.start, math.prod(place.shape)
            ).view(place.shape)
            for place in self._places[name]
        ]
        return self._meta_model.merged(name, parts)

    def _is_weight(self, name: str, master: torch.Tensor) -> bool:
        weight = self._checkpoint.read(self._meta_model, [name])[name]
        return torch.equal(master.to(weight.dtype), weight)

    def _found_places(self) -> dict[str, list[_Place]]:
        """Return the places of every parameter, in the order that gives the stored weights."""
        parameters = [
            name
            for name in self._meta_model.tensors
            if self._meta_model.parameter(name) is not None
        ]
        first_layer = [name for name in parameters if name.startswith("decoder.layers.0.")]
        for order in (_fused_norms(parameters), parameters):
            places = self._places_in(order)
            if places is None:
                continue
            self._places = places
            if all(self._is_weight(name, self._read(name, "param")) for name in first_layer):
                return places
        raise _unread(self._checkpoint, "dp_reshardable in an unknown order of parameters")

    def _places_in(self, order: Sequence[str]) -> dict[str, list[_Place]] | None:
        """Return parameter → its place on each tensor parallel rank; None if sizes do not fit."""
        places: dict[str, list[_Place]] = {}
        for stage in range(self._pipeline):
            names = self._of_stage(order, stage)
            for rank in range(self._tensor):
                found = self._walk(names, self._by_rank[rank + self._tensor * stage])
                if found is None:
                    return None
                for name, place in found.items():
                    # The last stage has a copy of a tied embedding under the same name.
                    if len(places.setdefault(name, [])) < self._tensor:
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
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            # The checkpoint may have another padding of the vocabulary.
            shape[0] = self._checkpoint.tensor_sizes[name][0]
        parameter: Any = self._meta_model.parameter(name)
        if getattr(parameter, "tensor_model_parallel", False):
            shape[parameter.partition_dim] //= self._tensor
        return tuple(shape)

    def _of_stage(self, order: Sequence[str], stage: int) -> list[str]:
        """Return the parameters of a pipeline stage."""
        layers = self._layers_of(stage)
        is_last = stage == self._pipeline - 1
        names = []
        for name in order:
            if match := _LAYER.fullmatch(name):
                here = int(match[1]) in layers
            elif name.startswith("embedding."):
                here = stage == 0
            else:
                here = is_last
            if here:
                names.append(name)
        if self._meta_model.tied and is_last and self._pipeline > 1:
            names.append("embedding.word_embeddings.weight")
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


def _fused_norms(names: Sequence[str]) -> list[str]:
    """Return the names in the order of Transformer Engine's layers.

    A norm there belongs to the linear layer after it: its weight is before the layer's own.
    """
    linear_of = {
        "input_layernorm.": "self_attention.linear_qkv.",
        "pre_mlp_layernorm.": "mlp.linear_fc1.",
    }
    ordered = []
    held: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        part = match[2] if match else ""
        layer = name.removesuffix(part)
        for norm, linear in linear_of.items():
            if part.startswith(norm) and f"{layer}{linear}weight" in names:
                held.setdefault(f"{layer}{linear}", []).append(name)
                break
        else:
            for linear in linear_of.values():
                if part.startswith(linear):
                    ordered += held.pop(f"{layer}{linear}", [])
            ordered.append(name)
    return ordered
