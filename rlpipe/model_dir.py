"""The model directory of a run: checked if it is given, made once if a function makes it.

Not here: reading weights from it (the engines do).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
from pathlib import Path

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
    known: dict[str, str] = json.loads(remembered.read_text()) if remembered.is_file() else {}
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
    return path


def _require_model(directory: Path, maker: str) -> None:
    if not (directory / "config.json").is_file():
        raise ConfigError(
            "the maker left no Hugging Face model directory",
            where="model.source.maker",
            found=f"no config.json from {maker}",
            expected="config.json, *.safetensors and a tokenizer",
        )


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
