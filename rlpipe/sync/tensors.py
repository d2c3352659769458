"""Named tensors on their way to engines: what the model directory says of them, checked one by one,
cut into buckets.

Not here: how they get there (the transports).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlpipe.errors import ConfigError, SyncError

Bucket = list[tuple[str, Tensor]]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def expected_shapes(model_dir: str | Path) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in the directory's safetensors files, read from their headers;
    without layers beyond the model's own, which predict further tokens (MTP): they are not trained,
    and engines that draft with them have them.

    Raises: ConfigError if there are none.
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
    layers = config.get("num_hidden_layers")
    return {
        name: shape
        for name, shape in shapes.items()
        if not (found := _LAYER.match(name)) or int(found[1]) < layers
    }


def checked(
    tensors: Iterable[tuple[str, Tensor]],
    expected: Mapping[str, tuple[int, ...]],
    missing: set[str],
    *,
    own: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Pass on each tensor that the engines expect, and take its name out of `missing`.

    `own`: on the CPU, with a memory that holds nothing else; without, where it lies, maybe a view
    of a parameter. A tied `lm_head.weight` is left out. Raises: SyncError for another name, shape,
    or a dtype that is not floating point.
    """
    for name, tensor in tensors:
        if name == "lm_head.weight" and name not in expected:
            continue
        if name not in expected:
            raise SyncError(
                "the engines have no such tensor",
                where=name,
                found=f"shape {tuple(tensor.shape)}",
                expected="a name of the model",
            )
        if tuple(tensor.shape) != expected[name] or not tensor.is_floating_point():
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise SyncError(
                "a tensor is not what the engines hold",
                where=name,
                found=found,
                expected=f"floating point {expected[name]}",
            )
        missing.discard(name)
        yield name, _owned(tensor.detach()) if own else tensor.detach()


def _owned(tensor: Tensor) -> Tensor:
    here = tensor.to("cpu").contiguous()
    return here.clone() if here.untyped_storage().nbytes() != here.nbytes else here


def buckets(tensors: Iterable[tuple[str, Tensor]], size_bytes: int) -> Iterator[Bucket]:
    """Cut a stream of tensors into lists of at most `size_bytes`; a larger tensor is a bucket of
    its own."""
    bucket: Bucket = []
    held = 0
    for name, tensor in tensors:
        if bucket and held + tensor.nbytes > size_bytes:
            yield bucket
            bucket = []
            held = 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket


def with_last(items: Iterator[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Each bucket, and whether it is the last. Raises: SyncError if there is none."""
    held = next(items, None)
    if held is None:
        raise SyncError("there is nothing to push")
    for item in items:
        yield held, False
        held = item
    yield held, True
