"""`check_trainer`: check before a start that Megatron-core accepts a run's arguments together.

Megatron's three configuration classes refuse arguments that contradict each other. The bridge
refuses models and layouts that it cannot build. Both need torch and Megatron-core, whose import
takes seconds and initialises CUDA. So a separate process without GPUs builds them, without a model.
A machine that only submits runs may have no Megatron-core: there the ranks check.
`rlpipe.config.arguments` checks single arguments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import rlpipe
from rlpipe.config.model import ModelConfig
from rlpipe.config.peft_directory import adapter_path
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError
from rlpipe.system.imports import quick_imports

DEADLINE_S = 300.0
_accepted: set[tuple[str, str]] = set()
"""Requests that a process has accepted, each with the model's config.json. The command checks a
configuration before it starts servers, and the flow does again: 5 CPU seconds each."""
_NEED_TRANSFORMER_ENGINE = {"layernorm", "moe_act", "mla_up_proj"}
"""Modules that Megatron-core can recompute only with Transformer Engine."""


def check_trainer(
    directory: Path, model: ModelConfig, train: TrainConfig, *, deterministic: bool = False
) -> None:
    """Build Megatron's configuration of a run in a separate process.

    Raises: ConfigError for arguments, a model or a layout that the trainer's ranks would refuse.
    """
    if importlib.util.find_spec("megatron") is None:
        return
    request = {
        "directory": str(directory),
        "model": model.model_dump(mode="json"),
        "train": train.model_dump(mode="json"),
        "deterministic": deterministic,
    }
    text = json.dumps(request)
    checked = (text, (directory / "config.json").read_text())
    if checked in _accepted:
        return
    source = str(Path(rlpipe.__file__).parents[1])
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), source]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__],
        input=text,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    if done.returncode:
        raise ConfigError(
            "the process that checks these arguments with Megatron-core failed",
            where="train.megatron",
            found=f"exit status {done.returncode}: {done.stderr[-1000:].strip()}",
        )
    # Imported packages may print other lines before the result.
    if error := json.loads(done.stdout.splitlines()[-1]):
        raise ConfigError(**error)
    _accepted.add(checked)


def refused(request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a ConfigError for the request of `check_trainer`; None if accepted."""
    train = TrainConfig.model_validate(request["train"])
    model = ModelConfig.model_validate(request["model"])
    try:
        _build(request["directory"], model, train, deterministic=request["deterministic"])
    except ConfigError as error:
        fields = {
            "where": error.where,
            "found": error.found,
            "expected": error.expected,
            "do": error.do,
        }
        texts = {name: value if value is None else str(value) for name, value in fields.items()}
        return {"problem": error.problem, **texts}
    except (ValueError, AssertionError, ImportError, TypeError, NotImplementedError) as error:
        # Megatron-core raises all of these for arguments that contradict each other.
        return {
            "problem": "Megatron-core does not take these arguments together",
            "where": "train.megatron",
            "found": f"{type(error).__name__}: {' '.join(str(error).split())}",
            "expected": f"arguments that go together; given {train.megatron} and "
            f"{train.parallel.model_dump()}",
        }
    return None


