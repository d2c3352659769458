"""`WeightFiles`: the tensors of a Hugging Face directory by name, for mbridge.

`NAME[3]` is the part with index 3 of a tensor NAME, which gpt-oss uses for experts. Quantised
weights are dequantised to bf16. FP8 weights of DeepSeek-V3's format (`quant_method: fp8`, blocks of
128 × 128): an e4m3 matrix has a tensor of float32 scales,

    weight[i, j] = e4m3[i, j] · weight_scale_inv[i // 128, j // 128]

MXFP4 weights of gpt-oss (`quant_method: mxfp4`): a matrix [columns, rows] of a file's tensor is
stored by its rows, in blocks of 32 numbers of 4 bits with one exponent,

    weight[32 b + k, i] = FP4[blocks[i, b, k]] · 2^(scales[i, b] - 127)
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
from rlpipe.system.model_files import check_files

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
INDEX = "model.safetensors.index.json"
MXFP4_SUFFIXES = ("_blocks", "_scales")
# The numbers of 4 bits: 1 bit of sign, 2 of exponent, 1 of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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
        """Names of all tensors. Quantised weights have the names of the dequantised ones."""
        return [
            whole if self._has_mxfp4(whole := name.removesuffix(MXFP4_SUFFIXES[0])) else name
            for name in self._file_of
            if not self._is_scale(name)
        ]

    def load_some_hf_weight(self, hf_weight_names: list[str]) -> dict[str, torch.Tensor]:
        """Return tensors by name, on the CPU; quantised weights in bf16.

        Raises: ConfigError with the names of missing tensors.
        """
        missing = [name for name in hf_weight_names if not self._has(name.partition("[")[0])]
        if missing:
            first = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
            raise ConfigError(
                "weights are missing",
                where=str(self._folder),
                found=f"{len(self._file_of)} tensors without {first}",
                expected="all weights of the model that config.json describes",
            )
        return {name: self._tensor(name) for name in hf_weight_names}

    def _has(self, name: str) -> bool:
        return name in self._file_of or self._has_mxfp4(name)

    def _has_mxfp4(self, name: str) -> bool:
        return all(f"{name}{suffix}" in self._file_of for suffix in MXFP4_SUFFIXES)

    def _tensor(self, name: str) -> torch.Tensor:
        whole, bracket, number = name.partition("[")
        part = f"[{number}" if bracket else ""
        if whole not in self._file_of:
            blocks, scales = (self._stored(f"{whole}{suffix}{part}") for suffix in MXFP4_SUFFIXES)
            return from_mxfp4(blocks, scales)
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
        whole, bracket, number = name.partition("[")
        file = self._opened(self._file_of[whole])
        if not bracket:
            return file.get_tensor(whole)
        return file.get_slice(whole)[int(number.removesuffix("]"))]

    def _is_scale(self, name: str) -> bool:
        if name.endswith(MXFP4_SUFFIXES[1]):
            return self._has_mxfp4(name.removesuffix(MXFP4_SUFFIXES[1]))
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


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the bf16 values of MXFP4 weights.

    Shapes: blocks [..., rows, B, 16] uint8, two numbers a byte, the lower bits first; scales
    [..., rows, B] uint8; returns [..., 32 B, rows], as the file's tensor without quantisation.
    """
    values = torch.tensor((*_FP4, *(-value for value in _FP4)))
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
    scaled = torch.ldexp(values[numbers], scales.int()[..., None] - 127)
    return scaled.to(torch.bfloat16).flatten(-2).mT.contiguous()
