"""The model directory of a run: checked if it is given, made once if a function makes it.

Not here: reading weights from it (the engines do).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlpipe.config.hooks import hook_digest, load_hook
from rlpipe.config.model import HuggingFaceModel, MadeModel, ModelConfig
from rlpipe.errors import ConfigError


def model_directory(model: ModelConfig, home: Path, *, seed: int) -> str:
    """The absolute path of the model directory. Raises: ConfigError if it is not one, and what the maker raises."""
    if isinstance(model.source, MadeModel):
        return str(_made(model.source, home / "models", seed))
    return str(_given(model.source))


def model_fingerprint(model_dir: str, remembered: Path) -> str:
    """sha256 over the contents of a model directory; a copy elsewhere is the same model, and nothing else is.

    Digests of files are remembered by path, size and time of change in the JSON file `remembered`, because weights are large.
    """
    known = _remembered(remembered)
    seen = hashlib.sha256()
    for path in sorted(Path(model_dir).iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".md":
            stat = path.stat()
            key = f"{path}|{stat.st_size}|{stat.st_mtime_ns}"
            if key not in known:
                with path.open("rb") as stream:
                    known[key] = hashlib.file_digest(stream, "sha256").hexdigest()
            seen.update(f"{path.name}\0{known[key]}\0".encode())
    remembered.parent.mkdir(parents=True, exist_ok=True)
    partial = remembered.with_name(f"{remembered.name}.{os.getpid()}")
    partial.write_text(json.dumps(known, indent=1))
    partial.replace(remembered)
    return seen.hexdigest()


def _remembered(path: Path) -> dict[str, str]:
    """Digests as they were noted; none if the notes cannot be read, and then they are made again."""
    with suppress(OSError, ValueError, RecursionError):
        known = json.loads(path.read_text())
        if isinstance(known, dict) and all(isinstance(digest, str) for digest in known.values()):
            return known
    return {}


def check_files(directory: Path, key: str) -> None:
    """Is config.json an object, and does the index of the weights, if there is one, name files of this directory?

    Raises: ConfigError naming the file.
    """
    config = directory / "config.json"
    check_sizes(_object(config, key), f"{key}: {config}")
    if not (index := directory / "model.safetensors.index.json").is_file():
        return
    files = _object(index, key).get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else set()
    if not names or not all(map(_BESIDE.fullmatch, names)):
        found = sorted(name for name in names if not _BESIDE.fullmatch(name)) or "no weight_map"
        raise ConfigError("not an index of weights", where=f"{key}: {index}", found=found, expected="names of files beside it")


def check_sizes(config: Any, where: str) -> None:
    """Raises: ConfigError for a config.json in which a size, if it is there, is no size."""
    if not isinstance(config, dict):
        raise ConfigError("not a JSON object", where=where, found=type(config).__name__, do="download it again")
    for name in _SIZES:
        size = config.get(name)
        if size is not None and not (type(size) is int and 0 < size < 2**31):
            raise ConfigError("not the size of a model", where=f"{where}: {name}", found=size, expected="a whole number above 0")


_BESIDE = re.compile(r"[^/\\\0]+\.safetensors")
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")


def _object(path: Path, key: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("not a file in JSON", where=f"{key}: {path}", found=error, do="download it again") from error
    if not isinstance(found, dict):
        raise ConfigError("not a JSON object", where=f"{key}: {path}", found=type(found).__name__, do="download it again")
    return found


def _given(source: HuggingFaceModel) -> Path:
    path = Path(source.hf_checkpoint).expanduser().absolute()
    if not (path / "config.json").is_file():
        raise ConfigError(
            "not a Hugging Face model directory",
            where="model.source.hf_checkpoint",
            found=f"no config.json in {path}" if path.is_dir() else f"no directory {path}",
            expected="a directory with config.json, *.safetensors and a tokenizer",
            do="download the model first, for instance with `huggingface-cli download`",
        )
    check_files(path, "model.source.hf_checkpoint")
    return path


def _require_model(directory: Path, maker: str) -> None:
    if not (directory / "config.json").is_file():
        raise ConfigError(
            "the maker left no Hugging Face model directory",
            where="model.source.maker",
            found=f"no config.json from {maker}",
            expected="config.json, *.safetensors and a tokenizer",
        )
    check_files(directory, "model.source.maker")


def _made(source: MadeModel, folder: Path, seed: int) -> Path:
    """The directory of this maker with these arguments and this source code; made in a neighbour, then renamed."""
    function = load_hook(source.maker)
    recipe = [source.maker.rpartition(":")[2], hook_digest(source.maker), source.arguments, seed]
    name = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    target, partial = folder / name, folder / f"{name}.partial-{os.getpid()}"
    if not target.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        seeded = {"seed": seed} if "seed" in inspect.signature(function).parameters else {}
        try:
            function(partial, **{**seeded, **source.arguments})
            _require_model(partial, source.maker)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        try:
            partial.rename(target)
        except OSError:
            shutil.rmtree(partial)
            if not target.is_dir():
                raise
    return target
