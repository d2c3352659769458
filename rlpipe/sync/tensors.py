"""Check named tensors against the model directory and cut them into buckets.

Entry points: `expected_shapes`, `check_tensors`, `into_buckets`, `mark_last`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlpipe.errors import ConfigError, SyncError
from rlpipe.system.model_files import PREDICTION_LAYERS

NamedTensors = Iterable[tuple[str, Tensor]]
"""Hugging Face name and tensor of each weight."""
Bucket = list[tuple[str, Tensor]]
"""Tensors that a push gathers and sends together."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def expected_shapes(model_dir: str | Path) -> dict[str, tuple[int, ...]]:
    """Return name → shape of every tensor that engines hold, from the safetensors headers.

    Raises: ConfigError if the directory has no safetensors file, or a damaged one.
    """
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if not files:
        raise ConfigError(
            "the model directory has no weights",
            where="model.source",
            found=f"no *.safetensors in {model_dir}",
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {
                    name: tuple(tensors.get_slice(name).get_shape())
                    for name in tensors.keys()  # noqa: SIM118 - not a mapping
                }
        except SafetensorError as error:
            raise ConfigError(
                "not a safetensors file", where=str(file), found=error, do="download it again"
            ) from error
    config = json.loads((Path(model_dir) / "config.json").read_text())
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    # Layers beyond the model's own predict further tokens (MTP). They are not trained, and engines
    # that draft with them load them from the directory.
    num_layers = config.get("num_hidden_layers")
    return {
        name: shape
        for name, shape in shapes.items()
        if not name.startswith(PREDICTION_LAYERS)
        and (not (match := _LAYER.match(name)) or int(match[1]) < num_layers)
    }


def check_tensors(
    tensors: NamedTensors,
    expected: Mapping[str, tuple[int, ...]],
    missing: set[str],
    *,
    compact: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that engines hold and remove its name from `missing`.

    A tied `lm_head.weight` and layers for multi-token prediction are left out. With `compact` each
    tensor is on the CPU and its storage holds nothing else; without, it can be a view of a
    parameter.
    Raises: SyncError for an unknown name, another shape, or a dtype that is not floating point.
    """
    num_layers = 1 + max(
        (int(match[1]) for match in map(_LAYER.match, expected) if match), default=-1
    )
    for name, tensor in tensors:
        if name not in expected and _is_unheld(name, num_layers):
            continue
        # SGLang ignores a wrong name and crashes on a wrong shape.
        if name not in expected:
            raise SyncError(
                "the engines have no such tensor",
                where=name,
                found=f"shape {tuple(tensor.shape)}",
                expected="a name of the model",
            )
        if tuple(tensor.shape) != expected[name] or not tensor.is_floating_point():
            raise SyncError(
                "a tensor differs from what the engines hold",
                where=name,
                found=f"{tensor.dtype} {tuple(tensor.shape)}",
                expected=f"floating point {expected[name]}",
            )
        missing.discard(name)
        yield name, _compact(tensor.detach()) if compact else tensor.detach()


def _is_unheld(name: str, num_layers: int) -> bool:
    """True for the output layer of a tied model and for layers for multi-token prediction."""
    match = _LAYER.match(name)
    further = match is not None and int(match[1]) >= num_layers
    return further or name == "lm_head.weight" or name.startswith(PREDICTION_LAYERS)


def _compact(tensor: Tensor) -> Tensor:
    # pickle writes the whole storage, also of a view.
    on_cpu = tensor.to("cpu").contiguous()
    return on_cpu.clone() if on_cpu.untyped_storage().nbytes() != on_cpu.nbytes else on_cpu


def require_none_missing(missing: set[str], stamp: str) -> None:
    """Raises: SyncError if names are left in `missing` after all tensors of a push."""
    if missing:
        raise SyncError(
            "tensors are missing",
            where=f"push of {stamp}",
            found=f"no {', '.join(sorted(missing)[:5])}",
        )


def into_buckets(tensors: NamedTensors, size_bytes: int) -> Iterator[Bucket]:
    """Cut a stream of tensors into buckets of at most `size_bytes`.

    A larger tensor is a bucket by itself.
    """
    bucket: Bucket = []
    bucket_bytes = 0
    for name, tensor in tensors:
        if bucket and bucket_bytes + tensor.nbytes > size_bytes:
            yield bucket
            bucket = []
            bucket_bytes = 0
        bucket.append((name, tensor))
        bucket_bytes += tensor.nbytes
    if bucket:
        yield bucket


def mark_last(buckets: Iterator[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Yield each bucket and whether it is the last. Raises: SyncError without a bucket."""
    bucket = next(buckets, None)
    if bucket is None:
        raise SyncError("the push has no tensors")
    for following in buckets:
        yield bucket, False
        bucket = following
    yield bucket, True


def exhaust(items: Iterable[object]) -> None:
    """Read an iterator to its end. Other ranks take part in gathering each tensor."""
    for _ in items:
        pass
