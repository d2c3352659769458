"""Tensors of a source directory that Megatron does not hold: layers that predict further tokens
(MTP), for draft engines.

RL leaves them as they are, so an export has them bit for bit; only their copies of embedding and
output layer, which DeepSeek-V3 and GLM-4.5 store with them, are the trained ones.

Not here: training them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from rlpipe.engines.megatron.bridges.files import WeightFiles

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
"""Name within a layer → the tensor of the model that it is a copy of."""


def with_kept(
    tensors: Iterable[tuple[str, torch.Tensor]], source: str | Path, hf_config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """An export by Hugging Face name, and after it what the source has beyond the model's own
    layers."""
    trained: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name in COPIES.values():
            trained[name] = tensor
        yield name, tensor
    files = WeightFiles(str(source))
    for name in sorted(files.names):
        found = LAYER.fullmatch(name)
        if found and int(found[1]) >= hf_config.num_hidden_layers:
            copied = trained.get(COPIES.get(found[2], ""))
            yield name, files.load_one_hf_weight(name) if copied is None else copied
