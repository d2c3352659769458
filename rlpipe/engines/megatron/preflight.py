"""Check before anything is started that Megatron-core takes a run's arguments together, for its
model and its layout.

    check_trainer(directory, model, train, deterministic=False)

Megatron's three configuration classes refuse arguments that contradict each other, and the bridge
refuses models and layouts that it cannot build. Both need torch and Megatron-core, whose import
takes seconds and begins with CUDA. So they are built in a process of its own, which sees no GPU and
makes no model. Without Megatron-core, on a machine that only submits runs, the ranks find out.

Not here: arguments that are wrong by themselves (`rlpipe.config.arguments`).
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
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError

DEADLINE_S = 300.0
_WITH_TRANSFORMER_ENGINE = {"layernorm", "moe_act", "mla_up_proj"}
"""Modules that Megatron-core recomputes with the help of Transformer Engine's record of FP8."""


def check_trainer(
    directory: Path, model: ModelConfig, train: TrainConfig, *, deterministic: bool = False
) -> None:
    """Build Megatron's configuration of a run in a process of its own.

    Raises: ConfigError for arguments, a model or a layout that the trainer's ranks would refuse.
    """
    if importlib.util.find_spec("megatron") is None:
        return
    given = {
        "directory": str(directory),
        "model": model.model_dump(mode="json"),
        "train": train.model_dump(mode="json"),
        "deterministic": deterministic,
    }
    source = str(Path(rlpipe.__file__).parents[1])
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), source]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    if done.returncode:
        raise ConfigError(
            "Megatron-core cannot be asked whether it takes these arguments",
            where="train.megatron",
            found=f"exit status {done.returncode}: {done.stderr[-1000:].strip()}",
        )
    if error := json.loads(done.stdout.splitlines()[-1]):
        raise ConfigError(**error)


def refused(given: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of a ConfigError for what `check_trainer` was given; None if all of it is
    taken."""
    train = TrainConfig.model_validate(given["train"])
    model = ModelConfig.model_validate(given["model"])
    try:
        _build(given["directory"], model, train, deterministic=given["deterministic"])
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
        # What Megatron-core raises for arguments that it does not take together.
        return {
            "problem": "Megatron-core does not take these arguments together",
            "where": "train.megatron",
            "found": f"{type(error).__name__}: {' '.join(str(error).split())}",
            "expected": f"arguments that go together; given {train.megatron} and {train.parallel.model_dump()}",
        }
    return None


def _build(directory: str, model: ModelConfig, train: TrainConfig, *, deterministic: bool) -> None:
    """Build the three configurations of Megatron-core. Raises: ConfigError, and whatever
    Megatron-core raises."""
    import torch

    from rlpipe.engines.megatron.bridges.bridge import layers_of
    from rlpipe.engines.megatron.model.build import (
        ddp_config,
        open_model,
        optimizer_config,
        split_arguments,
    )

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
    ddp_config(train, for_ddp)
    optimizer_config(train, getattr(torch, model.dtype), for_optimizer)
    bridge = open_model(directory, model, train, deterministic=deterministic, sizes=sizes)
    if train.replays_routing:
        key = (
            "use_rollout_routing_replay"
            if train.use_rollout_routing_replay
            else "use_routing_replay"
        )
        check_routing(bridge.config, where=f"train.{key}")
    if (
        "pipeline_model_parallel_layout" not in train.megatron
    ):  # Megatron reads it from process groups only
        layers_of(bridge, stage=0)
    _check_packages(bridge.config)


def _check_packages(config: Any) -> None:
    """Raises: ConfigError for an argument that needs a package which is not installed."""
    needed = {
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion
        and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None
        and not _has_transformer_engine(),
        "recompute_modules": config.recompute_granularity == "selective"
        and bool(_WITH_TRANSFORMER_ENGINE.intersection(config.recompute_modules))
        and not _has_transformer_engine(),
    }
    for name in filter(needed.get, needed):
        raise ConfigError(
            "this argument needs a package that is not installed",
            where=f"train.megatron.{name}",
            found=getattr(config, name),
            expected="Transformer Engine" + (" or apex" if name.startswith("gradient") else ""),
        )


def _has_transformer_engine() -> bool:
    try:
        return bool(metadata.version("transformer_engine"))
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    print(json.dumps(refused(json.loads(sys.stdin.read()))))
