"""Find, download, make and check the model directory of a run.

`model_directory` returns the directory of `model.source`, `given_directory` that of another key,
`directory_here` the directory on the node of an actor. The `check_…` functions read configuration,
tokenizer files and safetensors headers, never weights. One file because the checks are part of
finding a directory.
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
from rlpipe.config.hooks import error_with_line, hook_digest, load_hook
from rlpipe.config.model import (
    EngineConfig,
    HuggingFaceModel,
    MadeModel,
    ModelConfig,
    ModelSource,
)
from rlpipe.config.rollout import RolloutConfig
from rlpipe.errors import ConfigError, HookError, RlpipeError
from rlpipe.system.hub import cached_model, fetched_model, model_reference
from rlpipe.system.megatron_weights import converted_directory
from rlpipe.system.plain_files import open_plain, read_plain, require_plain
from rlpipe.system.project import in_project

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


def model_directory(model: ModelConfig, home: Path, *, seed: int) -> str:
    """Return the absolute path of the model directory.

    A maker function makes it once, and a Megatron checkpoint is converted once.
    Raises: ConfigError if it is no model directory; HookError if the maker fails.
    """
    if isinstance(model.source, MadeModel):
        return str(_make(model.source, home / "models", seed))
    directory = given_directory(model.source.hf_checkpoint, "model.source.hf_checkpoint")
    if model.source.megatron_checkpoint is None:
        return str(directory)
    return str(
        converted_directory(
            Path(model.source.megatron_checkpoint).expanduser(),
            directory,
            home / "models",
            step=model.source.megatron_checkpoint_step,
            key="model.source.megatron_checkpoint",
        )
    )


def model_directory_if_present(model: ModelConfig, home: Path, *, seed: int) -> str | None:
    """Return `model_directory`; None if the model must be made, converted or downloaded first.

    Raises: as `model_directory`.
    """
    source = model.source
    if isinstance(source, MadeModel):
        present = _made_directory(source, home / "models", seed).is_dir()
    else:
        present = source.megatron_checkpoint is None and bool(
            present_directory(source.hf_checkpoint)
        )
    return model_directory(model, home, seed=seed) if present else None


def model_fingerprint(model_dir: str, cache: Path) -> str:
    """Return the sha256 of a model directory's content. A copy has the same fingerprint.

    `cache`: as in `contents_digest`.
    """
    files = [path for path in Path(model_dir).iterdir() if not path.name.startswith(".")]
    return contents_digest([path for path in files if path.suffix != ".md"], cache)


def contents_digest(paths: Sequence[Path], cache: Path) -> str:
    """Return the sha256 of the names and contents of the files among these paths.

    The JSON file `cache` keeps digests of files by path, size and time of change: weights are
    large.
    """
    known = _cached_digests(cache)
    fingerprint = hashlib.sha256()
    for path in sorted(paths):
        if path.is_file():
            stat = path.stat()
            key = f"{path}|{stat.st_size}|{stat.st_mtime_ns}"
            if key not in known:
                with path.open("rb") as stream:
                    known[key] = hashlib.file_digest(stream, "sha256").hexdigest()
            fingerprint.update(f"{path.name}\0{known[key]}\0".encode())
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_name(f"{cache.name}.{os.getpid()}")
    partial.write_text(json.dumps(known, indent=1))
    partial.replace(cache)
    return fingerprint.hexdigest()


def _cached_digests(path: Path) -> dict[str, str]:
    """Return the cached digests; {} if the cache is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        known = json.loads(path.read_text())
        if isinstance(known, dict) and all(isinstance(digest, str) for digest in known.values()):
            return known
    return {}


def check_files(directory: Path, key: str) -> None:
    """Check config.json, and that the index of the weights names files of this directory.

    `key`: configuration key of the directory, for errors. Raises: ConfigError with the file.
    """
    config = directory / "config.json"
    check_sizes(read_object(config, key), f"{key}: {config}")
    _indexed_files(directory, key)


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


def check_stop_ids(rollout: RolloutConfig, datasets: Sequence[EvalDataset], directory: str) -> None:
    """Raises: ConfigError for a stop token that the model does not have."""
    config = read_object(Path(directory) / "config.json", "model.source")
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    ids_by_key = {"rollout.rollout_stop_token_ids": rollout.rollout_stop_token_ids}
    for number, dataset in enumerate(datasets):
        key = f"evaluation.datasets.{number}.stop_token_ids"
        ids_by_key[key] = dataset.stop_token_ids or ()
    for key, ids in ids_by_key.items():
        # No response would ever end by such a token.
        if isinstance(size, int) and (unknown := [token for token in ids if token >= size]):
            raise ConfigError(
                "the model has no such token",
                where=key,
                found=", ".join(map(str, unknown)),
                expected=f"ids from 0 to {size - 1}: vocab_size in {directory}/config.json "
                f"is {size}",
            )


def model_context_len(model: Mapping[str, Any]) -> int | None:
    """Return the maximum of prompt + response in tokens; None if config.json does not give it.

    `model`: content of config.json.
    """
    text = model.get("text_config")
    for part in (model, text if isinstance(text, dict) else {}):
        if isinstance(tokens := part.get("max_position_embeddings"), int):
            return tokens
    return None


