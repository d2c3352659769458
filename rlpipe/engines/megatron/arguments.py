"""Options that a Megatron-LM checkout's own argument provider adds, given to its code: it asks
`get_args()` for them.

They are written in `train.megatron`, or as bare flags, like any argument of Megatron's. Only a
checkout that has a provider (`pretrain_gpt.extra_args_provider`) is concerned; nothing of it is
imported otherwise.

Not here: which options there are (`rlpipe.config.arguments.checkout`).
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


def provided() -> dict[str, dict[str, Any]]:
    """The provider's options, by name, as in the tables of names; {} where there is none."""
    return names.load("megatron")["receivers"].get(PROVIDER, {})


def give_arguments(train: TrainConfig) -> Namespace | None:
    """Let `get_args()` answer Megatron's arguments by their own names, the provider's and ours;
    None if there is no provider.

    Raises: ConfigError if the checkout has a provider, but its global arguments cannot be imported.
    """
    if not provided():
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
            "the Megatron-LM on PYTHONPATH has an argument provider, but not where its code asks for arguments",
            where=f"{PROVIDER} of {names.load('megatron')['version'].removeprefix('at ')}",
            found=f"{type(error).__name__}: {error}",
            expected=f"{GLOBALS}.set_args",
        ) from error
    module.set_args(arguments)
    return arguments
