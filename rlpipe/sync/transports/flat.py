"""A bucket as one tensor of bytes, in the order and with the words in which SGLang cuts it up again
(`FlattenedTensorBucket`).

It views each part in its own dtype, which torch allows where the part begins at a multiple of the
dtype's size. So wide dtypes come first: each size divides those before it.

Not here: sending it (`distributed`, `ipc`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlpipe.sync.tensors import Bucket


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a flat bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First of its bytes."""
    end: int

    @property
    def dtype_name(self) -> str:
        """torch's word, `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Flat:
    """A bucket. `memory`: uint8 [bytes]."""

    parts: tuple[Part, ...]
    memory: Tensor

    def tensors(self) -> Bucket:
        """What it was made of, as views."""
        return [
            (part.name, self.memory[part.start : part.end].view(part.dtype).reshape(part.shape))
            for part in self.parts
        ]


@torch.no_grad()
def flatten(bucket: Bucket, device: torch.device, into: Tensor | None = None) -> Flat:
    """Copy a bucket into one memory on `device`: a new one, or the beginning of `into` (uint8,
    large enough)."""
    ordered = sorted(bucket, key=lambda item: -item[1].element_size())
    parts = []
    start = 0
    for name, tensor in ordered:
        parts.append(Part(name, tensor.dtype, tuple(tensor.shape), start, start + tensor.nbytes))
        start += tensor.nbytes
    pieces = [
        tensor.detach().to(device, non_blocking=True).flatten().view(torch.uint8)
        for _, tensor in ordered
    ]
    memory = torch.empty(start, dtype=torch.uint8, device=device) if into is None else into[:start]
    torch.cat(pieces, out=memory)
    return Flat(tuple(parts), memory)
