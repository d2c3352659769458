"""Local disk space that a checkpoint needs: `require_disk_space`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.errors import StoreFull

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.module import param_is_not_shared

from rlpipe.engines.megatron.checkpoint.state import inner_optimizers
from rlpipe.engines.megatron.model.build import TrainedModel

# Required disk space: SPARE × the size of the state + SPARE_BYTES.
SPARE = 1.1
SPARE_BYTES = 16 * 1024**2


@dataclass(slots=True, frozen=True)
class DiskSpace:
    """Local disk space that a checkpoint needs, and free space."""

    needed_bytes: int
    free_bytes: int

    def combined_with(self, other: DiskSpace) -> DiskSpace:
        """Combine two checkpoints that are written at once, as if both went to the fuller disk."""
        return DiskSpace(
            self.needed_bytes + other.needed_bytes, min(self.free_bytes, other.free_bytes)
        )


def require_disk_space(
    models: list[TrainedModel],
    folder: Path,
    combine: Callable[[DiskSpace], DiskSpace] = lambda space: space,
) -> None:
    """Require local disk space for a checkpoint of these models. Collective.

    `combine`: as in `save`. Raises: StoreFull, on every rank.
    """
    # A disk that fills up during the write is a torch error without this cause, on one rank, while
    # the other ranks wait.
    space = combine(_disk_space(models, folder))
    if space.free_bytes < space.needed_bytes:
        raise StoreFull(
            "no room for a checkpoint on the local disk",
            where=str(folder),
            found=f"{space.free_bytes / 1024**2:,.0f} MiB free",
            expected=f"{space.needed_bytes / 1024**2:,.0f} MiB",
            do="free disk space and run the same command again, or keep fewer checkpoints with "
            "checkpoint.keep_local",
        )


def _disk_space(models: list[TrainedModel], folder: Path) -> DiskSpace:
    """Return the need of all ranks and the smallest free space of their disks. Collective."""
    existing = next(parent for parent in folder.parents if parent.exists())
    own = (sum(map(_share_bytes, models)), shutil.disk_usage(existing).free)
    by_rank: list[tuple[float, int]] = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, own)
    shares, free = zip(*by_rank, strict=True)
    return DiskSpace(int(SPARE * sum(shares)) + SPARE_BYTES, min(free))


def _share_bytes(trained: TrainedModel) -> float:
    """Return this rank's share of the saved bytes: 1/n of a tensor that n ranks hold."""
    replicas = {
        False: parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        True: parallel_state.get_expert_data_parallel_world_size(),
    }  # keyed by: is it an expert's parameter?
    sharded = trained.chunks[0].ddp_config.use_distributed_optimizer
    model = {parameter for chunk in trained.models for parameter in chunk.parameters()}
    share = sum(
        parameter.nbytes / replicas[not getattr(parameter, "allreduce", True)]
        for parameter in model
        if param_is_not_shared(parameter)
    )
    for part in inner_optimizers(trained.optimizer):
        for group in part.optimizer.param_groups:
            for parameter in filter(param_is_not_shared, group["params"]):
                moments = sum(
                    value.nbytes
                    for value in part.optimizer.state[parameter].values()
                    if torch.is_tensor(value)
                )
                main = 0 if parameter in model else parameter.nbytes
                share += (main + moments) / (
                    1 if sharded else replicas[group["is_expert_parallel"]]
                )
    return share