def _build(directory: str, model: ModelConfig, train: TrainConfig, *, deterministic: bool) -> None:
    """Build Megatron-core's three configurations. Raises: ConfigError; Megatron-core's errors."""
    import torch

    from rlpipe.engines.megatron.bridges.bridge import layers_of
    from rlpipe.engines.megatron.checkpoint.first_adapters import check_tensors
    from rlpipe.engines.megatron.model.build import (
        chunk_numbers,
        ddp_config,
        open_model,
        optimizer_config,
        split_arguments,
    )
    from rlpipe.engines.megatron.model.lora import check_adapters

    # isort: split
    from mbridge.core.parallel_states import ParallelStates

    from rlpipe.engines.megatron.train.routing import check_routing

    parallel = train.parallel
    sizes = ParallelStates(
        vpp_size=cast("Any", None),
        tp_size=parallel.tensor_model_parallel_size,
        pp_size=parallel.pipeline_model_parallel_size,
        cp_size=parallel.context_parallel_size,
        ep_size=parallel.expert_model_parallel_size,
        etp_size=parallel.expert_tensor_parallel_size,
    )
    _, for_optimizer, for_ddp = split_arguments(train.megatron)
    _check_optimizer_packages(train)
    ddp_config(train, for_ddp)
    optimizer_config(train, getattr(torch, model.dtype), for_optimizer)
    bridge = open_model(directory, model, train, deterministic=deterministic, sizes=sizes)
    check_routing(bridge.config, train)
    check_adapters(bridge, train)
    if model.adapter is not None and train.lora is not None:
        check_tensors(bridge, train.lora, adapter_path(model.adapter))
    if train.frozen_names and train.custom_model_provider_path is None:
        _check_frozen_names(directory, train, predicts=bool(bridge.config.mtp_num_layers))
    # With this argument Megatron reads the stage from process groups, which do not exist here.
    if "pipeline_model_parallel_layout" not in train.megatron:
        for chunk in chunk_numbers(bridge):
            layers_of(bridge, stage=0, chunk=chunk)
    _check_packages(bridge.config)
    _check_dispatcher(bridge.config)


def _check_frozen_names(directory: str, train: TrainConfig, *, predicts: bool) -> None:
    """Raises: ConfigError for a pattern of frozen names that the model's parameters do not have."""
    import torch

    from rlpipe.engines.megatron.checkpoint.conversion.meta_model import (
        MetaModel,
        single_process_groups,
    )
    from rlpipe.engines.megatron.model.freezing import OUTPUT_LAYER, check_names

    with single_process_groups():
        model = MetaModel(directory, torch.bfloat16, predicts=predicts)
    names = [model.mbridge_names[name] for name in model.parameter_names]
    check_names(train, [*names, OUTPUT_LAYER] if model.tied else names)


def _check_optimizer_packages(train: TrainConfig) -> None:
    """Raises: ConfigError if Adam's smaller state is to be used without its kernels."""
    name = "use_precision_aware_optimizer"
    used = train.megatron.get(name) and train.use_distributed_optimizer
    if used and not _has_transformer_engine():
        raise ConfigError(
            "this argument needs a package that is not installed",
            where=f"train.megatron.{name}",
            found=True,
            expected="Transformer Engine",
            do="install it, or remove the argument: it saves memory and changes no result",
        )


def _check_packages(config: Any) -> None:
    """Raises: ConfigError for an argument that needs a missing package."""
    needed = {
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion
        and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None
        and not _has_transformer_engine(),
        "recompute_modules": config.recompute_granularity == "selective"
        and bool(_NEED_TRANSFORMER_ENGINE.intersection(config.recompute_modules))
        and not _has_transformer_engine(),
    }
    for name in filter(needed.get, needed):
        raise ConfigError(
            "this argument needs a package that is not installed",
            where=f"train.megatron.{name}",
            found=getattr(config, name),
            expected="Transformer Engine" + (" or apex" if name.startswith("gradient") else ""),
        )


def _check_dispatcher(config: Any) -> None:
    """Raises: ConfigError for a dispatcher of tokens that needs other ranks."""
    sizes = (config.expert_model_parallel_size, config.expert_tensor_parallel_size)
    if (
        config.num_moe_experts is not None
        and config.moe_token_dispatcher_type == "flex"
        and sizes == (1, 1)
    ):
        raise ConfigError(
            "this dispatcher needs several ranks that share the experts",
            where="train.megatron.moe_token_dispatcher_type",
            found="flex, with all experts on each rank",
            expected="train.parallel.expert_model_parallel_size above 1",
            do="remove the argument: without other ranks there is no transfer to choose",
        )


def _has_transformer_engine() -> bool:
    try:
        return bool(metadata.version("transformer_engine"))
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    with quick_imports():
        print(json.dumps(refused(json.loads(sys.stdin.read()))))
