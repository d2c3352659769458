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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlpipe.config.arguments.check import size_of
from rlpipe.config.data import EvalDataset
from rlpipe.config.guard import error_text
from rlpipe.config.hooks import hook_digest, load_hook
from rlpipe.config.model import EngineConfig, MadeModel, ModelConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.errors import ConfigError, HookError, RlpipeError
from rlpipe.system.plain_files import open_plain, read_plain, require_plain


def model_directory(model: ModelConfig, home: Path, *, seed: int) -> str:
    """The absolute path of the model directory. Raises: ConfigError if it is not one, and what the
    maker raises."""
    if isinstance(model.source, MadeModel):
        return str(_made(model.source, home / "models", seed))
    return str(given_directory(model.source.hf_checkpoint, "model.source.hf_checkpoint"))


def model_fingerprint(model_dir: str, remembered: Path) -> str:
    """sha256 over the contents of a model directory; a copy elsewhere is the same model, and
    nothing else is.

    Digests of files are remembered by path, size and time of change in the JSON file `remembered`,
    because weights are large.
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
    """Digests as they were noted; none if the notes cannot be read, and then they are made
    again."""
    with suppress(OSError, ValueError, RecursionError):
        known = json.loads(path.read_text())
        if isinstance(known, dict) and all(isinstance(digest, str) for digest in known.values()):
            return known
    return {}


def check_files(directory: Path, key: str) -> None:
    """Is config.json an object, and does the index of the weights, if there is one, name files of
    this directory?

    Raises: ConfigError naming the file.
    """
    config = directory / "config.json"
    check_sizes(read_object(config, key), f"{key}: {config}")
    _indexed(directory, key)


def check_weights(directory: Path, key: str) -> None:
    """Are the weights here, and whole? Only sizes and headers are read.

    Raises: ConfigError naming the file that is missing, cut off, a pointer of git-lfs, or no
    safetensors file.
    """
    names = _indexed(directory, key) or sorted(
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
            do="convert them to safetensors"
            if others
            else "download the model again, with its weights",
        )
    for name in names:
        _check_shard(directory / name, key)


def check_tokenizer(directory: Path, key: str) -> None:
    """Is there a tokenizer that transformers may know? Raises: ConfigError."""
    found = [name for name in TOKENIZERS if (directory / name).exists()] or list(
        directory.glob("*.tiktoken")
    )
    if not found:
        raise ConfigError(
            "the model directory has no tokenizer",
            where=key,
            found=f"none of these files in {directory}",
            expected=", ".join(TOKENIZERS),
            do="copy the tokenizer's files from the directory that the model was made from",
        )
    for name in (*TOKENIZERS, "tokenizer_config.json"):
        path = directory / name
        if path.exists():
            read_object(path, key) if path.suffix == ".json" else _plain(path, key)


def check_stop_ids(rollout: RolloutConfig, datasets: Sequence[EvalDataset], directory: str) -> None:
    """Raises: ConfigError for a stop token that the model does not have: no response would ever end
    by it."""
    config = read_object(Path(directory) / "config.json", "model.source")
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    given = {"rollout.rollout_stop_token_ids": rollout.rollout_stop_token_ids}
    given |= {
        f"evaluation.datasets.{n}.stop_token_ids": one.stop_token_ids or ()
        for n, one in enumerate(datasets)
    }
    for key, ids in given.items():
        if isinstance(size, int) and (beyond := [token for token in ids if token >= size]):
            raise ConfigError(
                "the model has no such token",
                where=key,
                found=", ".join(map(str, beyond)),
                expected=f"ids from 0 to {size - 1}: vocab_size in {directory}/config.json is {size}",
            )


def model_context_len(model: Mapping[str, Any]) -> int | None:
    """Longest prompt + response that a model reads, by the content of its config.json; None if the
    file does not say."""
    text = model.get("text_config")
    for part in (model, text if isinstance(text, dict) else {}):
        if isinstance(found := part.get("max_position_embeddings"), int):
            return found
    return None


def prompt_context_len(
    sampling: RolloutConfig, model: Mapping[str, Any], *, evaluation: bool = False
) -> int | None:
    """The model's context, where a prompt must fit into it: not where a function of the user may
    ask with another prompt."""
    whole = sampling.eval_function_path if evaluation else None
    functions = (sampling.custom_generate_function_path, sampling.rollout_function_path, whole)
    return None if any(functions) else model_context_len(model)


def check_context_len(
    engine: EngineConfig, rollout: RolloutConfig, datasets: Sequence[EvalDataset], directory: str
) -> None:
    """Refuse a context that is longer than the model's.

    A sample never has more tokens than `max_position_embeddings`, because the trainer and the
    engines take the positions that a model knows from its config.json. A larger number would have
    no effect, so it is refused rather than ignored. SGLang 0.5.21 refuses a larger `context_length`
    too, but only when an engine starts, and not at all where
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is set: then the engine reads positions that the model
    was not trained on.

    Raises: ConfigError naming the key.
    """
    longest = model_context_len(read_object(Path(directory) / "config.json", "model.source"))
    context_length = engine.sglang.get("context_length")
    given = {
        "engine.sglang.context_length": None if context_length is None else size_of(context_length),
        "rollout.rollout_max_context_len": rollout.rollout_max_context_len,
    }
    given |= {
        f"evaluation.datasets.{n}.max_context_len": one.max_context_len
        for n, one in enumerate(datasets)
    }
    for key, found in given.items():
        if longest is not None and found is not None and found > longest:
            raise ConfigError(
                "the context is longer than the model's",
                where=key,
                found=f"{found} tokens",
                expected=f"at most {longest}, which is max_position_embeddings in {directory}/config.json",
                do="set a smaller number or leave the key out; to use a longer context, write max_position_embeddings, and "
                "the rope_scaling that the model's authors give for it, into a copy of the model directory",
            )


def _indexed(directory: Path, key: str) -> list[str]:
    """The files that the index of the weights names; none without an index. Raises: ConfigError."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return []
    files = read_object(index, key).get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else set()
    if not names or not all(map(_BESIDE.fullmatch, names)):
        found = sorted(name for name in names if not _BESIDE.fullmatch(name)) or "no weight_map"
        raise ConfigError(
            "not an index of weights",
            where=f"{key}: {index}",
            found=found,
            expected="names of files beside it",
        )
    return sorted(names)


