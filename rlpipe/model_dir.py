"""Find, download or make the model directory of a run, and check its settings against the model.

`model_directory` returns the directory of `model.source`, `given_directory` that of another key,
`directory_here` the directory on the node of an actor. `check_stop_ids` and `check_context_len`
compare the configuration with config.json. The files of a directory are checked in
`rlpipe.system.model_files`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
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
from rlpipe.system.model_files import check_files, read_object
from rlpipe.system.project import in_project


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


def check_maker(model: ModelConfig, home: Path, *, seed: int) -> None:
    """Check the arguments of the maker, and what it needs unless the model is made.

    Raises: ConfigError; errors of the maker's `check`.
    """
    source = model.source
    assert isinstance(source, MadeModel)
    maker = load_hook(source.maker)
    try:
        inspect.signature(maker).bind("directory", **source.arguments)
    except TypeError as error:
        raise ConfigError(
            "the function that makes the model does not accept these arguments",
            where="model.source.arguments",
            found=f"{source.arguments}: {error}",
            expected=f"arguments of {source.maker}{inspect.signature(maker)}",
        ) from error
    needs = getattr(maker, "check", None)
    if needs and model_directory_if_present(model, home, seed=seed) is None:
        needs()


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
        sampling.environment,
        eval_function,
    )
    return None if any(functions) else model_context_len(model)


def long_responses(
    rollout: RolloutConfig, datasets: Sequence[EvalDataset], directory: str
) -> list[str]:
    """Return a text for each limit of responses that the model's context cannot hold."""
    context = model_context_len(read_object(Path(directory) / "config.json", "model.source"))
    limits = {"rollout.rollout_max_response_len": rollout.rollout_max_response_len}
    for number, dataset in enumerate(datasets):
        limits[f"evaluation.datasets.{number}.max_response_len"] = dataset.max_response_len or 0
    return [
        f"{key}: {limit} tokens do not fit into the model's context of {context} tokens, "
        "prompt included; longer responses are cut there and count as truncated"
        for key, limit in limits.items()
        if context is not None and limit >= context
    ]


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


def end_ids(model_dir: str, of_tokenizer: object) -> set[int]:
    """Return the tokens that end a response, from the same sources as SGLang.

    These are the model's configuration, its generation settings and its tokenizer
    (`of_tokenizer`).
    """
    paths = [Path(model_dir) / name for name in ("config.json", "generation_config.json")]
    sources = [
        of_tokenizer,
        *(json.loads(path.read_text()).get("eos_token_id") for path in paths if path.exists()),
    ]
    return {
        token
        for ids in sources
        for token in (ids if isinstance(ids, list) else [ids])
        if isinstance(token, int)
    }
