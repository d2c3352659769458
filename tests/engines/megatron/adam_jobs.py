"""Jobs that compare Adam's state with that of a checkpoint of `slime_checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlpipe.config.train import TrainConfig
from rlpipe.engines.megatron.checkpoint.state import inner_optimizers
from tests.engines.megatron.ranks import engine
from tests.engines.megatron.slime_checkpoint import (
    FURTHER,
    FURTHER_SCALE,
    LR,
    TOTAL_STEPS,
    adam_tensors,
    gradient,
    named_parameters,
)

OPTIMIZER = {
    "lr": LR,
    "lr_decay_style": "linear",
    "lr_decay_steps": TOTAL_STEPS,
    "weight_decay": 0.1,
    "adam_beta2": 0.999,
}
"""Adam and schedule of `slime_checkpoint`."""


def expected_tensors(saved: Path, kind: str = "expected") -> dict[str, torch.Tensor]:
    """Return "state.parameter" → the flat tensor that the ranks had when they saved.

    `kind`: "further" for a step later.
    """
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for path in (saved / "iter_0000001").glob(f"{kind}_*.safetensors"):
        for key, tensor in load_file(path).items():
            name, _, start = key.partition("@")
            parts.setdefault(name, {})[int(start)] = tensor
    return {
        name: torch.cat([pieces[start] for start in sorted(pieces)])
        for name, pieces in parts.items()
    }


def different_tensors(trained: Any, saved: Path, kind: str = "expected") -> list[str]:
    """Return the tensors of this rank's Adam with other bits than the ranks that saved."""
    expected = expected_tensors(saved, kind)
    different = []
    for name, parameter in named_parameters(trained.last_model):
        compared = 0
        for part in inner_optimizers(trained.optimizer):
            values, start = adam_tensors(part, parameter)
            for state, tensor in values.items():
                flat = tensor.detach().float().flatten()
                whole = expected[f"{state}.{name}"]
                assert whole.numel() == parameter.numel(), name
                compared += flat.numel()
                if not torch.equal(flat, whole[start : start + flat.numel()]):
                    different.append(f"{state}.{name}")
        assert compared or torch.distributed.get_world_size() > 1, name
    return different


def continue_adam(
    rank: int,
    world_size: int,
    port: int,
    weights: str,
    train: dict,
    adam: str,
    saved: str,
    dtype: str,
) -> dict:
    """Load weights and Adam, then take the step that the writer took after it saved."""
    config = TrainConfig.model_validate({**train, "optimizer": OPTIMIZER})
    ours = engine(weights, config, rank, world_size, port, dtype=dtype)
    try:
        ours.load_hf()
        ours.load_adam_state(adam)
        trained = ours.trained
        parts = [*inner_optimizers(trained.optimizer)]
        result = {
            "loaded": different_tensors(trained, Path(saved)),
            "steps": {
                float(values["step"]) for part in parts for values in part.optimizer.state.values()
            },
            "scheduler": trained.scheduler.num_steps,
        }
        for chunk in trained.chunks:
            chunk.zero_grad_buffer()
        for name, parameter in named_parameters(trained.last_model):
            parameter.main_grad.copy_(gradient(name, parameter.shape, FURTHER, FURTHER_SCALE))
        trained.optimizer.step()
        return result | {"stepped": different_tensors(trained, Path(saved), "further")}
    finally:
        ours.close()
