"""Adapters in torch_dist checkpoints.

A checkpoint of a policy with adapters holds all weights, the adapters as further tensors
(`….adapters.q_proj.lora_A`) and the optimizer state of the adapters. So it resumes, forks and
converts without another file. The content metadata has `train.lora` under the key LORA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlpipe.config.train import LoraConfig
from rlpipe.engines.megatron.model.build import TrainedModel
from rlpipe.engines.megatron.model.lora import MARK
from rlpipe.errors import TrainerError

LORA = "lora"


def metadata(trained: TrainedModel) -> dict[str, Any]:
    """Return the entry of the content metadata; {} without adapters."""
    return {} if trained.lora is None else {LORA: trained.lora.model_dump(mode="json")}


def stored_lora(content_metadata: dict[str, Any]) -> LoraConfig | None:
    """Return the adapters of a checkpoint; None without adapters."""
    stored = content_metadata.get(LORA)
    return None if stored is None else LoraConfig.model_validate(stored)


def are_missing(
    trained: TrainedModel, stored: LoraConfig | None, folder: Path, *, weights_only: bool
) -> bool:
    """True if the model's adapters begin here: the checkpoint has weights without adapters.

    Raises: TrainerError if the checkpoint has other adapters, or its optimizer state is of all
    weights.
    """
    if stored == trained.lora:
        return False
    if stored is None and weights_only:
        return True
    raise TrainerError(
        "the checkpoint has other adapters than the policy",
        where=f"train.lora, {folder}",
        found=_text(stored),
        expected=_text(trained.lora),
        do="keep train.lora, or start from a merged export (`rlpipe convert dist2hf`) as "
        "model.source.hf_checkpoint",
    )


def without_adapters(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of each chunk without adapters."""
    return {
        key: {name: shard for name, shard in shards.items() if MARK not in name}
        for key, shards in weights.items()
    }


def _text(lora: LoraConfig | None) -> str:
    if lora is None:
        return "no adapters"
    return f"rank {lora.rank}, alpha {lora.alpha:g}, {', '.join(lora.target_modules)}"
