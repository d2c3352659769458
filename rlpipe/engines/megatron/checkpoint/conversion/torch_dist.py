"""Megatron's torch_dist format, a file's worth of tensors at a time: writing a model's weights, and
reading any layout's.

What a model's directory has beside what Megatron knows (the layers for predicting further tokens,
buffers) is stored under its own name with the prefix `huggingface.`: passengers. Not here: whole
states of a run (`engines.megatron.checkpoint.checkpoint`).
"""

from __future__ import annotations

import io
import math
import pickle
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rlpipe.engines.megatron.checkpoint.conversion.skeleton import Skeleton
from rlpipe.errors import DataError

PASSENGER = "huggingface."
COMMON = "common.pt"
_NUMBERED_LAYER = re.compile(r"decoder\.layers\.\d+\.")
_WEIGHT = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class Unit:
    """Something that is written at once: a Megatron tensor or a passenger."""

    name: str
    shards: list[ShardedTensor]
    """On the meta device."""
    passenger: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(shard.data.nbytes for shard in self.shards if shard.data is not None)


def units(skeleton: Skeleton, passengers: dict[str, torch.Tensor]) -> list[Unit]:
    """What a checkpoint of this model holds, in the order of the model. `passengers`: on the meta
    device."""
    own = [Unit(name, skeleton.shards(name, tensor)) for name, tensor in skeleton.tensors.items()]
    return own + [
        Unit(name, [_whole(name, tensor)], passenger=True) for name, tensor in passengers.items()
    ]


