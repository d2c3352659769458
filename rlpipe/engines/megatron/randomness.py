"""Random state of a training rank: Python's, NumPy's, torch's, and Megatron's of tensor parallel
regions.

It begins with the run's seed. A checkpoint keeps that of each place (pipeline stage, tensor
parallel rank) of the world that wrote it, and a rank that loads all of a checkpoint takes that of
its own place. Where there is none for it everything begins with the seed again, so that what is
drawn next follows from the checkpoint alone, and not from what the process did before:

    the world is split in another way             anew, on all ranks
    a critic that moves to ranks of its own       anew there; the policy goes on with its own, which both drew from before
    a critic that moves to the policy's ranks     it draws from the policy's from then on; its own is not read

Not here: seeds of samples, which have no state (`rlpipe.data`).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpipe.engines.megatron import platform

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

KEY = "rng_state"
_seed = 0


def begin(seed: int) -> None:
    """Begin with this seed; the process groups must be there."""
    global _seed
    _seed = seed
    begin_again()


def begin_again() -> None:
    """As it was right after `begin`."""
    random.seed(_seed)
    np.random.seed(_seed % 2**32)
    torch.manual_seed(_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(_seed)


def sharded() -> ShardedObject:
    """This place's state as a part of a checkpoint."""
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": _tracker().get_states(),
    }
    if platform.CUDA_FOUND:
        state["cuda_rng_state"] = torch.cuda.get_rng_state()
    return ShardedObject(
        KEY,
        [state],
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def is_kept(folder: Path) -> bool:
    """Does a checkpoint keep the state of this place, of a world that is split as this one?"""
    return sharded().unique_key in load_sharded_metadata(str(folder))


def take(state: dict[str, Any]) -> None:
    """Go on with a state that a checkpoint kept."""
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    _tracker().set_states(state["rng_tracker_states"])
    if platform.CUDA_FOUND and "cuda_rng_state" in state:
        torch.cuda.set_rng_state(state["cuda_rng_state"])


def _tracker() -> Any:
    """Megatron's random states of tensor parallel regions; made with the process groups."""
    return tensor_parallel.get_cuda_rng_tracker()
