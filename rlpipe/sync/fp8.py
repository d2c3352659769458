"""FP8 engines for a policy that trains in bf16.

`quantize` converts the tensors of a push. `fp8_directory` makes the model directory that such
engines start with. The format is that of Hugging Face's FP8 checkpoints (`quant_method: fp8`,
DeepSeek-V3, Qwen3-FP8): matrices of attention, MLPs and experts in e4m3, with one float32 factor
for each block of 128 × 128,

    weight[i, j] ≈ e4m3[i, j] · weight_scale_inv[i // 128, j // 128]
    weight_scale_inv = max |block| / 448

The engine quantizes activations. Embeddings, norms, routers, biases and the head stay unchanged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from rlpipe.errors import ConfigError
from rlpipe.system.tensor_files import save_tensors

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
QUANTIZATION_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
_MATRICES = re.compile(
    r"\.layers\.\d+\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    r"|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|w1|w2|w3)\.weight$"
)
_MERGED = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|w1|w3)\.weight$")
"""SGLang merges several of these into one matrix. Each part must begin with a block."""
_LAYOUT = 1
"""Increase when the content of an FP8 directory changes. It is part of the directory's name."""


@torch.no_grad()
def quantize(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a model; a matrix as `….weight` in e4m3 and `….weight_scale_inv`.

    Tensors stay on their device.
    """
    for name, tensor in tensors:
        if _MATRICES.search(name) and tensor.ndim == 2:
            weight, scale_inv = quantize_matrix(tensor)
            yield name, weight
            yield f"{name}_scale_inv", scale_inv
        else:
            yield name, tensor


def quantize_matrix(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix in blocks of 128 × 128.

    Shapes: weight [rows, columns]; returns e4m3 [rows, columns] and float32 factors
    [ceil(rows / 128), ceil(columns / 128)].
    """
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scale_inv = torch.where(largest > 0, largest / LARGEST, 1.0)
    scaled = (blocks / scale_inv[:, None, :, None]).clamp(-LARGEST, LARGEST).view(padded.shape)
    return scaled[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scale_inv


def dequantize_matrix(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """Return the float32 matrix of an e4m3 matrix and its factors."""
    factors = scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * factors[: weight.shape[0], : weight.shape[1]]


def fp8_directory(model_dir: str, folder: Path) -> str:
    """Return a copy of a model directory with quantized weights, under `folder`.

    Each machine makes the copy once. A directory that has this format already (DeepSeek-V3,
    Kimi K2) is returned unchanged.
    Raises: ConfigError if SGLang cannot load a matrix in blocks, or for another quantization.
    """
    source = Path(model_dir)
    if _is_quantized(source / "config.json"):
        return model_dir
    files = sorted(path for path in source.iterdir() if path.is_file())
    identity = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([str(source.resolve()), identity, _LAYOUT])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    target = folder / f"fp8-{digest}"
    partial = folder / f"fp8-{digest}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"fp8-{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            # A killed process leaves `partial`; only a complete directory gets the final name.
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _write_directory(files, partial)
            partial.rename(target)
    return str(target)


def _write_directory(files: list[Path], target: Path) -> None:
    weight_map: dict[str, str] = {}
    size_bytes = 0
    for path in files:
        if path.suffix == ".safetensors":
            tensors = dict(quantize(_require_blocks(load_file(path))))
            save_tensors(tensors, target / path.name)
            weight_map |= dict.fromkeys(tensors, path.name)
            size_bytes += sum(tensor.nbytes for tensor in tensors.values())
        elif path.name == "config.json":
            config = {**json.loads(path.read_text()), "quantization_config": QUANTIZATION_CONFIG}
            (target / path.name).write_text(json.dumps(config, indent=2))
        elif not path.name.endswith((".index.json", ".bin", ".pt", ".gguf")):
            shutil.copyfile(path, target / path.name)
    index = {"metadata": {"total_size": size_bytes}, "weight_map": weight_map}
    index_path = target / "model.safetensors.index.json"
    index_path.write_text(json.dumps(index, indent=2, sort_keys=True))


def _is_quantized(path: Path) -> bool:
    """True if the model has this FP8 format. Raises: ConfigError for another quantization."""
    config = json.loads(path.read_text()).get("quantization_config")
    if config and any(
        config.get(name) != QUANTIZATION_CONFIG[name]
        for name in ("quant_method", "weight_block_size")
    ):
        raise ConfigError(
            "rlpipe cannot train a model with this quantization",
            where=str(path),
            found=config,
            expected=f"a bf16 model, or fp8 in blocks of {BLOCK} × {BLOCK} with "
            "engine.quantization: fp8",
        )
    return bool(config)


def _require_blocks(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors. Raises: ConfigError for a matrix that SGLang cannot load in blocks."""
    for name, tensor in tensors.items():
        if name.endswith(".gate_up_proj.weight"):
            raise ConfigError(
                "a matrix that holds gate and up projection cannot be quantized",
                where=f"engine.quantization=fp8: {name}",
                do="remove engine.quantization for a dense GLM-4",
            )
        if _MERGED.search(name) and _MATRICES.search(name) and tensor.shape[0] % BLOCK:
            raise ConfigError(
                "a matrix cannot be quantized in blocks",
                where=f"engine.quantization=fp8: {name}",
                found=f"{tensor.shape[0]} rows",
                expected=f"a multiple of {BLOCK}",
            )
        yield name, tensor
