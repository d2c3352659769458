"""Adapters and frozen parameters in torch_dist checkpoints.

A checkpoint holds all weights, adapters as further tensors (`….adapters.q_proj.lora_A`), and the
optimizer state of what is trained. So it resumes, forks and converts without another file. The
content metadata has `train.lora` under the key LORA, and under the key FROZEN the key that freezes
parameters and its patterns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlpipe.config.train import LoraConfig
from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.checkpoint.state import adam_states, parameter_groups
from rlpipe.engines.megatron.model.build import TrainedModel
from rlpipe.engines.megatron.model.lora import MARK
from rlpipe.errors import TrainerError

# isort: split
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

LORA = "lora"
FROZEN = "frozen"
MAIN_WEIGHTS = "fp32_from_fp16_params"
"""Megatron's name of the main weights of each parameter group."""


def metadata(trained: TrainedModel) -> dict[str, Any]:
    """Return the entries of the content metadata; {} if all weights are trained."""
    lora = {} if trained.lora is None else {LORA: trained.lora.model_dump(mode="json")}
    frozen = {key: [*patterns] for key, patterns in trained.frozen.items()}
    return lora | ({FROZEN: frozen} if frozen else {})


def stored_lora(content_metadata: dict[str, Any]) -> LoraConfig | None:
    """Return the adapters of a checkpoint; None without adapters."""
    stored = content_metadata.get(LORA)
    return None if stored is None else LoraConfig.model_validate(stored)


def check_frozen(trained: TrainedModel, content_metadata: dict[str, Any], folder: Path) -> None:
    """Raises: TrainerError if the optimizer state of a checkpoint is of other parameters."""
    stored = content_metadata.get(FROZEN, {})
    own = {key: [*patterns] for key, patterns in trained.frozen.items()}
    if stored != own:
        raise TrainerError(
            "the checkpoint has the optimizer state of other parameters",
            where=str(folder),
            found=_frozen_text(stored),
            expected=_frozen_text(own),
            do="keep the key, or start a run with the weights alone (warm_start, model.start_from)",
        )


def state_metadata(trained: TrainedModel, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the layout by which the optimizer's tensors are named; `metadata` if all are trained.

    Megatron stores a weight of all layers as one tensor. A state of some layers alone would be an
    incomplete one, so each layer and each expert has tensors of its own.
    """
    if not trained.frozen:
        return metadata
    return metadata | {"non_homogeneous_layers": True, "singleton_local_shards": True}


def complete(trained: TrainedModel, optimizer_state: dict[Any, Any]) -> None:
    """Prepare an optimizer state for a checkpoint. Collective.

    Rank 0 stores the step counts and the lengths of lists, and may have no trained parameter. So
    the counts of all ranks are combined, and lists become dicts.
    """
    if not trained.frozen:
        return
    for _, state in _with_main_weights(trained, optimizer_state):
        groups = enumerate(state.pop(MAIN_WEIGHTS))
        if full := {number: dict(enumerate(group)) for number, group in groups if group}:
            state[MAIN_WEIGHTS] = full
    states = [each["state"] for each in adam_states(optimizer_state)]
    groups = [group for group in parameter_groups(optimizer_state) if "step" in group]
    counts = [state.get("common_step", 0) for state in states] + [each["step"] for each in groups]
    step = torch.tensor(max(map(float, counts), default=0.0), device=platform.device())
    torch.distributed.all_reduce(step, op=torch.distributed.ReduceOp.MAX)
    for state in states:
        state["common_step"] = step.cpu()
    for group in groups:
        group["step"] = type(group["step"])(step)


def restore_lists(trained: TrainedModel, optimizer_state: dict[Any, Any]) -> None:
    """Undo the dicts of `complete` in a loaded state."""
    if not trained.frozen:
        return
    for part, state in _with_main_weights(trained, optimizer_state):
        found = state.get(MAIN_WEIGHTS, {})
        state[MAIN_WEIGHTS] = [
            [found[number][i] for i in range(len(group))]
            for number, group in enumerate(part.fp32_from_float16_groups)
        ]


def _with_main_weights(trained: TrainedModel, optimizer_state: Any) -> list[tuple[Any, Any]]:
    """Return the parts of an optimizer that store main weights in lists, with their states."""
    optimizer: Any = trained.optimizer
    parts = optimizer.chained_optimizers
    states = (
        [optimizer_state] if len(parts) == 1 else [optimizer_state[i] for i in range(len(parts))]
    )
    return [
        (part, state)
        for part, state in zip(parts, states, strict=True)
        if isinstance(part, Float16OptimizerWithFloat16Params)
    ]


def are_missing(
    trained: TrainedModel, stored: LoraConfig | None, folder: Path, *, weights_only: bool
) -> bool:
    """True if the model's adapters begin here: the checkpoint has weights without adapters.

    Raises: TrainerError if the checkpoint has other adapters, or its optimizer state is of all
    weights.
    """
    if stored == trained.lora:
        return False
    if stored is None and weights_only:
        return True
    check_same_adapters(trained, stored, folder)
    return False


def check_same_adapters(
    trained: TrainedModel, stored: LoraConfig | None, where: Path | str
) -> None:
    """Raises: TrainerError unless stored weights have the adapters of the policy."""
    if stored == trained.lora:
        return
    raise TrainerError(
        "the checkpoint has other adapters than the policy",
        where=f"train.lora, {where}",
        found=_text(stored),
        expected=_text(trained.lora),
        do="keep train.lora, or start from a merged export (`rlpipe convert dist2hf`) as "
        "model.source.hf_checkpoint",
    )


def without_adapters(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of each chunk without adapters."""
    return {
        key: {name: shard for name, shard in shards.items() if MARK not in name}
        for key, shards in weights.items()
    }


def _frozen_text(frozen: dict[str, list[str]]) -> str:
    """Return one line of text."""
    if not frozen:
        return "no frozen parameters"
    return "; ".join(f"train.{key}: {', '.join(patterns)}" for key, patterns in frozen.items())


def _text(lora: LoraConfig | None) -> str:
    if lora is None:
        return "no adapters"
    return f"rank {lora.rank}, alpha {lora.alpha:g}, {', '.join(lora.target_modules)}"
