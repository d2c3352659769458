"""Process groups: torch.distributed and Megatron's parallel state, opened and closed again.

One process can hold one set at a time; after `close_groups` it may open another.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from rlpipe.config.train import ParallelConfig
from rlpipe.engines.megatron import platform, randomness
from rlpipe.errors import ConfigError, TrainerError
from rlpipe.system.rendezvous import gloo_at, store

# isort: split
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


def replicas(parallel: ParallelConfig, world_size: int, *, where: str) -> int:
    """Data parallel ranks. Raises: ConfigError, naming the key `where`, if the ranks do not
    divide."""
    if world_size % parallel.model_ranks:
        raise ConfigError(
            "the ranks do not divide into model replicas",
            where=where,
            found=f"{world_size} ranks",
            expected=f"a multiple of TP × PP × CP = {parallel.model_ranks}",
        )
    return world_size // parallel.model_ranks


def open_groups(
    parallel: ParallelConfig,
    *,
    rank: int,
    world_size: int,
    master: tuple[str, int],
    timeout_s: float,
    seed: int,
) -> None:
    """Join `world_size` ranks at `master` (host, port; rank 0 listens there). Every collective has
    `timeout_s`.

    Raises: TrainerError if this process already holds groups.
    """
    if dist.is_initialized():
        raise TrainerError(
            "this process is a training rank already",
            where=f"trainer/rank {rank}",
            do="close the other engine",
        )
    timeout = timedelta(seconds=timeout_s)
    listens = (
        rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )  # torchrun listens there itself
    with gloo_at(master[0]):
        meeting = store(*master, listens=listens, timeout=timeout, world_size=world_size, wait=True)
        dist.init_process_group(
            platform.backend(), store=meeting, rank=rank, world_size=world_size, timeout=timeout
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        )
    randomness.begin(seed)


def close_groups() -> None:
    """Leave all groups. Does nothing if there are none."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _forget()


def _forget() -> None:
    """Drop what Megatron-core keeps of closed groups: some in module globals, others through rotary
    embeddings, which caches of their own methods keep alive. On gloo each is three threads, of
    which one wakes up a hundred times a second."""
    for name, value in [*vars(parallel_state).items()]:
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    for kind in (RotaryEmbedding, *RotaryEmbedding.__subclasses__()):
        for method in vars(kind).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()


def speaks_for_its_samples() -> bool:
    """Whether this rank is the one of its tensor parallel group, on the last pipeline stage, that
    reports per-token results."""
    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
