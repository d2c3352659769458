"""`to_peft`: write a checkpoint's adapters as a directory that PEFT loads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from rlpipe.config.peft_directory import CONFIG, WEIGHTS, adapter_config
from rlpipe.config.train import LoraConfig
from rlpipe.engines.megatron.checkpoint.adapter_file import AdapterFile
from rlpipe.engines.megatron.checkpoint.adapters import stored_lora
from rlpipe.engines.megatron.checkpoint.conversion import checkpoint_paths, hf_files
from rlpipe.engines.megatron.checkpoint.conversion.convert import (
    ALREADY_CONVERTED,
    Report,
    checked_dtype,
    model_files,
)
from rlpipe.engines.megatron.checkpoint.conversion.hf_files import HfWeights
from rlpipe.engines.megatron.checkpoint.conversion.meta_model import (
    MetaModel,
    single_process_groups,
)
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint
from rlpipe.engines.megatron.checkpoint.first_adapters import peft_name
from rlpipe.errors import ConfigError
from rlpipe.system.megatron_weights import find_checkpoint


def to_peft(
    checkpoint: Path,
    output: Path,
    *,
    origin: Path | None = None,
    step: int | None = None,
    dtype: str | None = None,
    force: bool = False,
    known_as: str | None = None,
    base: Path | None = None,
) -> Report:
    """Write the adapters of a checkpoint. Arguments and errors as `convert.to_hf`.

    `checkpoint` may be a file of adapters (`adapter_file`), whose model is `origin`. `base`: a
    directory that is known to have the frozen weights of this file.
    The written configuration names `origin` as the base model if its weights are the frozen ones.
    After a warm start they are not, and no base is named. All adapters are in memory at once.
    Raises: ConfigError if the checkpoint has no adapters.
    """
    start = time.monotonic()
    stored, lora = _stored_adapters(checkpoint, step)
    target_dtype = checked_dtype(dtype) if dtype else stored.dtype
    identity = checkpoint_paths.conversion_identity(
        [],
        # The file is a copy, and has the name that `known_as` gives.
        source=stored.folder if isinstance(stored, Checkpoint) else None,
        known_as=known_as,
        dtype=target_dtype,
        origin=origin,
        to="peft",
    )
    with single_process_groups(), model_files(stored.folder, origin) as model_dir:
        meta_model = MetaModel(model_dir, target_dtype, metadata=stored.layout, lora=lora)
        tensors = peft_tensors(stored, meta_model)
        if isinstance(stored, Checkpoint) and origin is not None:
            base = origin if _is_base(stored, meta_model, origin) else None
    report = Report(
        folder=str(output),
        tensors=len(tensors),
        total_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        files=1,
        dtype=str(target_dtype).removeprefix("torch."),
    )
    if base is None:
        report.notes.append(
            "these adapters have no base model on disk: write it with --base, and give its "
            "directory to PEFT"
        )
    if checkpoint_paths.is_converted(output, identity) and not force:
        report.notes.append(ALREADY_CONVERTED)
        return report
    with checkpoint_paths.staging_folder(
        output, identity, needed_bytes=report.total_bytes, force=force
    ) as folder:
        hf_files.write_file(folder / WEIGHTS, tensors)
        config = adapter_config(lora, None if base is None else str(base))
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        checkpoint_paths.write_record(folder, {"identity": identity, "source": str(stored.folder)})
    report.seconds = time.monotonic() - start
    return report


def _stored_adapters(
    checkpoint: Path, step: int | None
) -> tuple[Checkpoint | AdapterFile, LoraConfig]:
    if checkpoint.is_file():
        file = AdapterFile(checkpoint)
        return file, file.lora
    source = find_checkpoint(checkpoint, step)
    stored = None if source.legacy else Checkpoint(source.folder)
    lora = stored and stored_lora(stored.layout)
    if stored is None or lora is None:
        raise ConfigError(
            "the checkpoint has no adapters",
            where=str(source.folder),
            expected="a checkpoint of a run with train.lora",
            do="leave out --adapter",
        )
    return stored, lora


def peft_tensors(
    stored: Checkpoint | AdapterFile, meta_model: MetaModel
) -> dict[str, torch.Tensor]:
    """Return the adapters by PEFT's names.

    Raises: ConfigError if the model's files have no matrix of a target's name.
    """
    tensors = {}
    for weight in meta_model.tensors:
        for (part, matrix), name in meta_model.adapters(weight).items():
            mbridge_name = meta_model.mbridge_names[weight]
            key = peft_name(meta_model.bridge, mbridge_name, part, matrix)
            if key is None:
                raise ConfigError(
                    "PEFT has no name for these adapters",
                    where="train.lora.target_modules",
                    found=f"{part}, in a model with {', '.join(meta_model.hf_names(weight))}",
                    do="export merged weights: leave out --adapter",
                )
            tensors[key] = stored.read(meta_model, [name])[name]
    return tensors


def _is_base(stored: Checkpoint, meta_model: MetaModel, directory: Path) -> bool:
    """True if the directory has the frozen weights of a checkpoint, in the written dtype."""
    if not any(directory.glob("*.safetensors")):
        return False
    weights = HfWeights(directory, meta_model.dtype)
    for name, expected in meta_model.tensors.items():
        frozen = stored.read(meta_model, [name])[name]
        hf_names = meta_model.hf_names(name)
        if not all(each in weights for each in hf_names):
            return False
        read = meta_model.from_hf(name, [weights.read(each) for each in hf_names])
        # The checkpoint's vocabulary can be padded.
        if not torch.equal(read.to(expected.dtype), frozen[: len(read)]):
            return False
    return True