def _check_shard(path: Path, key: str) -> None:
    """A safetensors file: eight bytes with the header's length, the header, then all bytes that the
    header promises."""
    where = f"{key}: {path}"
    try:
        with open_plain(path) as file:
            start = file.read(len(_LFS))
            size_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(start[:8], "little")
            if start == _LFS or not 2 <= length <= min(size_bytes - 8, _LONGEST_HEADER_BYTES):
                found = (
                    "a pointer of git-lfs"
                    if start == _LFS
                    else f"{size_bytes} bytes without a header of safetensors"
                )
                raise ConfigError(
                    "not the weights of a model",
                    where=where,
                    found=found,
                    do="download it again (git lfs pull)",
                )
            file.seek(8)
            header = json.loads(file.read(length))
        ends = [
            tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            "not a safetensors file", where=where, found=error, do="download it again"
        ) from error
    except OSError as error:
        found = error.strerror or error
        raise ConfigError(
            "a file of the weights cannot be read", where=where, found=found, do="download it again"
        ) from error
    if (
        not all(isinstance(end, int) for end in ends)
        or 8 + length + max(ends, default=0) != size_bytes
    ):
        raise ConfigError(
            "a file of the weights is cut off, or longer than its header says",
            where=where,
            found=f"{size_bytes} bytes",
            expected=f"{8 + length + max(ends, default=0)} bytes"
            if all(isinstance(end, int) for end in ends)
            else None,
            do="download it again",
        )


def check_sizes(config: Any, where: str) -> None:
    """Raises: ConfigError for a config.json in which a size, if it is there, is no size."""
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


_BESIDE = re.compile(r"[^/\\\0]+\.safetensors")
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)
"""Files of which each can be a tokenizer, with or without the others; the last names a class that
needs no more."""
_LFS = b"version https://git-lfs"
_LONGEST_HEADER_BYTES = 100_000_000
"""As the safetensors library has it."""
_LONGEST_JSON_BYTES = 256 * 1024**2


def _plain(path: Path, key: str) -> None:
    try:
        require_plain(path)
    except OSError as error:
        raise ConfigError(
            "this file cannot be read",
            where=f"{key}: {path}",
            found=error.strerror,
            do="download it again",
        ) from error


def read_object(path: Path, key: str) -> dict[str, Any]:
    """Read a JSON object from a file. `key`: what names the directory, for errors. Raises:
    ConfigError naming the file."""
    content = b""
    try:
        content = read_plain(path, at_most_bytes=_LONGEST_JSON_BYTES)
        found = json.loads(content)
    except OSError as error:
        found = error.strerror or error
        raise ConfigError(
            "this file cannot be read", where=f"{key}: {path}", found=found, do="download it again"
        ) from error
    except (ValueError, RecursionError) as error:
        found = "a pointer of git-lfs" if content.startswith(_LFS) else error
        raise ConfigError(
            "not a file in JSON", where=f"{key}: {path}", found=found, do="download it again"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            "not a JSON object",
            where=f"{key}: {path}",
            found=type(found).__name__,
            do="download it again",
        )
    return found


def given_directory(hf_checkpoint: str, key: str) -> Path:
    """A model directory that a key names. Raises: ConfigError if it is not one."""
    path = Path(os.path.expanduser(hf_checkpoint)).absolute()  # noqa: PTH111 - leaves "~somebody" where pathlib raises
    if not os.path.lexists(path / "config.json"):
        raise ConfigError(
            "not a Hugging Face model directory",
            where=key,
            found=f"no config.json in {path}" if path.is_dir() else f"no directory {path}",
            expected="a directory with config.json, *.safetensors and a tokenizer",
            do="download the model first, for instance with `huggingface-cli download`",
        )
    check_files(path, key)
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
    """The directory of this maker with these arguments and this source code; made in a neighbour,
    then renamed."""
    function = load_hook(source.maker)
    recipe = [source.maker.rpartition(":")[2], hook_digest(source.maker), source.arguments, seed]
    name = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    target = folder / name
    partial = folder / f"{name}.partial-{os.getpid()}"
    if not target.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        seeded = {"seed": seed} if "seed" in inspect.signature(function).parameters else {}
        try:
            function(partial, **{**seeded, **source.arguments})
            _require_model(partial, source.maker)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, Exception) and not isinstance(
                error, RlpipeError
            ):  # the maker is the user's
                where = f"model.source.maker: {source.maker}"
                raise HookError("the maker failed", where=where, found=error_text(error)) from error
            raise
        try:
            partial.rename(target)
        except OSError:
            shutil.rmtree(partial)
            if not target.is_dir():
                raise
    return target
