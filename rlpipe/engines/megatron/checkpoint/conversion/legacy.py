"""`LegacyCheckpoint`: read Megatron's older `torch` format, a file for each model parallel rank.

    iter_0000100/mp_rank_{tensor:02d}[_{pipeline:03d}][_{expert:03d}]/model_optim_rng.pt

The files are memory-mapped: only requested tensors use memory.
"""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core.safe_globals import register_safe_globals

from rlpipe.engines.megatron.checkpoint.conversion.meta_model import MetaModel
from rlpipe.errors import DataError

_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.local_experts\.|\.experts\.linear_fc\d\.(?:weight|bias))(\d+)")
_NAMES = ("model_optim_rng.pt", "model_rng.pt")


@dataclass
class _Pieces:
    """The parts of a tensor by tensor parallel rank."""

    by_rank: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def in_order(self) -> list[torch.Tensor]:
        return [self.by_rank[rank] for rank in sorted(self.by_rank)]


class LegacyCheckpoint:
    """A folder with `mp_rank_…` folders, of any parallel layout.

    Raises: DataError if files are missing or broken.
    """

    extra_tensors: dict[str, torch.Tensor]
    """Always empty in this format."""
    predicts = False
    """Layers for multi-token prediction of this format are not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.extra_tensors = {}
        self.value_head: dict[str, torch.Tensor] = {}
        self.layout: dict[str, Any] = {}
        matches = [match for path in folder.iterdir() if (match := _FOLDER.fullmatch(path.name))]
        self._states = {
            match: rank_state(folder / match.group())
            for match in sorted(matches, key=lambda match: match.group())
        }
        first: Any = next(iter(self._states.values()), {})
        self.args: Namespace | None = first.get("args")
        self._sizes = {
            name: int(getattr(self.args, f"{name}_model_parallel_size", 1) or 1)
            for name in ("pipeline", "expert")
        }
        self._require_all_ranks()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(
            pieces.in_order[0].dtype
            for name, pieces in self._tensors.items()
            if name.endswith("final_layernorm.weight")
        )

    def read(self, meta_model: MetaModel, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return these full tensors in the model's dtype.

        Raises: DataError if a tensor is missing or has the wrong shape.
        """
        return {name: self._read_full(meta_model, name) for name in names}

    def read_extra(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return nothing: this format has no extra tensors."""
        assert not names
        return {}

    def read_value_head(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return nothing: value heads of this format are not read."""
        assert not names
        return {}

    def _read_full(self, meta_model: MetaModel, name: str) -> torch.Tensor:
        mbridge_name = meta_model.mbridge_names[name]
        expected = meta_model.tensors[name]
        pieces = self._tensors.get(name) or self._tensors.get(mbridge_name)
        if pieces is None:
            raise DataError(
                "a weight is missing", where=str(self.folder), expected=f"{name} or {mbridge_name}"
            )
        full = meta_model.merged(name, pieces.in_order)
        if full.shape != expected.shape:
            raise DataError(
                "a weight does not have the model's shape",
                where=f"{self.folder}: {name}",
                found=tuple(full.shape),
                expected=tuple(expected.shape),
            )
        return full.to(expected.dtype, copy=True).contiguous()

    @cached_property
    def _tensors(self) -> dict[str, _Pieces]:
        """Every tensor by its name in the full model."""
        tensors: dict[str, _Pieces] = {}
        for (first_layer, first_expert, rank), state in self._chunks():
            for name, tensor in state.items():
                if isinstance(tensor, torch.Tensor):
                    full_name = _renumbered(name.removeprefix("module."), first_layer, first_expert)
                    tensors.setdefault(full_name, _Pieces()).by_rank.setdefault(rank, tensor)
        return tensors

    def _chunks(self) -> list[tuple[tuple[int, int, int], dict[str, Any]]]:
        """Return the state of each part of the model, with its place in the full model.

        The place: (first layer, first expert, tensor parallel rank).
        """
        chunks = []
        first_layer = 0
        keys = {
            key
            for state in self._states.values()
            for key in state
            if re.fullmatch(r"model\d*", key)
        }
        # With virtual pipeline stages a rank has model0, model1, ... The layers of all ranks'
        # model0 come first.
        for key in sorted(keys, key=lambda key: int(key.removeprefix("model") or 0)):
            for stage in range(self._sizes["pipeline"]):
                of_stage = [
                    (match, state[key])
                    for match, state in self._states.items()
                    if self._stage(match) == stage
                ]
                for match, state in of_stage:
                    experts = 1 + max(
                        (int(m[2]) for name in state if (m := _EXPERT.search(name))), default=-1
                    )
                    offsets = (first_layer, experts * self._expert_rank(match), int(match[1]))
                    chunks.append((offsets, state))
                first_layer += 1 + max(
                    (int(m[1]) for name in of_stage[0][1] if (m := _LAYER.match(name))), default=-1
                )
        return chunks

    def _stage(self, match: re.Match[str]) -> int:
        return int(match[2]) if self._sizes["pipeline"] > 1 else 0

    def _expert_rank(self, match: re.Match[str]) -> int:
        if self._sizes["expert"] == 1:
            return 0
        # Without pipeline parallelism the folder name has no pipeline number.
        return int(match[3] if self._sizes["pipeline"] > 1 else match[2])

    def _require_all_ranks(self) -> None:
        args: Any = self.args
        tensor = int(
            getattr(args, "tensor_model_parallel_size", len({match[1] for match in self._states}))
        )
        expected = tensor * self._sizes["pipeline"] * self._sizes["expert"]
        if len(self._states) != expected or not self._states:
            raise DataError(
                "files of some ranks are missing",
                where=str(self.folder),
                found=f"{len(self._states)} folders mp_rank_…",
                expected=f"TP × PP × EP = {expected}",
            )
        if (
            self._sizes["expert"] > 1
            and (getattr(args, "expert_tensor_parallel_size", None) or tensor) != tensor
        ):
            # The folder names do not have the expert tensor parallel rank.
            raise DataError(
                "this format cannot represent a separate tensor parallel size of experts",
                where=str(self.folder),
                found=f"expert_tensor_parallel_size {args.expert_tensor_parallel_size} of {tensor}",
                do="load it in its own layout: torchrun tools/convert_to_hf.py",
            )


def rank_state(folder: Path) -> dict[str, Any]:
    """Return the state that a rank saved in this folder, memory-mapped. Raises: DataError."""
    register_safe_globals()
    path = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    if path is None:
        raise DataError(
            "the folder of a rank has no weights", where=str(folder), expected=" or ".join(_NAMES)
        )
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(
            "a checkpoint file cannot be read", where=str(path), found=str(error)[:600]
        ) from error


def _renumbered(name: str, first_layer: int, first_expert: int) -> str:
    name = _LAYER.sub(lambda m: f"decoder.layers.{int(m[1]) + first_layer}.", name)
    return _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)
