"""The end of every optimizer step: metrics of all ranks, Adam and the schedule.

Policy and critic share `zero_gradients`, `summed_metrics` and `update`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.model.build import TrainedModel
from rlpipe.engines.megatron.process_groups import reports_token_results
from rlpipe.errors import TrainerError


def zero_gradients(trained: TrainedModel) -> None:
    """Set all gradients to zero before the passes of an optimizer step."""
    for chunk in trained.chunks:
        chunk.zero_grad_buffer()
    trained.optimizer.zero_grad()


def summed_metrics(outputs: list[torch.Tensor], names: tuple[str, ...]) -> dict[str, float]:
    """Sum the metrics of a step over micro-batches and ranks. Collective.

    `outputs`: one tensor [number of names] for each micro-batch of this rank.
    """
    total = torch.zeros(len(names), dtype=torch.float32, device=platform.device())
    if reports_token_results():
        total += torch.stack(outputs).sum(0)
    torch.distributed.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))


def update(trained: TrainedModel, where: str) -> dict[str, float]:
    """Step optimizer and schedule once. Collective.

    Returns `grad_norm` before clipping and the `lr` of the step. Raises: TrainerError if a gradient
    is not finite.
    """
    # Read before the schedule advances.
    learning_rate = max(group["lr"] for group in trained.optimizer.param_groups)
    outcome: Any = trained.optimizer.step()
    updated, norm, _ = outcome
    # Without clipping the step does not compute the norm.
    norm = float(trained.optimizer.get_grad_norm() if norm is None else norm)
    if not updated or not math.isfinite(norm):
        raise TrainerError(
            "the gradient is not finite", where=where, found=norm, do="restore the last checkpoint"
        )
    trained.scheduler.step(increment=1)
    return {"grad_norm": norm, "lr": float(learning_rate)}
