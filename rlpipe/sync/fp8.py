"""FP8 engines of a policy that is trained in bf16: weights quantised on their way, and the
directory that such engines serve.

As Hugging Face's FP8 checkpoints have it (`quant_method: fp8`, DeepSeek-V3, Qwen3-FP8): the
matrices of attention, MLPs and experts in blocks of 128 × 128, each in e4m3 with one float32
factor,

    weight[i, j] ≈ e4m3[i, j] · weight_scale_inv[i // 128, j // 128],   weight_scale_inv = max |block| / 448

Activations are quantised by the engine. Embeddings, norms, routers, biases and the head stay as
they are.

Not here: what trains (all of it stays in its own dtype), or kernels.
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
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from rlpipe.errors import ConfigError

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
"""SGLang holds several of these as one matrix, whose parts must begin with a block."""
_LAYOUT = 1
"""Counts changes of what a directory is made of."""


@torch.no_grad()
def quantised(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a model, the matrices as two: `….weight` in e4m3 and `….weight_scale_inv`. On
    the device where they are."""
    for name, tensor in tensors:
        if _MATRICES.search(name) and tensor.ndim == 2:
            weight, scale_inv = in_blocks(tensor)
            yield name, weight
            yield f"{name}_scale_inv", scale_inv
        else:
            yield name, tensor


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] → the same in e4m3, and float32 factors [ceil(rows / 128), ceil(columns /
    128)]."""
    rows, columns = weight.shape
    whole = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.view(whole.shape[0] // BLOCK, BLOCK, whole.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    scale_inv = torch.where(largest > 0, largest / LARGEST, 1.0)
    scaled = (blocks / scale_inv[:, None, :, None]).clamp(-LARGEST, LARGEST).view(whole.shape)
    return scaled[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scale_inv


def from_blocks(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """The float32 matrix that an e4m3 one and its factors stand for."""
    factors = scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * factors[: weight.shape[0], : weight.shape[1]]


def fp8_directory(model_dir: str, folder: Path) -> str:
    """A copy of a model directory with quantised weights, under `folder`; made once on a machine,
    in a neighbour, then renamed.

    A directory that is in FP8 like this already (DeepSeek-V3, Kimi K2) is taken as it is. Raises:
    ConfigError if a matrix has no whole blocks where SGLang needs them, holds two in one, or is
    quantised otherwise.
    """
    source = Path(model_dir)
    if _is_quantised(source / "config.json"):
        return model_dir
    files = sorted(path for path in source.iterdir() if path.is_file())
    seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(
        json.dumps([str(source.resolve()), seen, _LAYOUT]).encode()
    ).hexdigest()[:16]
    target = folder / f"fp8-{digest}"
    partial = folder / f"fp8-{digest}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"fp8-{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _write(files, partial)
            partial.rename(target)
    return str(target)


def _write(files: list[Path], target: Path) -> None:
    found: dict[str, str] = {}
    size_bytes = 0
    for path in files:
        if path.suffix == ".safetensors":
            tensors = dict(quantised(_allowed(load_file(path))))
            save_file(tensors, target / path.name, metadata={"format": "pt"})
            found |= dict.fromkeys(tensors, path.name)
            size_bytes += sum(tensor.nbytes for tensor in tensors.values())
        elif path.name == "config.json":
            (target / path.name).write_text(
                json.dumps(
                    {**json.loads(path.read_text()), "quantization_config": QUANTIZATION_CONFIG},
                    indent=2,
                )
            )
        elif not path.name.endswith((".index.json", ".bin", ".pt", ".gguf")):
            shutil.copyfile(path, target / path.name)
    index = {"metadata": {"total_size": size_bytes}, "weight_map": found}
    (target / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2, sort_keys=True)
    )


def _is_quantised(path: Path) -> bool:
    found = json.loads(path.read_text()).get("quantization_config")
    if found and any(
        found.get(name) != QUANTIZATION_CONFIG[name]
        for name in ("quant_method", "weight_block_size")
    ):
        raise ConfigError(
            "the model is quantised otherwise, and could not be trained",
            where=str(path),
            found=found,
            expected=f"a bf16 model, or fp8 in blocks of {BLOCK} × {BLOCK}, beside engine.quantization: fp8",
        )
    return bool(found)


def _allowed(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name.endswith(".gate_up_proj.weight"):
            raise ConfigError(
                "a matrix that holds gate and up projection is not quantised",
                where=f"engine.quantization=fp8: {name}",
                do="leave engine.quantization out for a dense GLM-4",
            )
        if _MERGED.search(name) and _MATRICES.search(name) and tensor.shape[0] % BLOCK:
            raise ConfigError(
                "a matrix cannot be quantised in blocks",
                where=f"engine.quantization=fp8: {name}",
                found=f"{tensor.shape[0]} rows",
                expected=f"a multiple of {BLOCK}",
            )
        yield name, tensor
