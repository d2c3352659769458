"""The tensors of a Hugging Face directory, one at a time: by name from whichever file holds them,
FP8 made whole.

FP8 as DeepSeek-V3 has it (`quant_method: fp8`, blocks of 128 × 128): a matrix in e4m3 beside its
float32 factors,

    weight[i, j] = e4m3[i, j] · weight_scale_inv[i // 128, j // 128]

Not here: the names of Megatron's parameters, and writing (`export`).
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
SCALE = "_scale_inv"
INDEX = "model.safetensors.index.json"


class WeightFiles(SafeTensorIO):
    """A directory's safetensors. Files stay mapped, not read: what one answer holds is what was
    asked for."""

    def __init__(self, directory: str) -> None:
        """Reads the index, or the names in every file. Raises: ConfigError if there are no
        weights."""
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
        """Of all tensors but the factors of quantised ones."""
        return [name for name in self._file_of if not self._is_factor(name)]

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, torch.Tensor]:
        """Tensors by name, on the CPU; quantised ones in bf16. Raises: ConfigError naming those
        that are not there."""
        missing = [name for name in hf_weight_names if name not in self._file_of]
        if missing:
            raise ConfigError(
                "weights are missing",
                where=str(self._folder),
                found=f"{len(self._file_of)} tensors without {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}",
                expected="all weights of the model that config.json describes",
            )
        return {name: self._tensor(name) for name in hf_weight_names}

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._stored(name)
        if tensor.dtype != torch.float8_e4m3fn:
            return tensor
        if f"{name}{SCALE}" not in self._file_of:
            raise ConfigError(
                "a matrix in FP8 has no factors",
                where=f"{self._folder}: {name}",
                expected=f"{name}{SCALE}",
            )
        return from_blocks(tensor, self._stored(f"{name}{SCALE}")).to(torch.bfloat16)

    def _stored(self, name: str) -> torch.Tensor:
        return self._opened(self._file_of[name]).get_tensor(name)

    def _is_factor(self, name: str) -> bool:
        return name.endswith(SCALE) and name.removesuffix(SCALE) in self._file_of

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
                where = str(self._folder / file)
                raise ConfigError(
                    "not a safetensors file", where=where, found=error, do="download it again"
                ) from error
        return self._open[file]

    def _names_in(self, file: str) -> list[str]:
        return list(self._opened(file).keys())

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("*.safetensors"))


def from_blocks(weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """[rows, columns] e4m3 and float32 [ceil(rows / 128), ceil(columns / 128)] → [rows, columns]
    float32."""
    factors = scale_inv.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * factors[: weight.shape[0], : weight.shape[1]]
