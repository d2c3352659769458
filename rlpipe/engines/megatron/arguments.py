"""`set_global_arguments`: options of a Megatron-LM checkout's argument provider for `get_args()`.

Users write the options in `train.megatron`, or as flags, like any argument of Megatron. Only a
checkout with a provider (`pretrain_gpt.extra_args_provider`) needs this; nothing is imported
otherwise. `rlpipe.config.arguments.checkout` reads the options.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.config.arguments import names
from rlpipe.config.arguments.checkout import PROVIDER
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError

GLOBALS = "megatron.training.global_vars"


def provider_options() -> dict[str, dict[str, Any]]:
    """Return the provider's options by name, as in the tables of names; {} without a provider."""
    return names.load("megatron")["receivers"].get(PROVIDER, {})


def set_global_arguments(train: TrainConfig) -> Namespace | None:
    """Set the result of `get_args()`: the arguments of Megatron and of the provider.

    Returns the arguments; None without a provider. Raises: ConfigError if the checkout has a
    provider, but its global arguments cannot be imported.
    """
    if not provider_options():
        return None
    known = names.load("megatron")["receivers"].values()
    defaults = {name: entry["default"] for arguments in known for name, entry in arguments.items()}
    optimizer = train.optimizer.model_dump(
        include=defaults.keys() & type(train.optimizer).model_fields.keys()
    )
    arguments = Namespace(
        **{**defaults, **optimizer, **train.parallel.model_dump(), **train.megatron}
    )
    try:
        module = importlib.import_module(GLOBALS)
    except ImportError as error:
        raise ConfigError(
            "the Megatron-LM on PYTHONPATH has an argument provider, but no global arguments",
            where=f"{PROVIDER} of {names.load('megatron')['version'].removeprefix('at ')}",
            found=f"{type(error).__name__}: {error}",
            expected=f"{GLOBALS}.set_args",
        ) from error
    module.set_args(arguments)
    return arguments
