"""Where a flat bucket lies, for an engine rank on the same GPU: what `/update_weights_from_tensor`
takes as `flattened_bucket`.

It is what SGLang's own sender pickles (`FlattenedTensorBucket`, `MultiprocessingSerializer`,
`monkey_patch_torch_reductions`), without importing SGLang: that patches transformers, which the
trainer uses. An engine reads attributes, so the parts go as plain namespaces, which its unpickler
lets through (0.5.15 to 0.5.21). A GPU goes as its UUID: what is `cuda:0` here may be `cuda:3`
there.

A handle is for one reader, once: torch counts them. CUDA IPC needs memory of cudaMalloc, so no
expandable segments. Not here: cutting a bucket (`rlpipe.sync`), whose GPU an engine rank has.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_DEVICE = 6
"""Which argument of torch's `rebuild_cuda_tensor` is the device; SGLang patches the same one."""


def flattened_bucket(
    memory: Tensor, parts: Sequence[tuple[str, torch.dtype, tuple[int, ...], int, int]]
) -> bytes:
    """The pickle of a flat bucket: `memory` is uint8 [bytes] on a GPU, or shared under a name; a
    part is name, dtype, shape, and the first of its bytes and the first after them."""
    metadata = [
        SimpleNamespace(
            name=name, dtype=dtype, shape=shape, start_idx=start, end_idx=end, numel=end - start
        )
        for name, dtype, shape, start, end in parts
    ]
    stream = io.BytesIO()
    _Pickler(stream).dump({"flattened_tensor": memory, "metadata": metadata})
    return stream.getvalue()


class _Pickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or not obj.is_cuda:
            return NotImplemented
        rebuild, arguments = cast("tuple[Any, tuple[Any, ...]]", reductions.reduce_tensor(obj))
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
