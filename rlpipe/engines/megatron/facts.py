"""With what this rank computes: versions, device, which attention and which kernels. For the
record; it decides nothing.

Two runs of one configuration on two machines differ in this, so it stands in every train node.

Not here: what is chosen, which each part decides by itself (`varlen`, `fused`, `platform`).
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch

from rlpipe.engines.megatron import platform

# isort: split
import megatron.core

from rlpipe.engines.megatron.model import varlen


def facts(dtype: str) -> dict[str, Any]:
    """Name → value, of what trains a model of this dtype (torch's word) in this process."""
    on_cuda = platform.CUDA_FOUND
    cuda = cast("Any", torch.cuda)
    packed = on_cuda and dtype in ("bfloat16", "float16")
    return {
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_cuda else None,
        "nccl": ".".join(map(str, cuda.nccl.version())) if on_cuda else None,
        "backend": platform.backend(),
        "megatron": megatron.core.__version__,
        "megatron_from": str(Path(megatron.core.__path__[0]).parents[1]),
        "mbridge": _version("mbridge"),
        "transformer_engine": _version("transformer_engine") or _version("transformer-engine"),
        "attention": varlen.backend() if packed else "torch scaled_dot_product_attention",
        "attention_version": _version(varlen.BACKENDS[varlen.backend()][0])
        if packed
        else torch.__version__,
        "fused": "triton" if on_cuda else "torch",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _version(package: str) -> str | None:
    """None if it is not there; its name alone is known of one that is no installed distribution."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "there" if importlib.util.find_spec(package.replace("-", "_")) is not None else None
