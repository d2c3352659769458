"""Process groups of a training rank: torch.distributed and Megatron's parallel state.

`open_groups` joins the ranks and `close_groups` leaves them. A process holds one set of groups at a
time and may open another after `close_groups`. `MegatronRank` is the base of the policy's and the
critic's ranks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rlpipe.batch.columns import BatchColumns, BatchSizes
from rlpipe.batch.packing import PackingPlan, Step, scoring_plan
from rlpipe.config.train import ParallelConfig, TrainConfig
from rlpipe.engines.megatron import platform, reproducibility
from rlpipe.errors import ConfigError, RlpipeError, TrainerError
from rlpipe.system.rendezvous import gloo_at, tcp_store

# isort: split
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.moe.router_replay import RouterReplay

T = TypeVar("T")


class MegatronRank:
    """Base of one rank. Call `_join` before anything else and `_leave` at the end."""

    def _join(
        self,
        train: TrainConfig,
        where: str,
        rank: int,
        world_size: int,
        master: tuple[str, int],
        threads: int,
        timeout_s: float,
        deterministic: bool,
    ) -> None:
        """Join the other ranks at `master`, in the layout of `train.parallel`.

        `where`: the key of the layout, for errors. Raises: ConfigError if the ranks do not divide;
        TrainerError if this process is a rank already.
        """
        self._train = train
        self._data_parallel = data_parallel_size(train.parallel, world_size, where=where)
        reproducibility.set_deterministic(deterministic)
        platform.claim_device(rank, threads)
        open_groups(
            train.parallel,
            rank=rank,
            world_size=world_size,
            master=master,
            timeout_s=timeout_s,
            seed=train.seed,
        )

    def _leave(self) -> None:
        """Leave all process groups and release unused device memory."""
        close_groups()
        # Megatron keeps the replay objects of every router that this process ever made.
        RouterReplay.clear_global_router_replay_instances()
        gc.collect()
        if platform.CUDA_FOUND:
            torch.cuda.empty_cache()

    @property
    def data_parallel(self) -> int:
        """Data parallel ranks, for `rlpipe.batch.packing.plan`. Not collective."""
        return self._data_parallel

    @property
    def max_tokens(self) -> int:
        """Packed tokens of a micro-batch over all context parallel ranks. Not collective.

        An argument of `rlpipe.batch.packing.plan`.
        """
        return self._train.micro_batch_tokens * self._train.parallel.context_parallel_size

    def scored_samples(self, sizes: BatchSizes, *, max_tokens: int | None = None) -> np.ndarray:
        """Return the samples that a scoring pass of this rank reads, ascending. Not collective.

        `sizes`: of the whole batch. `max_tokens`: as of the scoring pass.
        """
        micro_batches = scored_micro_batches(sizes, max_tokens or self.max_tokens)
        return np.sort(np.array([i for micro in micro_batches for i in micro], np.int64))

    def trained_samples(self, packing: PackingPlan) -> np.ndarray:
        """Return the samples that this rank trains, ascending. Not collective."""
        rank = parallel_state.get_data_parallel_rank()
        return np.sort(
            np.array([i for step in packing.steps for micro in step[rank] for i in micro], np.int64)
        )

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """Return on every rank of this world what `make` returns on rank 0. Collective.

        The value is pickled. Raises: the RlpipeError of `make`, on every rank.
        """
        # Other errors need no message: after them the whole group is killed.
        message: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                message = [make()]
            except RlpipeError as error:
                message = [error]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(message, src=0, device=platform.device())
        if isinstance(message[0], RlpipeError):
            raise message[0]
        return message[0]

    def rows_of_all(self, batch: BatchColumns, values: np.ndarray) -> np.ndarray:
        """Return float64 values [N, m] of all samples, from those [n, m] of the held samples.

        Collective; the result is equal on every rank. `batch`: the samples that this rank trains.
        """
        if batch.part is None:
            return values
        result = torch.zeros(
            len(batch.sizes), values.shape[1], dtype=torch.float64, device=platform.device()
        )
        # Ranks of one model replica hold the same samples.
        if reports_token_results() and parallel_state.get_context_parallel_rank() == 0:
            result[torch.from_numpy(batch.part.samples).to(result.device)] = torch.from_numpy(
                values
            ).to(result.device)
        # Every sample has one reporting rank, so the sum is the value itself.
        dist.all_reduce(result)
        return result.cpu().numpy()


def scored_micro_batches(sizes: BatchSizes, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return the samples of this data parallel rank's micro-batches in a scoring pass."""
    ranks = parallel_state.get_data_parallel_world_size()
    lengths = np.asarray(sizes.lengths, np.int64).tobytes()
    order = None if sizes.stored_order is None else sizes.stored_order.tobytes()
    step = _scoring_step(lengths, order, max_tokens, ranks)
    return step[parallel_state.get_data_parallel_rank()]


# The policy, the reference and the critic score the batch that `scored_samples` divides. One plan
# of 16,384 samples for 1,024 ranks takes 0.4 s.
@lru_cache(maxsize=1)
def _scoring_step(lengths: bytes, order: bytes | None, max_tokens: int, ranks: int) -> Step:
    return scoring_plan(
        np.frombuffer(lengths, np.int64),
        max_tokens=max_tokens,
        data_parallel=ranks,
        order=None if order is None else np.frombuffer(order, np.int64),
    )


def data_parallel_size(parallel: ParallelConfig, world_size: int, *, where: str) -> int:
    """Return the number of data parallel ranks.

    Raises: ConfigError, with the key `where`, if the ranks do not divide into model replicas.
    """
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
    """Join `world_size` ranks at `master` (host, port; rank 0 listens there).

    A second set of groups in the same processes needs another port. Otherwise a rank that is ahead
    could connect to the old server. `timeout_s`: deadline of every collective. Raises: TrainerError
    if this process already holds groups.
    """
    if dist.is_initialized():
        raise TrainerError(
            "this process is already a training rank",
            where=f"trainer/rank {rank}",
            do="close the other engine first",
        )
    timeout = timedelta(seconds=timeout_s)
    # Under torchrun its agent already listens at this address.
    listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    with gloo_at(master[0]):
        rendezvous = tcp_store(
            *master, listens=listens, timeout=timeout, world_size=world_size, wait=True
        )
        dist.init_process_group(
            platform.backend(), store=rendezvous, rank=rank, world_size=world_size, timeout=timeout
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            # Megatron takes whole minutes only.
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        )
    reproducibility.seed_all(seed)


def close_groups() -> None:
    """Leave all groups. Do nothing if none are open."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _drop_group_references()


def _drop_group_references() -> None:
    """Drop Megatron-core's references to closed groups.

    Each gloo group that stays alive has three threads, and one of them wakes 100 times a second.
    """
    for name, value in [*vars(parallel_state).items()]:
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    # Rotary embeddings hold groups, and the caches of their methods keep the embeddings alive.
    for kind in (RotaryEmbedding, *RotaryEmbedding.__subclasses__()):
        for method in vars(kind).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()


def reports_token_results() -> bool:
    """True on the rank of each model replica that reports per-token results.

    That is tensor parallel rank 0 of the last pipeline stage.
    """
    return (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
