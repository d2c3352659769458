"""Read and write the files of a Hugging Face directory.

`HfWeights` reads one tensor at a time. `small_files`, `pack`, `unpack` and `carry` handle
configuration and tokenizer. `write_file` and `write_index` write safetensors. `different` compares
two directories. FP8 weights with a scale per block (`…weight_scale_inv`, DeepSeek's format) and
MXFP4 weights (`…_blocks`, `…_scales`) are read dequantised.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlpipe.engines.megatron.bridges.weight_files import (
    INDEX,
    MXFP4_SUFFIXES,
    SCALE_SUFFIX,
    from_blocks,
    from_mxfp4,
)
from rlpipe.errors import ConfigError, DataError
from rlpipe.system.tensor_files import save_tensors

CARRIED = "huggingface.zip"
"""Archive in a checkpoint's folder with the small files of the model's directory."""
_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".distcp",
)
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class HfWeights:
    """The tensors of a directory's safetensors by name.

    Raises: ConfigError if there are none; DataError for a broken file.
    """

    def __init__(self, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """`dtype`: dtype of dequantised weights."""
        self._directory = Path(directory)
        self._dtype = dtype
        self._headers: dict[str, tuple[Path, dict[str, Any]]] = {}
        for path in self.files():
            self._headers |= {name: (path, entry) for name, entry in _header(path).items()}
        if not self._headers:
            raise ConfigError(
                "no weights in this directory", where=str(directory), expected="*.safetensors files"
            )

    def files(self) -> list[Path]:
        """Return the model's safetensors files: those of the index, if there is one."""
        index = self._directory / INDEX
        if not index.is_file():
            return sorted(self._directory.glob("*.safetensors"))
        try:
            names = sorted(
                {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                "not an index of safetensors", where=str(index), found=repr(error)
            ) from error
        # A path in the index could read outside of the directory.
        if outside := [name for name in names if Path(name).name != name]:
            raise DataError(
                "the index names a file of another directory",
                where=str(index),
                found=", ".join(outside),
            )
        if missing := [name for name in names if not (self._directory / name).is_file()]:
            raise ConfigError(
                "the index names a file that does not exist",
                where=str(index),
                found=", ".join(missing),
                do="download it again",
            )
        return [self._directory / name for name in names]

    @cached_property
    def names(self) -> list[str]:
        """Names of all tensors. Quantised weights have the names of the dequantised ones."""
        blocks, scales = MXFP4_SUFFIXES
        return [
            whole if self._has_mxfp4(whole := name.removesuffix(blocks)) else name
            for name in self._headers
            if not (
                (name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in self._headers)
                or (name.endswith(scales) and self._has_mxfp4(name.removesuffix(scales)))
            )
        ]

    def _has_mxfp4(self, name: str) -> bool:
        return all(f"{name}{suffix}" in self._headers for suffix in MXFP4_SUFFIXES)

    def __contains__(self, name: str) -> bool:
        return name in self._headers or self._has_mxfp4(name)

    def meta(self, name: str) -> torch.Tensor:
        """Return a tensor as `read` would, on the meta device."""
        if self._has_mxfp4(name):
            *experts, rows, blocks, _ = self._headers[f"{name}{MXFP4_SUFFIXES[0]}"][1]["shape"]
            return torch.empty(*experts, 32 * blocks, rows, dtype=self._dtype, device="meta")
        entry = self._headers[name][1]
        dtype = self._dtype if f"{name}{SCALE_SUFFIX}" in self._headers else _DTYPES[entry["dtype"]]
        return torch.empty(entry["shape"], dtype=dtype, device="meta")

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor in memory, or the part with index 3 of NAME for `NAME[3]`.

        Raises: DataError if it is missing, or FP8 without scales.
        """
        whole, bracket, part = name.partition("[")
        if self._has_mxfp4(whole):
            names = (f"{whole}{suffix}{bracket}{part}" for suffix in MXFP4_SUFFIXES)
            return from_mxfp4(*map(self._stored, names)).to(self._dtype)
        tensor = self._stored(name)
        if f"{name}{SCALE_SUFFIX}" not in self._headers:
            if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                raise DataError(
                    "an FP8 weight has no scales",
                    where=str(self._directory),
                    found=name,
                    expected=f"a tensor {name}{SCALE_SUFFIX}",
                )
            return tensor
        return from_blocks(tensor, self._stored(f"{name}{SCALE_SUFFIX}")).to(self._dtype)

    def _stored(self, name: str) -> torch.Tensor:
        whole, bracket, part = name.partition("[")
        if whole not in self._headers:
            raise DataError("a weight is missing", where=str(self._directory), expected=name)
        path = self._headers[whole][0]
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                if bracket:
                    return file.get_slice(whole)[int(part.removesuffix("]"))].clone()
                return file.get_tensor(name).clone()
        except SafetensorError as error:
            raise DataError(
                "not a safetensors file", where=str(path), found=error, do="download it again"
            ) from error


def small_files(directory: str | Path) -> list[Path]:
    """Return the files of a model without its weights: configuration, tokenizer, template, code."""
    return sorted(
        path
        for path in Path(directory).iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith((*_WEIGHTS, ".md"))
        and path.name != CARRIED
    )


def pack(directory: str | Path, target: Path) -> None:
    """Write the small files of a directory as an archive, with reproducible bytes."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in small_files(directory):
            # A new ZipInfo has a fixed time stamp.
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)


