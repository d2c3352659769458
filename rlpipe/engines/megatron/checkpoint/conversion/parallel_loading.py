"""`load_checkpoint_weights`: load a checkpoint's weights into a model that is split over ranks.

A torch_dist checkpoint loads in any layout. A checkpoint of the older format loads only in the
layout that wrote it; `legacy` reads other layouts. `engines.megatron.checkpoint.checkpoint` loads
the whole state of training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from mbridge.core import LLMBridge
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from rlpipe.engines.megatron.bridges.bridge import mbridge_view
from rlpipe.engines.megatron.checkpoint.conversion.legacy import rank_state
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint
from rlpipe.engines.megatron.model.build import ScoringModel
from rlpipe.engines.megatron.model.layers import PolicyModel
from rlpipe.errors import DataError
from rlpipe.system.megatron_weights import find_checkpoint


@torch.no_grad()
def load_checkpoint_weights(scorer: ScoringModel, path: Path, step: int | None = None) -> None:
    """Load the weights. Collective. `path`, `step`: as `find_checkpoint`.

    Raises: ConfigError if there is no checkpoint; DataError if it is of another model (older
    format: or of another layout).
    """
    checkpoint = find_checkpoint(path, step)
    folder = checkpoint.folder
    read = _rank_file if checkpoint.legacy else _resharded
    for chunk, model in enumerate(scorer.models):
        key = "model" if len(scorer.models) == 1 else f"model{chunk}"
        _copy_weights(read(scorer.bridge, model, key, folder), model, folder)


def _copy_weights(state: dict[str, Any], model: PolicyModel, folder: Path) -> None:
    for name, target in model.state_dict().items():
        if not isinstance(target, torch.Tensor):
            continue
        if name not in state:
            raise DataError("a weight is missing", where=str(folder), expected=name)
        if state[name].shape != target.shape:
            raise DataError(
                "a weight has the wrong shape",
                where=f"{folder}: {name}",
                found=tuple(state[name].shape),
                expected=tuple(target.shape),
            )
        target.copy_(state[name])


def _resharded(_bridge: LLMBridge, model: PolicyModel, _key: str, folder: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(folder)
    metadata = {"singleton_local_shards": False, **checkpoint.layout}
    try:
        sharded: Any = model.sharded_state_dict(metadata=metadata)
        tensors: Any = {
            name: replace(shard, key=checkpoint.names.key(shard.key))
            for name, shard in sharded.items()
            if not isinstance(shard, ShardedObject)
        }
        state: Any = dist_checkpointing.load(
            {"model": tensors}, str(folder), validate_access_integrity=False
        )
        return state["model"]
    except (CheckpointingException, CheckpointException, KeyError, OSError, RuntimeError) as error:
        cause = "; ".join(
            str(failure[0]) for failure in getattr(error, "failures", {}).values()
        ) or str(error)
        raise DataError(
            "the checkpoint is not of this model", where=str(folder), found=cause[:600]
        ) from error


def _rank_file(bridge: LLMBridge, model: PolicyModel, key: str, folder: Path) -> dict[str, Any]:
    """Return the weights of a chunk that this rank saved, by the names of this model.

    `key`: the chunk's key in the file.
    """
    own_names: dict[str, str] = dict(
        zip(
            mbridge_view(bridge, model).state_dict(),
            model.state_dict(),
            strict=True,
        )
    )
    stored: dict[str, Any] = rank_state(folder / _rank_folder())[key]
    return {
        own_names.get(name, name): value
        for name, value in stored.items()
        if isinstance(value, torch.Tensor)
    }


def _rank_folder() -> str:
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return name
