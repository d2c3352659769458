"""`WeightFiles`: the tensors of a Hugging Face directory by name, for mbridge.

FP8 weights of DeepSeek-V3's format (`quant_method: fp8`, blocks of 128 × 128) are dequantised: an
e4m3 matrix has a tensor of float32 scales,

    weight[i, j] = e4m3[i, j] · weight_scale_inv[i // 128, j // 128]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core.safetensor_io import SafeTensorIO

from rlpipe.errors import ConfigError
from rlpipe.model_dir import check_files

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
INDEX = "model.safetensors.index.json"


class WeightFiles(SafeTensorIO):
    """A directory's safetensors. Files are memory-mapped: only requested tensors use memory."""

    def __init__(self, directory: str) -> None:
        """Read the index, or the names in every file.

        Raises: ConfigError if there are no weights.
        """
        check_files(Path(directory), "model")
        super().__init__(directory)
        self._folder = Path(directory)
        self._open = {}
        self._file_of = self.index or {
            name: path.name for path in self._paths() for name in self._names_in(path.name)
        }
        if not self._file_of:
            raise ConfigError(
                "no weights in this directory", where=directory, expected="*.safetensors files"
            )

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors except the scales of FP8 weights."""
        return [name for name in self._file_of if not self._is_scale(name)]

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, torch.Tensor]:
        """Return tensors by name, on the CPU; FP8 weights in bf16.

        Raises: ConfigError with the names of missing tensors.
        """
        missing = [name for name in hf_weight_names if name not in self._file_of]
        if missing:
            first = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
            raise ConfigError(
                "weights are missing",
                where=str(self._folder),
                found=f"{len(self._file_of)} tensors without {first}",
                expected="all weights of the model that config.json describes",
            )
        return {name: self._tensor(name) for name in hf_weight_names}

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._stored(name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        if f"{name}{SCALE_SUFFIX}" not in self._file_of:
            raise ConfigError(
                "an FP8 weight has no scales",
                where=f"{self._folder}: {name}",
                expected=f"{name}{SCALE_SUFFIX}",
            )
        return from_blocks(tensor, self._stored(f"{name}{SCALE_SUFFIX}")).to(torch.bfloat16)

    def _stored(self, name: str) -> torch.Tensor:
        return self._opened(self._file_of[name]).get_tensor(name)

    def _is_scale(self, name: str) -> bool:
        return name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in self._file_of

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            if not (self._folder / file).is_file():
                raise ConfigError(
                    "a file of the index is missing",
                    where=str(self._folder / INDEX),
                    found=f"no {file}",
                )
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt", device="cpu")
            except SafetensorError as error:
                raise ConfigError(
                    "not a safetensors file",
                    where=str(self._folder / file),
                    found=error,
                    do="download it again",
                ) from error
        return self._open[file]

    def _names_in(self, file: str) -> list[str]:
        return list(self._opened(file).keys())

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("*.safetensors"))


def from_blocks(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """Return the float32 values [rows, columns] of an FP8 weight.

    Shapes: weight [rows, columns] e4m3; scale_inv [ceil(rows / 128), ceil(columns / 128)].
    """
    scales = scale_inv.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * scales[: weight.shape[0], : weight.shape[1]]
