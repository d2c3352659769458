"""A checkpoint's weights into a model that the ranks hold, in their own layout: torch_dist, or the
older format as they saved it.

Not here: the whole state of training (`engines.megatron.checkpoint.checkpoint`), other layouts of
the older format (`legacy`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from rlpipe.engines.megatron.bridges.bridge import shown
from rlpipe.engines.megatron.checkpoint.conversion import places
from rlpipe.engines.megatron.checkpoint.conversion.legacy import mapped
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint
from rlpipe.engines.megatron.model.build import Scorer
from rlpipe.errors import DataError


@torch.no_grad()
def load_into(scorer: Scorer, path: Path, step: int | None = None) -> None:
    """Fill the model. Collective. `path`, `step`: as `places.find_checkpoint`.

    Raises: ConfigError if there is no checkpoint, DataError if it is not one of this model (older
    format: in this layout).
    """
    place = places.find_checkpoint(path, step)
    state = _own_file(scorer, place.folder) if place.legacy else _resharded(scorer, place.folder)
    for name, target in scorer.model.state_dict().items():
        if not isinstance(target, torch.Tensor):
            continue
        if name not in state:
            raise DataError("a weight is missing", where=str(place.folder), expected=name)
        if state[name].shape != target.shape:
            found = tuple(state[name].shape)
            fits = tuple(target.shape)
            raise DataError(
                "a weight does not fit", where=f"{place.folder}: {name}", found=found, expected=fits
            )
        target.copy_(state[name])


def _resharded(scorer: Scorer, folder: Path) -> dict[str, Any]:
    metadata = {"singleton_local_shards": False, **Checkpoint(folder).layout}
    try:
        places_of: Any = scorer.model.sharded_state_dict(metadata=metadata)
        wanted: Any = {
            "model": {
                name: place
                for name, place in places_of.items()
                if not isinstance(place, ShardedObject)
            }
        }
        found: Any = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
        return found["model"]
    except (CheckpointingException, CheckpointException, KeyError, OSError, RuntimeError) as error:
        cause = "; ".join(
            str(failure[0]) for failure in getattr(error, "failures", {}).values()
        ) or str(error)
        raise DataError(
            "not a checkpoint of this model", where=str(folder), found=cause[:600]
        ) from error


def _own_file(scorer: Scorer, folder: Path) -> dict[str, Any]:
    """What this rank saved, by the names of this model."""
    theirs: dict[str, str] = dict(
        zip(shown(scorer.bridge, scorer.model).state_dict(), scorer.model.state_dict(), strict=True)
    )
    stored: dict[str, Any] = mapped(folder / _rank_folder())["model"]
    return {
        theirs.get(name, name): value
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
