"""Weights in Megatron's torch_dist format, with one file's tensors in memory at a time.

`Writer` writes a checkpoint file by file. `Checkpoint` reads a checkpoint of any layout.

Tensors of a Hugging Face directory that Megatron's model does not have (layers for multi-token
prediction, buffers) are extra tensors. They are stored under their own names with the prefix
`huggingface.`. `engines.megatron.checkpoint.checkpoint` handles the whole state of a run.
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
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
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

from rlpipe.engines.megatron.checkpoint.conversion.meta_model import MetaModel
from rlpipe.engines.megatron.checkpoint.conversion.stored_names import StoredNames
from rlpipe.errors import DataError

EXTRA_PREFIX = "huggingface."
COMMON = "common.pt"
HEAD = {"score.weight": "output_layer.weight", "score.bias": "output_layer.bias"}
"""Hugging Face's name of a value head → its name in Megatron's model of slime."""
_NUMBERED_LAYER = re.compile(r"decoder\.layers\.\d+\.")
_WEIGHT = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class Unit:
    """A tensor that is written at once: of Megatron's model, or an extra tensor."""

    name: str
    shards: list[ShardedTensor]
    """On the meta device."""
    is_extra: bool = False
    adam: str = ""
    """Tensor of the optimizer that belongs to the model's tensor `name`; "": the tensor itself."""

    @property
    def size_bytes(self) -> int:
        return sum(shard.data.nbytes for shard in self.shards if shard.data is not None)


def units(meta_model: MetaModel, extra_tensors: dict[str, torch.Tensor]) -> list[Unit]:
    """Return the tensors of a checkpoint of this model, in the order of the model.

    `extra_tensors`: on the meta device.
    """
    own = [
        Unit(name, meta_model.shards(name, tensor)) for name, tensor in meta_model.tensors.items()
    ]
    return own + [
        Unit(name, [_extra_shard(name, tensor)], is_extra=True)
        for name, tensor in extra_tensors.items()
    ]


