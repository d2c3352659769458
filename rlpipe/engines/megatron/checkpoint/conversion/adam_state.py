"""Adam's state in a checkpoint of Megatron-LM, by parameter and in any of its formats.

    AdamState(Checkpoint(folder), meta_model).read("decoder.layers.0.mlp.linear_fc1.weight")

| `distrib_optim_sharding_type` | stored tensors |
|---|---|
| none, fully_reshardable | as the parameter, under the parameter's name |
| fully_sharded_model_space (before Megatron-core 0.15) | the same names; each rank's part is flat |
| dp_reshardable (Megatron-LM's default) | gradient buckets of each rank (`gradient_buckets`) |

With expert parallelism, Megatron has a chain of two optimizers: of the experts, and of all other
parameters. Every format is read with and without the prefix chained_0 or chained_1 of its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.engines.megatron.checkpoint.conversion.gradient_buckets import (
    BUCKET,
    MASTER,
    GradientBuckets,
)
from rlpipe.engines.megatron.checkpoint.conversion.meta_model import MetaModel
from rlpipe.engines.megatron.checkpoint.conversion.stored_names import plain_key
from rlpipe.engines.megatron.checkpoint.conversion.torch_dist import Checkpoint, Unit
from rlpipe.errors import DataError

MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER_NAMES = (MASTER, "param")


class AdamState:
    """The optimizer state of a checkpoint.

    Raises: DataError if the checkpoint has none; ConfigError for a format that is not read.
    """

    def __init__(self, checkpoint: Checkpoint, meta_model: MetaModel) -> None:
        self._checkpoint = checkpoint
        self._meta_model = meta_model
        self._buckets = None if _is_named(checkpoint) else GradientBuckets(checkpoint, meta_model)
        self._last: tuple[str, dict[str, torch.Tensor]] | None = None
        self._names = {moment: moment for moment in MOMENTS}
        if (master := self._stored_name(_MASTER_NAMES)) is not None:
            self._names[MASTER] = master

    @property
    def step(self) -> int:
        """Steps that Adam has taken. Raises: DataError if the number is missing."""
        steps = set(_steps(self._checkpoint.common.get("optimizer")))
        if not steps:
            name = r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer"
            steps = set(_steps(self._checkpoint.read_objects(name)))
        if len(steps) != 1:
            raise DataError(
                "the checkpoint has no single number of Adam's steps",
                where=str(self._checkpoint.folder),
                found=sorted(steps) or None,
            )
        return steps.pop()

    @property
    def schedule_steps(self) -> int:
        """Optimizer steps of the learning rate schedule. Megatron counts samples."""
        scheduler = self._checkpoint.common.get("opt_param_scheduler") or {}
        batch = getattr(self._checkpoint.args, "global_batch_size", None)
        if "num_steps" not in scheduler or not batch:
            return self.step
        return int(scheduler["num_steps"]) // int(batch)

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Return state → full float32 tensor of a parameter: MASTER and MOMENTS.

        Raises: DataError.
        """
        if self._buckets is not None:
            return self._buckets.read(name, self._names)
        found = {
            state: self._checkpoint.read(self._meta_model, [name], stored)[name]
            for state, stored in self._names.items()
        }
        if MASTER not in found:  # float32 weights are their own masters
            found[MASTER] = self._checkpoint.read(self._meta_model, [name])[name].float()
        return found

    def units(self) -> Iterator[Unit]:
        """Yield every tensor of the optimizer, for a writer of checkpoints."""
        for name, weight in self._meta_model.tensors.items():
            if self._meta_model.parameter(name) is None:
                continue  # a buffer
            empty = torch.empty_like(weight, dtype=torch.float32)
            for state in (MASTER, *MOMENTS):
                yield Unit(name, self._meta_model.shards(name, empty, state), adam=state)

    def tensor(self, unit: Unit) -> torch.Tensor:
        """Return the tensor of a unit. Units of one parameter are read at once."""
        if self._last is None or self._last[0] != unit.name:
            self._last = (unit.name, self.read(unit.name))
        return self._last[1][unit.adam]

    def _stored_name(self, names: Sequence[str]) -> str | None:
        if self._buckets is not None:
            return next((name for name in names if self._buckets.has(name)), None)
        keys = [plain_key(key) for key in self._checkpoint.tensor_sizes]
        starts = {name: f"optimizer.state.{name}." for name in names}
        return next(
            (name for name, start in starts.items() if any(key.startswith(start) for key in keys)),
            None,
        )


def _is_named(checkpoint: Checkpoint) -> bool:
    """True if Adam's tensors have the names of parameters; False if they are in buckets."""
    for key in checkpoint.tensor_sizes:
        if plain_key(key).startswith("optimizer.state.exp_avg."):
            return True
        if BUCKET.fullmatch(key):
            return False
    raise DataError(
        "the checkpoint has no optimizer state",
        where=str(checkpoint.folder),
        do="take its weights only: model.source.megatron_optimizer=false (--no-load-optim)",
    )


def _steps(state: Any) -> Iterator[int]:
    """Yield the numbers of steps in an optimizer's state dict."""
    if isinstance(state, dict):
        for key, value in state.items():
            if key in ("step", "common_step") and value is not None:
                yield int(value)
            else:
                yield from _steps(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _steps(value)
