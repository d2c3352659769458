"""`Member`: what a rank of the policy and one of a critic with ranks of its own have in common: a
place in a world.

Not here: models (`engine`, `critic_engine`), how the two worlds meet (`meeting`).
"""

from __future__ import annotations

import gc

import torch

from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron import determinism, platform
from rlpipe.engines.megatron.groups import close_groups, open_groups, replicas
from rlpipe.engines.megatron.train.routing import release_routers


class Member:
    """One rank. `_join` before anything else, `_leave` at the end."""

    def _join(
        self,
        train: TrainConfig,
        *,
        where: str,
        rank: int,
        world_size: int,
        master: tuple[str, int],
        threads: int,
        deterministic: bool,
        timeout_s: float,
    ) -> None:
        """Join the other ranks at `master`, in the layout of these settings. `where`: the key of
        the layout, for errors.

        Raises: ConfigError if the ranks do not divide; TrainerError if this process is a rank
        already.
        """
        self._train = train
        self._data_parallel = replicas(train.parallel, world_size, where=where)
        determinism.switch(deterministic)
        platform.claim(rank, threads)
        open_groups(
            train.parallel,
            rank=rank,
            world_size=world_size,
            master=master,
            timeout_s=timeout_s,
            seed=train.seed,
        )

    def _leave(self) -> None:
        """Leave all process groups, and give device memory back that nothing refers to any more."""
        close_groups()
        release_routers()
        gc.collect()
        if platform.CUDA_FOUND:
            torch.cuda.empty_cache()

    @property
    def data_parallel(self) -> int:
        """Data parallel ranks, for `rlpipe.batch.packing.plan`. Not collective."""
        return self._data_parallel

    @property
    def max_tokens(self) -> int:
        """Packed tokens of a micro-batch over all context parallel ranks, for
        `rlpipe.batch.packing.plan`. Not collective."""
        return self._train.max_tokens_per_gpu * self._train.parallel.context_parallel_size