class Writer:
    """Writes a checkpoint's folder a file at a time. Files of an interrupted process are kept.

    `files`: the units of each file. `read`: returns a unit's tensor, in memory.
    """

    def __init__(
        self,
        folder: Path,
        meta_model: MetaModel,
        files: Sequence[Sequence[Unit]],
        read: Callable[[Unit], torch.Tensor],
    ):
        self._folder = folder
        self._meta_model = meta_model
        self._read = read
        self._planner = _Planner(self._tensor)
        self._storage = FileSystemWriter(folder)
        self._storage.set_up_storage_writer(True)
        self._objects = {each.unique_key: each.data for each in meta_model.objects}
        objects = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        tensors = [[_item(shard) for unit in units for shard in unit.shards] for units in files]
        plans = [
            SavePlan([*(objects if not number else []), *items])
            for number, items in enumerate(tensors)
        ]
        plans, self._metadata = self._planner.create_global_plan(plans)
        self._plans = self._storage.prepare_global_plan(plans)
        shard_keys = [
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
        self._owners = dict(zip(shard_keys, owners, strict=True))
        """(key, offset) of a shard → its unit, and its number in the unit."""
        self._current: tuple[Unit, list[ShardedTensor]] | None = None
        """The unit in memory: the shards of a unit are written one after the other."""

    def write(self, number: int) -> bool:
        """Write one of the files. True if it was written now, False if it existed."""
        done = self._folder / f"file-{number}.done"
        if done.exists():
            return False
        results = self._storage.write_data(self._plans[number], self._planner).wait()
        self._current = None
        # The record is renamed last: an interrupted file has no record and is written again.
        partial = done.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(results))
        partial.replace(done)
        return True

    def finish(self, common: dict[str, Any]) -> None:
        """Write the checkpoint's metadata after all files are written."""
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
                [_extra_shard(unit.name, tensor)]
                if unit.is_extra
                else self._meta_model.shards(unit.name, tensor, unit.adam)
            )
            self._current = unit, shards
        shard = self._current[1][number]
        assert shard.data is not None
        return shard.data.reshape(
            (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        ).contiguous()


class _Planner(DefaultSavePlanner):
    """torch's planner with tensors that are made when they are written."""

    def __init__(self, tensor: Callable[[WriteItem], torch.Tensor | io.BytesIO]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensor = tensor

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._tensor(write_item)


class Checkpoint:
    """A folder in torch_dist format, of any parallel layout.

    Raises: DataError if it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._reader = FileSystemReader(folder)
            self._stored: Metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._stored, True)
            self.names = StoredNames(self._stored.state_dict_metadata)
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
        """The arguments that are stored in the checkpoint."""
        return self.common.get("args")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights. Raises: DataError if this is not a Megatron language model."""
        entry = self._stored.state_dict_metadata.get(_WEIGHT)
        if not isinstance(entry, TensorStorageMetadata):
            raise DataError(
                "the checkpoint has no weights of a language model",
                where=str(self.folder),
                expected=_WEIGHT,
            )
        return entry.properties.dtype

    @property
    def layout(self) -> dict[str, Any]:
        """Content metadata that `MetaModel` needs to name the stored tensors."""
        layout = {
            key: value
            for key, value in (self.common.get("content_metadata") or {}).items()
            if key != "dp_cp_group"
        }
        # Megatron stacks equal layers under one name. Different layers have numbered names.
        if any(_NUMBERED_LAYER.match(name) for name in self._stored.state_dict_metadata):
            layout["non_homogeneous_layers"] = True
        return layout

    @property
    def predicts(self) -> bool:
        """True if the checkpoint has trained layers for multi-token prediction."""
        return any(name.startswith("mtp.") for name in self._stored.state_dict_metadata)

    @property
    def extra_tensors(self) -> dict[str, torch.Tensor]:
        """The extra tensors by Hugging Face name, on the meta device."""
        return {
            name.removeprefix(EXTRA_PREFIX): torch.empty(
                entry.size, dtype=entry.properties.dtype, device="meta"
            )
            for name, entry in self._stored.state_dict_metadata.items()
            if name.startswith(EXTRA_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }

    @property
    def value_head(self) -> dict[str, torch.Tensor]:
        """The value head of a critic, in place of the output layer, on the meta device.

        {} for a policy. Names as in Hugging Face's reward models.
        """
        entries = {name: self._stored.state_dict_metadata.get(key) for name, key in HEAD.items()}
        weight = entries["score.weight"]
        if not isinstance(weight, TensorStorageMetadata) or weight.size[0] != 1:
            return {}
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def tensor_sizes(self) -> dict[str, tuple[int, ...]]:
        """Key of every stored tensor → its size."""
        return {
            key: tuple(entry.size)
            for key, entry in self._stored.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read_objects(self, name: str) -> list[Any]:
        """Return the stored objects of this name, of all model parallel ranks.

        Needs open groups (`single_process_groups`).
        """
        pattern = re.compile(rf"{name}/shard_0_1")
        keys = [key for key in self._stored.state_dict_metadata if pattern.fullmatch(key)]
        request: Any = {
            key: ShardedObject(key.removesuffix("/shard_0_1"), None, (1,), (0,)) for key in keys
        }
        loaded: Any = dist_checkpointing.load(
            request, str(self.folder), strict="assume_ok_unexpected"
        )
        return [loaded[key] for key in keys]

    def read_range(self, key: str, start: int, length: int) -> torch.Tensor:
        """Return a part of a stored tensor of one dimension."""
        entry: Any = self._stored.state_dict_metadata[key]
        part = torch.empty(length, dtype=entry.properties.dtype)
        self._read_chunks([(key, ChunkStorageMetadata(torch.Size([start]), part.shape), part)])
        return part

    def read(
        self, meta_model: MetaModel, names: Sequence[str], adam: str = ""
    ) -> dict[str, torch.Tensor]:
        """Return these full tensors in the model's dtype.

        `adam`: read this float32 tensor of the optimizer instead of each parameter. Raises:
        DataError if a tensor is missing or has the wrong shape.
        """

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(tensor.shape, dtype=torch.float32 if adam else tensor.dtype)

        sharded = {
            name: meta_model.sharded(name, empty(meta_model.stored[name]), adam) for name in names
        }
        built = {
            name: tensor.build() if isinstance(tensor, ShardedTensorFactory) else tensor
            for name, tensor in sharded.items()
        }
        self._fill([shard for each in built.values() for shard in nested_values({"": each})])
        return {name: _merged(sharded[name], each) for name, each in built.items()}

    def read_extra(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return these extra tensors."""
        extra = self.extra_tensors
        shards = {
            name: _extra_shard(name, torch.empty_like(extra[name], device="cpu")) for name in names
        }
        self._fill([*shards.values()])
        return {name: shard.data for name, shard in shards.items() if shard.data is not None}

    def read_value_head(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return these tensors of the value head."""
        head = self.value_head
        shards = {
            name: ShardedTensor.from_rank_offsets(
                HEAD[name], torch.empty_like(head[name], device="cpu")
            )
            for name in names
        }
        self._fill([*shards.values()])
        return {name: shard.data for name, shard in shards.items() if shard.data is not None}

    def _fill(self, shards: list[ShardedTensor]) -> None:
        """Read the stored pieces into the shards' tensors."""
        chunks = []
        for shard in shards:
            key = self.names.key(shard.key)
            entry = self._stored.state_dict_metadata.get(key)
            chunk = _chunk(shard)
            if isinstance(entry, TensorStorageMetadata) and self._fill_flat(shard, key, entry):
                continue
            if not isinstance(entry, TensorStorageMetadata) or not _has_shape(shard, entry):
                raise DataError(
                    "the checkpoint does not hold this model's weights",
                    where=f"{self.folder}: {shard.key}",
                    found=tuple(entry.size)
                    if isinstance(entry, TensorStorageMetadata)
                    else "no tensor of this name",
                    expected=tuple(shard.global_shape),
                    do="give the directory of the checkpoint's model: --origin-hf-dir",
                )
            assert shard.data is not None
            chunks.append((key, chunk, shard.data.view(chunk.sizes)))
        self._read_chunks(chunks)

    def _fill_flat(self, shard: ShardedTensor, key: str, entry: TensorStorageMetadata) -> bool:
        """Read a tensor that Megatron-core before 0.15 stored flat; False if it is not flat.

        The optimizer state of a tensor of shape [X, Y] in x by y equal parts is then stored as
        [x, y, XY / xy].
        """
        parameter = shard.key.removeprefix("optimizer.state.").partition(".")[2]
        weight = self._stored.state_dict_metadata.get(self.names.key(parameter))
        size = tuple(entry.size)
        if not isinstance(weight, TensorStorageMetadata) or len(size) != len(weight.size) + 1:
            return False
        parts = size[:-1]
        local = [total // count for total, count in zip(weight.size, parts, strict=True)]
        if math.prod(local) != size[-1]:
            return False
        assert shard.data is not None
        chunk = _chunk(shard)
        # The first and last part of each dimension that the shard needs.
        first = [start // step for start, step in zip(chunk.offsets, local, strict=True)]
        bounds = zip(chunk.offsets, chunk.sizes, local, strict=True)
        last = [-(-(start + length) // step) for start, length, step in bounds]
        counts = [end - begin for begin, end in zip(first, last, strict=True)]
        flat = torch.empty(*counts, size[-1], dtype=entry.properties.dtype)
        self._read_chunks([(key, ChunkStorageMetadata(torch.Size([*first, 0]), flat.shape), flat)])
        rank = len(local)
        interleaved = [axis + half for axis in range(rank) for half in (0, rank)]
        joined = flat.view(*counts, *local).permute(interleaved)
        joined = joined.reshape([n * step for n, step in zip(counts, local, strict=True)])
        inside = [
            slice(start - begin * step, start - begin * step + length)
            for start, begin, step, length in zip(
                chunk.offsets, first, local, chunk.sizes, strict=True
            )
        ]
        shard.data.view(chunk.sizes).copy_(joined[tuple(inside)])
        return True

    def _read_chunks(self, chunks: list[tuple[str, ChunkStorageMetadata, torch.Tensor]]) -> None:
        """Read parts of stored tensors into tensors of the same shapes."""
        targets: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        items: list[ReadItem] = []
        for key, chunk, target in chunks:
            entry: Any = self._stored.state_dict_metadata[key]
            targets[key, tuple(chunk.offsets)] = target
            pieces = create_read_items_for_chunk_list(key, entry, [chunk])
            if sum(math.prod(item.lengths) for item in pieces) != math.prod(chunk.sizes):
                raise DataError("pieces of a weight are missing", where=f"{self.folder}: {key}")
            items += pieces
        try:
            self._reader.read_data(LoadPlan(items), _Targets(targets)).wait()
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise DataError(
                "a checkpoint file cannot be read",
                where=str(self.folder),
                found=str(error)[:600],
            ) from error


class _Targets(DefaultLoadPlanner):
    """torch's planner with the given target tensors."""

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


def _merged(sharded: Any, built: Any) -> torch.Tensor:
    if not isinstance(sharded, ShardedTensorFactory):
        return built.data
    pieces: Any = dict_list_map_outplace(lambda shard: shard.data, built)
    return sharded.merge_fn(pieces)


def _has_shape(shard: ShardedTensor, entry: TensorStorageMetadata) -> bool:
    """True if the stored tensor has the shard's global shape, or a padded vocabulary of it."""
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


def _extra_shard(name: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(f"{EXTRA_PREFIX}{name}", tensor)


def _item(shard: ShardedTensor) -> WriteItem:
    assert shard.data is not None
    chunk = _chunk(shard)
    properties = TensorProperties(dtype=shard.data.dtype)
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shard.global_shape))
    return WriteItem(MetadataIndex(shard.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
