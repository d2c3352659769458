"""Megatron's optimizers with float32 parameters in a model of 16 bit (`gated_delta`: A_log).

Such a parameter is its own master weight. Both optimizers of Megatron-core 0.16 assume that the
parameters of a group have one dtype. Training is right, but a checkpoint has wrong states:

| optimizer | it finds the Adam state of a parameter by its position | here |
|---|---|---|
| distributed | in the gradient buffers; its groups begin with float32 | `order_states` |
| not distributed | among the parameters of 16 bit, but in groups with all parameters | `counted` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import rlpipe.engines.megatron.platform  # noqa: F401

# isort: split
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


def order_states(optimizer: Any) -> None:
    """Correct the positions of parameters in the groups of new distributed optimizers.

    Megatron puts the float32 parameters of a group before the others, and numbers them in the order
    of the gradient buffers.
    """
    for part in _parts(optimizer, DistributedOptimizer):
        groups = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
        for number, (float32, others) in enumerate(groups):
            for position, parameter in enumerate([*float32, *others]):
                part.model_param_group_index_map[parameter] = (number, position)


@contextlib.contextmanager
def counted(optimizer: Any) -> Iterator[None]:
    """Have optimizers that are not distributed count float32 parameters, to save or load a state.

    The checkpoint then has a master weight of each parameter. No step may be taken meanwhile.
    """
    parts = list(_parts(optimizer, Float16OptimizerWithFloat16Params))
    kept = [(part.float16_groups, part.fp32_from_float16_groups) for part in parts]
    for part, (weights, masters) in zip(parts, kept, strict=True):
        pairs = zip(chain(*masters), chain(*weights), strict=True)
        weight_of = {id(master): weight for master, weight in pairs}
        groups = [list(group["params"]) for group in part.optimizer.param_groups]
        part.fp32_from_float16_groups = groups
        part.float16_groups = [
            [weight_of.get(id(master), master) for master in group] for group in groups
        ]
    try:
        yield
    finally:
        for part, (weights, masters) in zip(parts, kept, strict=True):
            part.float16_groups = weights
            part.fp32_from_float16_groups = masters


def _parts(optimizer: Any, kind: type) -> Iterator[Any]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, kind) and part.optimizer is not None:
            yield part
