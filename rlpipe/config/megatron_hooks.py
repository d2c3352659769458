"""Functions of the user inside every trainer rank, with slime's signatures: how they are called,
and when.

    custom_megatron_init_path                     (args)                                    once, before the models are built
    custom_megatron_before_log_prob_hook_path     (args, model, store_prefix)               before a model scores a batch
    custom_megatron_before_train_step_hook_path   (args, rollout_id, step_id, model,        after gradients are zeroed, before
                                                   optimizer, opt_param_scheduler)          they are computed

`args` has slime's names; `model` is a list of one model chunk, Megatron's DistributedDataParallel
(a teacher's is none); `store_prefix` is "" for the policy, "ref_" for the reference and "teacher_";
optimizer and schedule are Megatron's own, of the policy. A hook may call collectives, as all ranks
call it alike. What the third leaves in the parameters' `main_grad` is added to the gradient of the
loss. State of its own outlives no restart of a rank: what it does must follow from its arguments.

Not here: finding and importing a function (`hooks`). Imports nothing heavy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rlpipe.config.hooks import load_hook
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError

CALLS: dict[str, tuple[str, ...]] = {
    "custom_megatron_init_path": ("args",),
    "custom_megatron_before_log_prob_hook_path": ("args", "model", "store_prefix"),
    "custom_megatron_before_train_step_hook_path": (
        "args",
        "rollout_id",
        "step_id",
        "model",
        "optimizer",
        "opt_param_scheduler",
    ),
}
"""Key of `train` → what the function gets, by position."""


def megatron_hook_paths(train: TrainConfig) -> dict[str, str]:
    """Key → path, of those that are given."""
    return {key: path for key in CALLS if (path := getattr(train, key))}


class MegatronHooks:
    """The functions that a configuration names, ready to be called; those that it does not name do
    nothing."""

    def __init__(self, train: TrainConfig, args: Any = None) -> None:
        """`args`: what each function gets first. Raises: ConfigError if one is not there or cannot
        be called as it will be."""
        self._args = args
        self._hooks = {key: _load(key, path) for key, path in megatron_hook_paths(train).items()}

    def init(self) -> None:
        """Process groups are open."""
        self._call("custom_megatron_init_path")

    def before_log_prob(self, model: Any, store_prefix: str) -> None:
        """A model is about to score a batch."""
        self._call("custom_megatron_before_log_prob_hook_path", [model], store_prefix)

    def before_train_step(
        self, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
    ) -> None:
        """An optimizer step of the policy begins. `step_id`: its number within the iteration
        `rollout_id`."""
        key = "custom_megatron_before_train_step_hook_path"
        self._call(key, rollout_id, step_id, [model], optimizer, scheduler)

    def _call(self, key: str, *arguments: Any) -> None:
        if key in self._hooks:
            self._hooks[key](self._args, *arguments)


def _load(key: str, path: str) -> Callable[..., Any]:
    function = load_hook(path)
    try:
        inspect.signature(function).bind(*CALLS[key])
    except TypeError as error:
        raise ConfigError(
            "this function cannot be called as it would be",
            where=f"train.{key}",
            found=f"{path}: {error}",
            expected=f"({', '.join(CALLS[key])})",
        ) from error
    return function
