"""Call user functions inside every trainer rank, with slime's signatures.

    custom_megatron_init_path
        (args)
        once, before the models are built
    custom_megatron_before_log_prob_hook_path
        (args, model, store_prefix)
        before a model scores a batch
    custom_megatron_before_train_step_hook_path
        (args, rollout_id, step_id, model, optimizer, opt_param_scheduler)
        after gradients are zeroed, before they are computed

`args` has slime's names. `model` is the list of the rank's model chunks, each in Megatron's
DistributedDataParallel; a teacher has no such wrapper. Without virtual pipelining there is one
chunk. `store_prefix` is "" for the policy, "ref_" for the reference and "teacher_" for the teacher.
Optimizer and scheduler are Megatron's objects of the policy.

All ranks call a hook in the same order, so a hook may call collectives. Values that the third hook
leaves in `main_grad` of the parameters are added to the gradient of the loss. A hook must depend on
its arguments only: a restart of a rank loses the hook's own state.
"""

from __future__ import annotations

from typing import Any

from rlpipe.config.hooks import load_positional, rollout_id
from rlpipe.config.train import TrainConfig

PARAMETERS: dict[str, tuple[str, ...]] = {
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
"""Key of `train` → positional parameters of the hook."""


def megatron_hook_paths(train: TrainConfig) -> dict[str, str]:
    """Return key → path of the hooks that are set."""
    return {key: path for key in PARAMETERS if (path := getattr(train, key))}


class MegatronHooks:
    """The loaded hooks of a configuration; a hook that is not set does nothing."""

    def __init__(self, train: TrainConfig, args: Any = None) -> None:
        """Load the hooks; `args` is the first argument of each call.

        Raises: ConfigError if a hook does not exist or does not accept its arguments.
        """
        self._args = args
        self._hooks = {
            key: load_positional(path, PARAMETERS[key], f"train.{key}")
            for key, path in megatron_hook_paths(train).items()
        }

    def init(self) -> None:
        """Call the init hook. Process groups must be open."""
        self._call("custom_megatron_init_path")

    def before_log_prob(self, model: list[Any], store_prefix: str) -> None:
        """Call the hook that precedes the scoring of a batch."""
        self._call("custom_megatron_before_log_prob_hook_path", model, store_prefix)

    def before_train_step(
        self, iteration: int, step_id: int, model: list[Any], optimizer: Any, scheduler: Any
    ) -> None:
        """Call the hook that precedes optimizer step `step_id` of an iteration."""
        key = "custom_megatron_before_train_step_hook_path"
        number = rollout_id(self._args, iteration)
        self._call(key, number, step_id, model, optimizer, scheduler)

    def _call(self, key: str, *arguments: Any) -> None:
        if key in self._hooks:
            self._hooks[key](self._args, *arguments)