def unpack(archive: Path, directory: Path) -> None:
    """Extract an archive of `pack`. Raises: DataError if it is none."""
    try:
        with zipfile.ZipFile(archive) as opened:
            names = opened.namelist()
            # A path in the archive could write outside of the directory.
            if paths := [name for name in names if Path(name).name != name]:
                raise DataError(
                    "not an archive of a model's files",
                    where=str(archive),
                    found=f"a path: {paths[0]}",
                )
            opened.extractall(directory)
    except zipfile.BadZipFile as error:
        raise DataError("not an archive", where=str(archive), found=str(error)) from error


def carry(directory: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy the small files, and set config.json's dtype to that of unquantised weights."""
    for path in small_files(directory):
        shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    original = dict(config)
    config.pop("quantization_config", None)
    dtype_name = str(dtype).removeprefix("torch.")
    config |= {key: dtype_name for key in ("torch_dtype", "dtype") if key in config}
    if config != original:
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def classify_sequences(directory: Path) -> None:
    """Make config.json that of a reward model: AutoModelForSequenceClassification, one label."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    names = [
        name.replace("ForCausalLM", "ForSequenceClassification")
        for name in config.get("architectures") or []
    ]
    end = config.get("eos_token_id")
    pad = config.get("pad_token_id")
    config |= {
        "architectures": names,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        # transformers finds the last token of a padded sequence by this id.
        "pad_token_id": pad if pad is not None else end[0] if isinstance(end, list) else end,
    }
    path.write_text(json.dumps(config, indent=2) + "\n")


def file_names(number: int) -> list[str]:
    """Return Hugging Face's names of `number` safetensors files."""
    return (
        ["model.safetensors"]
        if number == 1
        else [f"model-{i + 1:05d}-of-{number:05d}.safetensors" for i in range(number)]
    )


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one safetensors file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(path)


def write_index(directory: Path, files: Mapping[str, Sequence[str]], total_bytes: int) -> None:
    """Write the index of more than one file. `files`: the tensors in each."""
    if len(files) == 1:
        return
    file_of = {name: file for file, names in files.items() for name in names}
    content = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    (directory / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def different(first: str | Path, second: str | Path) -> Iterator[str]:
    """Yield one line for each tensor that differs in two directories."""
    weights = HfWeights(first)
    other_weights = HfWeights(second)
    for name in sorted({*weights.names, *other_weights.names}):
        if name not in weights or name not in other_weights:
            yield f"{name}: only in {first if name in weights else second}"
            continue
        tensor = weights.read(name)
        other = other_weights.read(name)
        if not same_bits(tensor, other):
            yield f"{name}: {_summary(tensor)} and {_summary(other)}"


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if both have equal shape, dtype and bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(
        first.contiguous().view(-1).view(torch.uint8),
        second.contiguous().view(-1).view(torch.uint8),
    )


def _summary(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: 8 bytes of length, then JSON.

    Raises: DataError for a broken header or a truncated file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            # Without this check a damaged length would allocate any amount of memory.
            if length > size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            content = {
                name: entry
                for name, entry in json.loads(file.read(length)).items()
                if name != "__metadata__"
            }
            end = (
                8
                + length
                + max((int(entry["data_offsets"][1]) for entry in content.values()), default=0)
            )
            if invalid := [
                entry
                for entry in content.values()
                if entry["dtype"] not in _DTYPES or not _is_shape(entry["shape"])
            ]:
                raise ValueError(f"an entry {invalid[0]}")
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise DataError(
                "not a safetensors file", where=str(path), found=repr(error), do="download it again"
            ) from error
    # A truncated download has a complete header.
    if end != size:
        raise DataError(
            "a safetensors file is cut off",
            where=str(path),
            found=f"{size} bytes",
            expected=f"{end} bytes",
        )
    return content


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(length, int) and length >= 0 for length in value
    )
