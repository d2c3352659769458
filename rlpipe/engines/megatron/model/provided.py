"""Build the policy by a function of the user: `train.custom_model_provider_path`, as in slime.

    model_provider(pre_process, post_process[, vp_stage][, config]) -> GPTModel

The function returns this rank's part of a Megatron GPT. `config` is the run's TransformerConfig,
from config.json and `train.megatron`; a function of slime that has no such parameter reads
Megatron-LM's `get_args()`, which needs a checkout of Megatron-LM on PYTHONPATH. Layers may be
Megatron's local ones or the user's own. Weights are loaded and exported by the names of the
parameters, so a parameter needs a name that the model family knows.

The model becomes a `PolicyModel`, and its attention the trainer's packed attention. Critics and
teachers are built without the function.
"""

from __future__ import annotations

import inspect
from typing import Any

import rlpipe.engines.megatron.platform  # noqa: F401
from rlpipe.config.hooks import error_with_line, load_hook
from rlpipe.errors import ConfigError

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from rlpipe.engines.megatron.model.attention import CoreAttention
from rlpipe.engines.megatron.model.layers import PolicyModel

KEY = "train.custom_model_provider_path"


def provided_model(path: str, config: TransformerConfig, **place: Any) -> PolicyModel:
    """Return the model of the user's function.

    `place`: `pre_process`, `post_process` and `vp_stage` of this rank's part. Raises: ConfigError
    if the function fails, or returns another type or another attention, or no layers for
    multi-token prediction where they are trained.
    """
    function = load_hook(path)
    parameters = inspect.signature(function).parameters
    optional = {"vp_stage": place.pop("vp_stage"), "config": config}
    place |= {name: value for name, value in optional.items() if name in parameters}
    where = f"{KEY}: {path}"
    try:
        model = function(**place)
    except Exception as error:  # a hook can raise anything
        raise ConfigError(
            "the model provider failed", where=where, found=error_with_line(error)
        ) from error
    if not isinstance(model, GPTModel):
        raise ConfigError(
            "the model provider returned another type",
            where=where,
            found=type(model).__name__,
            expected="megatron.core.models.gpt.GPTModel",
        )
    if config.mtp_num_layers and not model.mtp_process:
        raise ConfigError(
            "the provided model has no layers for multi-token prediction",
            where=where,
            found=f"train.megatron.mtp_num_layers: {config.mtp_num_layers}",
            expected="a GPTModel with mtp_block_spec",
            do="give GPTModel its mtp_block_spec, or remove train.megatron.mtp_num_layers",
        )
    for name, module in model.named_modules():
        if name.endswith("core_attention") and not isinstance(module, CoreAttention):
            _make_packed(module, f"{where}: {name}")
    policy: Any = model
    policy.__class__ = _policy_class(type(model))
    return policy


def _policy_class(kind: type[Any]) -> type[Any]:
    """Return the class with the user's methods first, then PolicyModel's, then GPTModel's."""
    if issubclass(kind, PolicyModel):
        return kind
    return PolicyModel if kind is GPTModel else type(kind.__name__, (kind, PolicyModel), {})


def _make_packed(module: Any, where: str) -> None:
    """Make Megatron's local attention the trainer's. Raises: ConfigError for any other one."""
    config = module.config
    plain = type(module) is DotProductAttention and module.softmax_offset is None
    if not plain or config.window_size is not None:
        raise ConfigError(
            "the trainer cannot run this attention on packed samples",
            where=where,
            found=type(module).__name__ if not plain else f"window_size: {config.window_size}",
            expected="Megatron's DotProductAttention without windows and sinks",
            do="build the layers with megatron.core's get_gpt_layer_local_spec",
        )
    attention: Any = module
    attention.__class__ = CoreAttention
    attention.cp_group = parallel_state.get_context_parallel_group()
    attention._window = None