class Writer:
    """Writes a checkpoint's folder a file at a time; what a process before has finished is kept.

    `files`: which units go into which file. `read`: makes a unit's tensor, in memory.
    """

    def __init__(
        self,
        folder: Path,
        skeleton: Skeleton,
        files: Sequence[Sequence[Unit]],
        read: Callable[[Unit], torch.Tensor],
    ):
        self._folder = folder
        self._skeleton = skeleton
        self._read = read
        self._planner = _Planner(self._tensor)
        self._storage = FileSystemWriter(folder)
        self._storage.set_up_storage_writer(True)
        self._objects = {each.unique_key: each.data for each in skeleton.objects}
        objects = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        tensors = [[_item(shard) for unit in units for shard in unit.shards] for units in files]
        plans = [
            SavePlan([*(objects if not number else []), *items])
            for number, items in enumerate(tensors)
        ]
        plans, self._metadata = self._planner.create_global_plan(plans)
        self._plans = self._storage.prepare_global_plan(plans)
        places = [
            (shard.key, tuple(shard.global_offset))
            for units in files
            for unit in units
            for shard in unit.shards
        ]
        owners = [
            (unit, number)
            for units in files
            for unit in units
            for number in range(len(unit.shards))
        ]
        self._owners = dict(zip(places, owners, strict=True))
        self._current: tuple[Unit, list[ShardedTensor]] | None = None

    def write(self, number: int) -> bool:
        """Write one of the files, unless it is there: was it written now?"""
        done = self._folder / f"file-{number}.done"
        if done.exists():
            return False
        results = self._storage.write_data(self._plans[number], self._planner).wait()
        self._current = None
        partial = done.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(results))
        partial.replace(done)
        return True

    def finish(self, common: dict[str, Any]) -> None:
        """Describe the files, once all are there."""
        records = [self._folder / f"file-{number}.done" for number in range(len(self._plans))]
        self._storage.finish(
            self._metadata, [pickle.loads(record.read_bytes()) for record in records]
        )
        torch.save(common, self._folder / COMMON)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
        for record in records:
            record.unlink()

    def _tensor(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save([self._objects[item.index.fqn]], buffer)
            return buffer
        assert item.index.offset is not None
        unit, number = self._owners[item.index.fqn, tuple(item.index.offset)]
        if self._current is None or self._current[0] is not unit:
            self._current = None
            tensor = self._read(unit)
            shards = (
                [_whole(unit.name, tensor)]
                if unit.passenger
                else self._skeleton.shards(unit.name, tensor)
            )
            self._current = unit, shards
        shard = self._current[1][number]
        assert shard.data is not None
        return shard.data.reshape(
            (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        ).contiguous()


class _Planner(DefaultSavePlanner):
    """torch's planner, whose tensors are made when they are written."""

    def __init__(self, tensor: Callable[[WriteItem], torch.Tensor | io.BytesIO]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensor = tensor

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._tensor(write_item)


class Checkpoint:
    """A folder in torch_dist format, whoever wrote it and however it was divided. Raises: DataError
    if it cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._reader = FileSystemReader(folder)
            self._stored: Metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._stored, True)
            self.common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(folder))
        except (
            OSError,
            EOFError,
            ValueError,
            RuntimeError,
            AttributeError,
            pickle.UnpicklingError,
            CheckpointingException,
        ) as error:
            raise DataError(
                "not a readable torch_dist checkpoint", where=str(folder), found=repr(error)
            ) from error

    @property
    def args(self) -> Namespace | None:
        """The arguments that were stored with it."""
        return self.common.get("args")

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights. Raises: DataError if this is no language model of Megatron's."""
        entry = self._stored.state_dict_metadata.get(_WEIGHT)
        if not isinstance(entry, TensorStorageMetadata):
            raise DataError(
                "no weights of a language model", where=str(self.folder), expected=_WEIGHT
            )
        return entry.properties.dtype

    @property
    def layout(self) -> dict[str, Any]:
        """How it was laid out, for `Skeleton`."""
        described = {
            key: value
            for key, value in (self.common.get("content_metadata") or {}).items()
            if key != "dp_cp_group"
        }
        if any(_NUMBERED_LAYER.match(name) for name in self._stored.state_dict_metadata):
            described["non_homogeneous_layers"] = True
        return described

    @property
    def passengers(self) -> dict[str, torch.Tensor]:
        """By Hugging Face name, on the meta device."""
        return {
            name.removeprefix(PASSENGER): torch.empty(
                entry.size, dtype=entry.properties.dtype, device="meta"
            )
            for name, entry in self._stored.state_dict_metadata.items()
            if name.startswith(PASSENGER) and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, skeleton: Skeleton, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """These tensors of the model, whole, in the model's dtype. Raises: DataError if they are
        not there or do not fit."""
        places = {
            name: skeleton.place(name, torch.empty_like(skeleton.tensors[name], device="cpu"))
            for name in names
        }
        built = {
            name: place.build() if isinstance(place, ShardedTensorFactory) else place
            for name, place in places.items()
        }
        self._fill([shard for each in built.values() for shard in nested_values({"": each})])
        return {name: _merged(places[name], each) for name, each in built.items()}

    def read_passengers(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """These passengers."""
        found = self.passengers
        shards = {name: _whole(name, torch.empty_like(found[name], device="cpu")) for name in names}
        self._fill([*shards.values()])
        return {name: shard.data for name, shard in shards.items() if shard.data is not None}

    def _fill(self, shards: list[ShardedTensor]) -> None:
        """Read what is stored, in whatever pieces, into the shards' tensors."""
        targets: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        items: list[ReadItem] = []
        for shard in shards:
            entry = self._stored.state_dict_metadata.get(shard.key)
            chunk = _chunk(shard)
            if not isinstance(entry, TensorStorageMetadata) or not _fits(shard, entry):
                raise DataError(
                    "the checkpoint does not hold this model's weights",
                    where=f"{self.folder}: {shard.key}",
                    found=tuple(entry.size)
                    if isinstance(entry, TensorStorageMetadata)
                    else "nothing of that name",
                    expected=tuple(shard.global_shape),
                    do="give the directory of the model that it was made of: --origin-hf-dir",
                )
            assert shard.data is not None
            targets[shard.key, tuple(shard.global_offset)] = shard.data.view(chunk.sizes)
            found = create_read_items_for_chunk_list(shard.key, entry, [chunk])
            if sum(math.prod(item.lengths) for item in found) != math.prod(chunk.sizes):
                raise DataError(
                    "pieces of a weight are missing", where=f"{self.folder}: {shard.key}"
                )
            items += found
        try:
            self._reader.read_data(LoadPlan(items), _Targets(targets)).wait()
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise DataError(
                "a file of a checkpoint cannot be read",
                where=str(self.folder),
                found=str(error)[:600],
            ) from error


class _Targets(DefaultLoadPlanner):
    """torch's planner, told where each piece goes."""

    def __init__(self, targets: dict[tuple[str, tuple[int, ...]], torch.Tensor]) -> None:
        super().__init__()
        self.targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        pieces = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.targets[index.fqn, tuple(index.offset)][
            tuple(slice(start, start + length) for start, length in pieces)
        ]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...


def _merged(place: Any, built: Any) -> torch.Tensor:
    if not isinstance(place, ShardedTensorFactory):
        return built.data
    pieces: Any = dict_list_map_outplace(lambda shard: shard.data, built)
    return place.merge_fn(pieces)


def _fits(shard: ShardedTensor, entry: TensorStorageMetadata) -> bool:
    """Vocabularies may be stored with padding at their end."""
    stored = tuple(entry.size)
    ours = tuple(shard.global_shape)
    return stored == ours or (
        shard.allow_shape_mismatch and stored[1:] == ours[1:] and stored[0] >= ours[0]
    )


def _chunk(shard: ShardedTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        torch.Size(shard.global_offset),
        torch.Size((1,) * shard.prepend_axis_num + tuple(shard.local_shape)),
    )


def _whole(name: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(f"{PASSENGER}{name}", tensor)


def _item(shard: ShardedTensor) -> WriteItem:
    assert shard.data is not None
    chunk = _chunk(shard)
    properties = TensorProperties(dtype=shard.data.dtype)
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shard.global_shape))
    return WriteItem(MetadataIndex(shard.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
