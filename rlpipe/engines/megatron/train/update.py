"""What every optimizer step ends with, whichever model takes it: metrics of all ranks, Adam, the
schedule.

Not here: losses (`step`, `critic`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.groups import speaks_for_its_samples
from rlpipe.engines.megatron.model.build import Trained
from rlpipe.errors import TrainerError


def summed(kept: list[torch.Tensor], names: tuple[str, ...]) -> dict[str, float]:
    """Metrics of an optimizer step: `kept` ([number of names] of each micro-batch of this rank)
    summed over micro-batches and ranks. Collective."""
    total = torch.zeros(len(names), dtype=torch.float32, device=platform.device())
    if speaks_for_its_samples():
        total += torch.stack(kept).sum(0)
    torch.distributed.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))


def update(trained: Trained, where: str) -> dict[str, float]:
    """One step of optimizer and schedule: `grad_norm` before clipping, and the `lr` it was taken
    with. Collective.

    Raises: TrainerError if a gradient is not finite.
    """
    learning_rate = max(group["lr"] for group in trained.optimizer.param_groups)
    outcome: Any = trained.optimizer.step()
    updated, norm, _ = outcome
    norm = float(trained.optimizer.get_grad_norm() if norm is None else norm)
    if not updated or not math.isfinite(norm):
        raise TrainerError(
            "the gradient is not finite", where=where, found=norm, do="restore the last checkpoint"
        )
    trained.scheduler.step(increment=1)
    return {"grad_norm": norm, "lr": float(learning_rate)}
