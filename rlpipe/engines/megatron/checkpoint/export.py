"""`save_hf`: write the weights as a Hugging Face directory.

The directory has safetensors, config.json, and the small files of the source directory. Layers of
the source that Megatron does not hold are copied (`with_untrained_layers`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from rlpipe.engines.megatron.bridges.stages import full_weights
from rlpipe.engines.megatron.bridges.weight_files import WeightFiles
from rlpipe.engines.megatron.model.build import ScoringModel
from rlpipe.system.model_files import PREDICTION_LAYERS
from rlpipe.system.tensor_files import save_tensors

MAX_FILE_BYTES = 5 * 1024**3
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
"""Name in a multi-token prediction layer → the model's tensor that it is a copy of."""


def save_hf(scorer: ScoringModel, source: str | Path, directory: str | Path) -> None:
    """Write the directory from rank 0. Collective.

    The tokenizer and other small files are copied from `source`.
    """
    weights = full_weights(scorer.bridge, scorer.chunks)
    if torch.distributed.get_rank() != 0:
        for _ in weights:
            pass
    else:
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        for file in Path(source).iterdir():
            if file.is_file() and not file.name.endswith(
                (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".gguf")
            ):
                shutil.copyfile(file, target / file.name)
        _remove_quantization(target / "config.json")
        _write(with_untrained_layers(weights, source, scorer.bridge.hf_config), target)
    torch.distributed.barrier()


def with_untrained_layers(
    tensors: Iterable[tuple[str, torch.Tensor]], source: str | Path, hf_config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, then the source's layers for multi-token prediction (MTP).

    Megatron does not hold these layers; engines can use them as draft models. RL does not train
    them, so an export has their source bits. DeepSeek-V3 and GLM-4.5 store copies of embedding and
    output layer with them: for those, the trained tensors are yielded.
    """
    trained: dict[str, torch.Tensor] = {}
    held: set[str] = set()
    for name, tensor in tensors:
        held.add(name)
        if name in COPIES.values():
            trained[name] = tensor
        yield name, tensor
    files = WeightFiles(str(source))
    for name in sorted(files.names):
        match = LAYER.fullmatch(name)
        if name in held:
            continue
        if name.startswith(PREDICTION_LAYERS):
            yield name, files.load_one_hf_weight(name)
        elif match and int(match[1]) >= hf_config.num_hidden_layers:
            copied = trained.get(COPIES.get(match[2], ""))
            yield name, files.load_one_hf_weight(name) if copied is None else copied


def _remove_quantization(config: Path) -> None:
    """Remove the source's quantization: the written weights have none."""
    values = json.loads(config.read_text(encoding="utf-8"))
    if values.pop("quantization_config", None) is not None:
        config.write_text(json.dumps(values, indent=2), encoding="utf-8")


def _write(weights: Iterator[tuple[str, torch.Tensor]], target: Path) -> None:
    parts: list[list[str]] = []
    total_bytes = 0
    # The final file names contain the number of files, which is known at the end.
    for number, tensors in enumerate(_file_contents(weights)):
        save_tensors(tensors, target / f"part-{number}")
        parts.append(list(tensors))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(parts) == 1:
        (target / "part-0").rename(target / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for number, name in enumerate(names):
        (target / f"part-{number}").rename(target / name)
    index = {weight: name for name, part in zip(names, parts, strict=True) for weight in part}
    content = {"metadata": {"total_size": total_bytes}, "weight_map": index}
    (target / "model.safetensors.index.json").write_text(
        json.dumps(content, indent=2, sort_keys=True)
    )


def _file_contents(
    weights: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the CPU tensors of each file: at most MAX_FILE_BYTES, or one tensor."""
    tensors: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for name, tensor in weights:
        if tensors and size_bytes + tensor.nbytes > MAX_FILE_BYTES:
            yield tensors
            tensors = {}
            size_bytes = 0
        tensors[name] = tensor.cpu().contiguous().clone()
        size_bytes += tensor.nbytes
    yield tensors
