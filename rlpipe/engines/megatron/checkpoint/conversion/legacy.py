"""Megatron's older `torch` format: a file for each model parallel rank, with the part of the model
that this rank had.

    iter_0000100/mp_rank_{tensor:02d}[_{pipeline:03d}][_{expert:03d}]/model_optim_rng.pt

The files are mapped, not read: only the tensors that are asked for come into memory. Not here:
writing it.
"""

from __future__ import annotations

import pickle
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core.safe_globals import register_safe_globals

from rlpipe.engines.megatron.checkpoint.conversion.skeleton import Skeleton
from rlpipe.errors import DataError

_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.local_experts\.|\.experts\.linear_fc\d\.(?:weight|bias))(\d+)")
_NAMES = ("model_optim_rng.pt", "model_rng.pt")


@dataclass
class _Pieces:
    """A tensor's parts, by tensor parallel rank."""

    by_rank: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def in_order(self) -> list[torch.Tensor]:
        return [self.by_rank[rank] for rank in sorted(self.by_rank)]


class LegacyCheckpoint:
    """A folder with `mp_rank_…` folders, of any parallel layout. Raises: DataError if files are
    missing or broken."""

    passengers: dict[str, torch.Tensor]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passengers = {}
        self.layout: dict[str, Any] = {}
        found = [match for path in folder.iterdir() if (match := _FOLDER.fullmatch(path.name))]
        self._states = {
            match: mapped(folder / match.group())
            for match in sorted(found, key=lambda match: match.group())
        }
        first: Any = next(iter(self._states.values()), {})
        self.args: Namespace | None = first.get("args")
        self._sizes = {
            name: int(getattr(self.args, f"{name}_model_parallel_size", 1) or 1)
            for name in ("pipeline", "expert")
        }
        self._require_all()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(
            pieces.in_order[0].dtype
            for name, pieces in self._tensors.items()
            if name.endswith("final_layernorm.weight")
        )

    def read(self, skeleton: Skeleton, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """These tensors of the model, whole, in the model's dtype. Raises: DataError if they are
        not there or do not fit."""
        return {name: self._whole(skeleton, name) for name in names}

    def read_passengers(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """There are none in this format."""
        assert not names
        return {}

    def _whole(self, skeleton: Skeleton, name: str) -> torch.Tensor:
        theirs = skeleton.theirs[name]
        expected = skeleton.tensors[name]
        parameter: Any = skeleton.parameter(name)
        pieces = self._tensors.get(name) or self._tensors.get(theirs)
        if pieces is None:
            raise DataError(
                "a weight is missing", where=str(self.folder), expected=f"{name} or {theirs}"
            )
        parts = pieces.in_order
        if len(parts) > 1 and getattr(parameter, "tensor_model_parallel", False):
            bridge = skeleton.bridge
            before = skeleton.bridge.mpu
            bridge.mpu = replace(before, tp_size=len(parts), etp_size=len(parts))
            try:
                whole = bridge._weight_merge_across_tp(theirs, parts, parameter)
            finally:
                bridge.mpu = before
        else:
            whole = parts[0]
        if whole.shape != expected.shape and theirs in (
            "embedding.word_embeddings.weight",
            "output_layer.weight",
        ):
            whole = whole[: expected.shape[0]]
        if whole.shape != expected.shape:
            found = tuple(whole.shape)
            fits = tuple(expected.shape)
            raise DataError(
                "a weight does not fit the model",
                where=f"{self.folder}: {name}",
                found=found,
                expected=fits,
            )
        return whole.to(expected.dtype, copy=True).contiguous()

    @cached_property
    def _tensors(self) -> dict[str, _Pieces]:
        """Every tensor by its name in the whole model."""
        tensors: dict[str, _Pieces] = {}
        for (first_layer, first_expert, rank), state in self._chunks():
            for name, tensor in state.items():
                if isinstance(tensor, torch.Tensor):
                    whole = _renumbered(name.removeprefix("module."), first_layer, first_expert)
                    tensors.setdefault(whole, _Pieces()).by_rank.setdefault(rank, tensor)
        return tensors

    def _chunks(self) -> list[tuple[tuple[int, int, int], dict[str, Any]]]:
        """(first layer, first expert, tensor parallel rank) of each part of the model, and its
        state."""
        found = []
        first_layer = 0
        chunks = {
            key
            for state in self._states.values()
            for key in state
            if re.fullmatch(r"model\d*", key)
        }
        virtual = sorted(chunks, key=lambda key: int(key.removeprefix("model") or 0))
        for chunk in virtual:
            for stage in range(self._sizes["pipeline"]):
                here = [
                    (match, state[chunk])
                    for match, state in self._states.items()
                    if self._stage(match) == stage
                ]
                for match, state in here:
                    experts = 1 + max(
                        (int(m[2]) for name in state if (m := _EXPERT.search(name))), default=-1
                    )
                    found.append(
                        ((first_layer, experts * self._expert(match), int(match[1])), state)
                    )
                first_layer += 1 + max(
                    (int(m[1]) for name in here[0][1] if (m := _LAYER.match(name))), default=-1
                )
        return found

    def _stage(self, match: re.Match[str]) -> int:
        return int(match[2]) if self._sizes["pipeline"] > 1 else 0

    def _expert(self, match: re.Match[str]) -> int:
        if self._sizes["expert"] == 1:
            return 0
        return int(match[3] if self._sizes["pipeline"] > 1 else match[2])

    def _require_all(self) -> None:
        own: Any = self.args
        tensor = int(
            getattr(own, "tensor_model_parallel_size", len({match[1] for match in self._states}))
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
            and (getattr(own, "expert_tensor_parallel_size", None) or tensor) != tensor
        ):
            raise DataError(
                "experts that are divided otherwise than the rest cannot be told apart in this format",
                where=str(self.folder),
                found=f"expert_tensor_parallel_size {own.expert_tensor_parallel_size} of {tensor}",
                do="load it in its own layout: torchrun tools/convert_to_hf.py",
            )


def mapped(folder: Path) -> dict[str, Any]:
    """What a rank saved in this folder, its tensors in mapped memory. Raises: DataError."""
    register_safe_globals()
    path = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    if path is None:
        raise DataError("no weights of a rank", where=str(folder), expected=" or ".join(_NAMES))
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(
            "a file of a checkpoint cannot be read", where=str(path), found=str(error)[:600]
        ) from error


def _renumbered(name: str, first_layer: int, first_expert: int) -> str:
    name = _LAYER.sub(lambda m: f"decoder.layers.{int(m[1]) + first_layer}.", name)
    return _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)