def prompt_context_len(
    sampling: RolloutConfig, model: Mapping[str, Any], *, evaluation: bool = False
) -> int | None:
    """Return the context that a prompt must fit into; None if a user function makes the prompt."""
    eval_function = sampling.eval_function_path if evaluation else None
    functions = (
        sampling.custom_generate_function_path,
        sampling.rollout_function_path,
        eval_function,
    )
    return None if any(functions) else model_context_len(model)


def check_context_len(
    engine: EngineConfig, rollout: RolloutConfig, datasets: Sequence[EvalDataset], directory: str
) -> None:
    """Refuse a context that is longer than the model's. Raises: ConfigError with the key.

    A sample never has more tokens than `max_position_embeddings`: trainer and engines take it from
    config.json. A larger number would have no effect, so it is refused. SGLang 0.5.21 refuses a
    larger `context_length` too, but only when an engine starts. With
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN it accepts positions that the model was not trained
    on.
    """
    longest = model_context_len(read_object(Path(directory) / "config.json", "model.source"))
    context_length = engine.sglang.get("context_length")
    tokens_by_key = {
        "engine.sglang.context_length": None if context_length is None else size_of(context_length),
        "rollout.rollout_max_context_len": rollout.rollout_max_context_len,
    }
    for number, dataset in enumerate(datasets):
        tokens_by_key[f"evaluation.datasets.{number}.max_context_len"] = dataset.max_context_len
    for key, tokens in tokens_by_key.items():
        if longest is not None and tokens is not None and tokens > longest:
            raise ConfigError(
                "the context is longer than the model's",
                where=key,
                found=f"{tokens} tokens",
                expected=f"at most {longest}, max_position_embeddings in {directory}/config.json",
                do="set a smaller number or remove the key; for a longer context copy the model "
                "directory, and set max_position_embeddings and the authors' rope_scaling in it",
            )


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


def given_directory(hf_checkpoint: str, key: str) -> Path:
    """Return the path of the model directory that a key names, downloaded if it is on the Hub.

    Raises: ConfigError if it is none; as `rlpipe.system.hub.fetched_model`.
    """
    reference = model_reference(hf_checkpoint)
    if reference is not None:
        path = fetched_model(reference, key)
    else:
        # pathlib's expanduser raises for "~unknown_user"; this one leaves the text unchanged.
        path = Path(os.path.expanduser(in_project(hf_checkpoint))).absolute()  # noqa: PTH111
    if not os.path.lexists(path / "config.json"):
        raise ConfigError(
            "not a Hugging Face model directory",
            where=key,
            found=f"no config.json in {path}" if path.is_dir() else f"no directory {path}",
            expected="a directory with config.json, *.safetensors and a tokenizer",
            do="give the path of a model directory, or the name of a model on the Hugging Face "
            "Hub: org/name",
        )
    check_files(path, key)
    return path


def directory_here(model_dir: str, source: ModelSource | None) -> str:
    """Return the model directory on this node.

    `model_dir`: the directory on the driver's node. Another node downloads a model of the Hub, of
    the same commit, into its own cache. Raises: as `rlpipe.system.hub.fetched_model`.
    """
    if isinstance(source, HuggingFaceModel) and source.megatron_checkpoint is None:
        reference = model_reference(source.hf_checkpoint)
        if reference is not None and reference.is_pinned:
            return str(fetched_model(reference, "model.source.hf_checkpoint"))
    return model_dir


def present_directory(hf_checkpoint: str) -> str | None:
    """Return the path of a model directory without downloading; None if this machine has none."""
    reference = model_reference(hf_checkpoint)
    if reference is None:
        return hf_checkpoint
    directory = cached_model(reference)
    return None if directory is None else str(directory)


def _make(source: MadeModel, folder: Path, seed: int) -> Path:
    """Return the directory of a maker with these arguments and this source code.

    Made once, under a temporary name that is then renamed.
    """
    function = load_hook(source.maker)
    target = _made_directory(source, folder, seed)
    partial = folder / f"{target.name}.partial-{os.getpid()}"
    if target.is_dir():
        return target
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    takes_seed = "seed" in inspect.signature(function).parameters
    arguments = {**({"seed": seed} if takes_seed else {}), **source.arguments}
    try:
        function(partial, **arguments)
        _require_model(partial, source.maker)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # The function is user code: any exception of it becomes a HookError.
        if isinstance(error, Exception) and not isinstance(error, RlpipeError):
            where = f"model.source.maker: {source.maker}"
            raise HookError(
                "the function that makes the model failed",
                where=where,
                found=error_with_line(error),
            ) from error
        raise
    try:
        partial.rename(target)
    except OSError:
        # Another process may have made the same model meanwhile.
        shutil.rmtree(partial)
        if not target.is_dir():
            raise
    return target


def _made_directory(source: MadeModel, folder: Path, seed: int) -> Path:
    """Return the directory of a maker, which may not exist yet."""
    recipe = [source.maker.rpartition(":")[2], hook_digest(source.maker), source.arguments, seed]
    name = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    return folder / name


def _require_model(directory: Path, maker: str) -> None:
    if not (directory / "config.json").is_file():
        raise ConfigError(
            "the function that makes the model wrote no Hugging Face model directory",
            where="model.source.maker",
            found=f"no config.json from {maker}",
            expected="config.json, *.safetensors and a tokenizer",
        )
    check_files(directory, "model.source.maker")
