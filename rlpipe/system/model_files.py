"""Check the files of a Hugging Face model directory.

    read_object(path, key)           a JSON file of the directory
    check_files(directory, key)      config.json and the index of the weights
    check_weights(directory, key)    every file of the weights, by its header
    check_tokenizer(directory, key)  the files of the tokenizer

The checks read JSON files and safetensors headers, never weights.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError
from rlpipe.system.plain_files import open_plain, read_plain, require_plain

PREDICTION_LAYERS = ("model.mtp_layers.", "mtp.")
"""Prefixes of weights for multi-token prediction: of MiMo, of Qwen3-Next and Qwen3.5."""
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)
"""Files that can each be a whole tokenizer. The last one can name a class that needs no more."""
_FILE_NAME = re.compile(r"[^/\\\0]+\.safetensors")
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_LFS = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
_MAX_JSON_BYTES = 256 * 1024**2


def read_object(path: Path, key: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    `key`: configuration key of the directory, for errors. Raises: ConfigError with the file.
    """
    content = b""
    try:
        content = read_plain(path, at_most_bytes=_MAX_JSON_BYTES)
        value = json.loads(content)
    except OSError as error:
        raise ConfigError(
            "this file cannot be read",
            where=f"{key}: {path}",
            found=error.strerror or error,
            do="download it again",
        ) from error
    except (ValueError, RecursionError) as error:
        found = "a pointer of git-lfs" if content.startswith(_LFS) else error
        raise ConfigError(
            "not a file in JSON", where=f"{key}: {path}", found=found, do="download it again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            "not a JSON object",
            where=f"{key}: {path}",
            found=type(value).__name__,
            do="download it again",
        )
    return value


def check_files(directory: Path, key: str) -> None:
    """Check config.json, and that the index of the weights names files of this directory.

    `key`: configuration key of the directory, for errors. Raises: ConfigError with the file.
    """
    config = directory / "config.json"
    check_sizes(read_object(config, key), f"{key}: {config}")
    _indexed_files(directory, key)


def check_sizes(config: Any, where: str) -> None:
    """Check the sizes in the content of a config.json. Raises: ConfigError for a wrong one."""
    if not isinstance(config, dict):
        raise ConfigError(
            "not a JSON object", where=where, found=type(config).__name__, do="download it again"
        )
    for name in _SIZES:
        size = config.get(name)
        if size is not None and not (type(size) is int and 0 < size < 2**31):
            raise ConfigError(
                "not the size of a model",
                where=f"{where}: {name}",
                found=size,
                expected="a whole number above 0",
            )


def text_model(config: Any) -> Any:
    """Return the sizes of the text model in a config.json, which may also have a vision tower."""
    text = config.get("text_config") if isinstance(config, dict) else None
    return text if isinstance(text, dict) else config


def check_weights(directory: Path, key: str) -> None:
    """Check that the weights are complete. Reads sizes and headers only.

    Raises: ConfigError with the file that is missing, truncated, a pointer of git-lfs, or no
    safetensors file.
    """
    names = _indexed_files(directory, key) or sorted(
        path.name for path in directory.glob("*.safetensors")
    )
    if not names:
        others = sorted(
            path.name
            for path in directory.iterdir()
            if path.suffix in (".bin", ".pt", ".pth", ".gguf")
        )
        raise ConfigError(
            "the model directory has no weights",
            where=key,
            found=", ".join(others[:5]) or f"no *.safetensors in {directory}",
            expected="*.safetensors files",
            do="convert the files to safetensors"
            if others
            else "download the model again, with its weights",
        )
    for name in names:
        _check_shard(directory / name, key)


def check_tokenizer(directory: Path, key: str) -> None:
    """Check that the directory has tokenizer files. Raises: ConfigError."""
    names = [name for name in TOKENIZERS if (directory / name).exists()]
    if not names and not list(directory.glob("*.tiktoken")):
        raise ConfigError(
            "the model directory has no tokenizer",
            where=key,
            found=f"none of these files in {directory}",
            expected=", ".join(TOKENIZERS),
            do="copy the tokenizer files from the original model's directory",
        )
    for name in (*TOKENIZERS, "tokenizer_config.json"):
        path = directory / name
        if path.exists():
            read_object(path, key) if path.suffix == ".json" else _check_plain(path, key)


def _indexed_files(directory: Path, key: str) -> list[str]:
    """Return the files that the index of the weights names; [] without an index.

    Raises: ConfigError.
    """
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return []
    files = read_object(index, key).get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else set()
    # A name with a slash could lead out of the directory.
    wrong = sorted(name for name in names if not _FILE_NAME.fullmatch(name))
    if not names or wrong:
        raise ConfigError(
            "not an index of weights",
            where=f"{key}: {index}",
            found=wrong or "no weight_map",
            expected="names of files in the same directory",
        )
    return sorted(names)


def _check_shard(path: Path, key: str) -> None:
    """Check that a safetensors file has all bytes that its header names."""
    where = f"{key}: {path}"
    try:
        header, header_bytes, size_bytes = _safetensors_header(path, where)
        ends = [
            tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"
        ]
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ConfigError(
            "not a safetensors file", where=where, found=error, do="download it again"
        ) from error
    except OSError as error:
        raise ConfigError(
            "a file of the weights cannot be read",
            where=where,
            found=error.strerror or error,
            do="download it again",
        ) from error
    are_integers = all(isinstance(end, int) for end in ends)
    expected_bytes = 8 + header_bytes + max(ends, default=0) if are_integers else None
    if expected_bytes != size_bytes:
        raise ConfigError(
            "a file of the weights is cut off, or longer than its header says",
            where=where,
            found=f"{size_bytes} bytes",
            expected=None if expected_bytes is None else f"{expected_bytes} bytes",
            do="download it again",
        )


def _safetensors_header(path: Path, where: str) -> tuple[Any, int, int]:
    """Return the header, its size and the file's size, in bytes.

    The file is 8 bytes size of the header, the header in JSON, then the tensors. Raises:
    ConfigError if the file does not begin like that; errors of reading and of JSON.
    """
    with open_plain(path) as file:
        start = file.read(len(_LFS))
        size_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(start[:8], "little")
        is_pointer = start == _LFS
        if is_pointer or not 2 <= header_bytes <= min(size_bytes - 8, _MAX_HEADER_BYTES):
            raise ConfigError(
                "not the weights of a model",
                where=where,
                found="a pointer of git-lfs"
                if is_pointer
                else f"{size_bytes} bytes without a header of safetensors",
                do="download it again (git lfs pull)",
            )
        file.seek(8)
        return json.loads(file.read(header_bytes)), header_bytes, size_bytes


def _check_plain(path: Path, key: str) -> None:
    try:
        require_plain(path)
    except OSError as error:
        raise ConfigError(
            "this file cannot be read",
            where=f"{key}: {path}",
            found=error.strerror,
            do="download it again",
        ) from error
