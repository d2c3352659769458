"""Load the first adapters of a policy from a directory of PEFT: `model.adapter`.

`check_tensors` compares names and shapes with the model's, `begin_adapters` sets the adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlpipe.config.peft_directory import KEY, WEIGHTS, adapter_path, check_adapter
from rlpipe.config.train import LoraConfig
from rlpipe.engines.megatron.model.build import TrainedModel
from rlpipe.engines.megatron.model.lora import ADAPTERS, LAYERS, adapted_modules, initialize
from rlpipe.errors import ConfigError

# isort: split
from mbridge.core import LLMBridge

MATRICES = ("lora_A", "lora_B")
_NAMES = 5
"""Most names in an error."""


def peft_name(bridge: LLMBridge, weight: str, part: str, matrix: str) -> str | None:
    """Return PEFT's name of a matrix; None if the model's files have no tensor of this part.

    `weight`: mbridge's name of the layer's weight, with the number of the layer in the whole model.
    """
    paths = [
        name.removesuffix(".weight") for name in bridge._weight_name_mapping_mcore_to_hf(weight)
    ]
    path = next((path for path in paths if path.endswith(f".{part}")), None)
    return path and f"base_model.model.{path}.{matrix}.weight"


def check_tensors(bridge: LLMBridge, lora: LoraConfig, directory: Path) -> None:
    """Check the directory against `train.lora` and the model.

    Raises: ConfigError for missing, unknown or misshapen tensors and for a broken file.
    """
    check_adapter(directory, lora)
    with _opened(directory) as file:
        names = [*file.keys()]
        found = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    expected = _shapes(bridge, lora)
    missing = sorted({*expected} - {*found})
    unknown = sorted({*found} - {*expected})
    if missing or unknown:
        raise ConfigError(
            "these adapters are not of the run's model",
            where=f"{KEY}: {directory / WEIGHTS}",
            found="; ".join(
                f"{kind}: {', '.join(names[:_NAMES])}{' ...' if len(names) > _NAMES else ''}"
                for kind, names in {"missing": missing, "unknown": unknown}.items()
                if names
            ),
            expected=f"{len(expected)} tensors on {', '.join(lora.target_modules)} of every layer",
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ConfigError(
                "these adapters have other sizes than the run's model",
                where=f"{KEY}: {directory / WEIGHTS}: {name}",
                found=found[name],
                expected=shape,
                do="give the model on which they were trained as model.source",
            )


@contextmanager
def _opened(directory: Path) -> Iterator[Any]:
    """Open the tensors of a directory. Raises: ConfigError for a broken file."""
    try:
        with safe_open(directory / WEIGHTS, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise ConfigError(
            "not a safetensors file",
            where=f"{KEY}: {directory / WEIGHTS}",
            found=error,
            do="copy it again",
        ) from error


def _shapes(bridge: LLMBridge, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Return PEFT's name → shape of all adapters of the whole model. Raises: ConfigError."""
    config: Any = bridge.config
    hidden = config.hidden_size
    heads = config.num_attention_heads * config.kv_channels
    groups = (config.num_query_groups or config.num_attention_heads) * config.kv_channels
    feed_forward = config.ffn_hidden_size
    sizes = {
        "q_proj": (heads, hidden),
        "k_proj": (groups, hidden),
        "v_proj": (groups, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (feed_forward, hidden),
        "up_proj": (feed_forward, hidden),
        "down_proj": (hidden, feed_forward),
    }
    shapes = {}
    for number in range(config.num_layers):
        for path, parts in LAYERS.items():
            weight = f"decoder.layers.{number}.{path}.weight"
            for part in [part for part in parts if part in lora.target_modules]:
                rows, columns = sizes[part]
                for matrix, shape in zip(
                    MATRICES, ((lora.rank, columns), (rows, lora.rank)), strict=True
                ):
                    shapes[required_name(bridge, weight, part, matrix)] = shape
    return shapes


def required_name(bridge: LLMBridge, weight: str, part: str, matrix: str, where: str = KEY) -> str:
    """Return PEFT's name of a matrix. Raises: ConfigError without one. Arguments: `peft_name`."""
    name = peft_name(bridge, weight, part, matrix)
    if name is None:
        raise ConfigError(
            "PEFT has no name for these adapters",
            where=where,
            found=f"{part}: the model's files join it with other matrices",
            do="leave this layer out of train.lora.target_modules",
        )
    return name


@torch.no_grad()
def begin_adapters(trained: TrainedModel, adapter: str | None) -> None:
    """Set this rank's part of all adapters, if the policy has any.

    `adapter`: directory of PEFT; None: their first values. Raises: as `check_tensors`.
    """
    if trained.lora is None or adapter is None:
        initialize(trained.models)
        return
    directory = adapter_path(adapter)
    check_tensors(trained.bridge, trained.lora, directory)
    with _opened(directory) as file:
        for module in [each for model in trained.models for each in adapted_modules(model)]:
            for part in module.adapters:
                for matrix in MATRICES:
                    name = required_name(trained.bridge, module.weight_name, part, matrix)
                    fill(module, part, matrix, file.get_tensor(name))


def fill(module: Any, part: str, matrix: str, whole: torch.Tensor) -> None:
    """Set this rank's part of an adapter's matrix. `module`: an adapted layer."""
    parameter = getattr(module.adapters[part], matrix)
    dimension = module.split.get(f"{ADAPTERS}.{part}.{matrix}")
    if dimension is not None:
        whole = whole.chunk(module.tp_group.size(), dimension)[module.tp_group.rank()]
    parameter.copy_(whole)
