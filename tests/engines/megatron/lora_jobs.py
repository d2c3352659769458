"""Jobs of training ranks with adapters, and the same adapters in plain torch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from rlpipe.config.train import LoraConfig, TrainConfig
from rlpipe.engines.megatron.checkpoint.adapter_file import adapter_file, load_adapter_file
from rlpipe.engines.megatron.checkpoint.state import inner_optimizers
from rlpipe.errors import TrainerError
from tests.engines.megatron.ranks import columns_and_plan, engine, make_batch

_NAME = re.compile(r"(?:.*\.)?decoder\.layers\.(\d+)\.(self_attention|mlp)\..*adapters\.(.+)")


class PlainLora(torch.nn.Module):
    """W x + scale · B (A x)."""

    def __init__(self, base: Any, lora: LoraConfig) -> None:
        super().__init__()
        self.base = base
        self.scale = lora.alpha / lora.rank
        self.lora_A = torch.nn.Parameter(torch.zeros(lora.rank, base.in_features))
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, lora.rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * linear(linear(x, self.lora_A), self.lora_B)


def with_plain_adapters(model: torch.nn.Module, lora: LoraConfig) -> torch.nn.Module:
    """Freeze a transformers model and add adapters to its target modules."""
    model.requires_grad_(False)
    for owner in [*model.modules()]:
        for name, module in [*owner.named_children()]:
            if name in lora.target_modules:
                setattr(owner, name, PlainLora(module, lora))
    return model


def plain_adapters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the adapters by name, such as `0.self_attn.q_proj.lora_A`."""
    return {
        name.removeprefix("model.layers."): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }


def own_adapters(ours: Any) -> dict[str, torch.nn.Parameter]:
    """Return the adapters of an engine's rank, by the names of `plain_adapters`."""
    found = {}
    for model in ours.trained.models:
        first = model.decoder.layers[0].layer_number - 1
        for name, parameter in model.named_parameters():
            if match := _NAME.fullmatch(name):
                block = match[2].replace("self_attention", "self_attn")
                found[f"{first + int(match[1])}.{block}.{match[3]}"] = parameter
    return found


def copies(adapters: dict[str, torch.nn.Parameter]) -> dict[str, np.ndarray]:
    return {name: each.detach().float().cpu().numpy().copy() for name, each in adapters.items()}


def gradients(adapters: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: each.main_grad.float().cpu().numpy().copy() for name, each in adapters.items()}


def train_adapters(
    rank: int, world_size: int, port: int, model_dir: str, train: dict, dtype: str = "float32"
) -> dict[str, Any]:
    """Take four optimizer steps; return everything to compare."""
    config = TrainConfig.model_validate(train)
    ours = engine(model_dir, config, rank, world_size, port, dtype=dtype)
    try:
        ours.load_hf()
        ours.keep_reference()
        first = copies(own_adapters(ours))
        frozen = {
            name: parameter.detach().clone()
            for model in ours.trained.models
            for name, parameter in model.named_parameters()
            if "adapters" not in name
        }
        scores = ours.score(make_batch())
        steps = []
        for iteration in range(2):
            columns, packing = columns_and_plan(ours, scores, iteration)
            result = ours.train(columns, packing)
            steps += result.steps
        last = gradients(own_adapters(ours))
        return {
            "first": first,
            "scores": scores,
            "steps": steps,
            "digest": ours.state_digest(),
            "gradients": last,
            "adapters": copies(own_adapters(ours)),
            "trained scores": ours.score(make_batch()),
            "reference": ours.score(make_batch(), model="reference"),
            "both": ours.score_with_reference(make_batch()),
            "merged": {
                name: tensor.float().cpu().numpy().copy()
                for name, tensor in ours.named_hf_tensors()
            },
            "frozen": all(
                torch.equal(parameter, frozen[name])
                for model in ours.trained.models
                for name, parameter in model.named_parameters()
                if name in frozen
            ),
            "numbers": numbers(ours),
        }
    finally:
        ours.close()


def numbers(ours: Any) -> dict[str, int]:
    """Return the numbers of parameters, of gradients and of optimizer state on this rank."""
    trained = ours.trained
    chunks = trained.chunks
    return {
        "parameters": sum(p.numel() for model in trained.models for p in model.parameters()),
        "adapters": sum(p.numel() for p in own_adapters(ours).values()),
        "gradients": sum(
            buffer.grad_data.numel()
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ),
        "optimizer": sum(
            value.numel()
            for part in inner_optimizers(trained.optimizer)
            for state in part.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ),
    }


def save_adapters(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict,
    directory: str,
    start: str | None = None,
    *,
    adapter: str | None = None,
    steps: bool = True,
) -> dict[str, Any]:
    """Train two steps, save iteration 3, and return the weights by Hugging Face name.

    `start`: a checkpoint with the first weights. `adapter`: a directory of PEFT with the first
    adapters. `steps`: False saves the first weights.
    """
    config = TrainConfig.model_validate(train)
    ours = engine(model_dir, config, rank, world_size, port, adapter=adapter)
    try:
        if start is None:
            ours.load_hf()
        else:
            ours.load_checkpoint(start, weights_only=True)
        if steps:
            ours.train(*columns_and_plan(ours, ours.score(make_batch()), 0))
        ours.save_checkpoint(directory, 3)
        return {
            "file": adapter_file(ours.trained),
            **scores_and_weights(ours),
        }
    finally:
        ours.close()


def scores_and_weights(ours: Any) -> dict[str, Any]:
    return {
        "scores": ours.score(make_batch()),
        "merged": {
            name: tensor.float().cpu().numpy().copy() for name, tensor in ours.named_hf_tensors()
        },
    }


def load_file(
    rank: int, world_size: int, port: int, model_dir: str, train: dict, data: bytes
) -> dict[str, Any]:
    """Load the model and a file of adapters; return scores and weights, or the error."""
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    try:
        ours.load_hf()
        load_adapter_file(ours.trained, data, "adapters.safetensors")
        main = [each.float().clone() for each in main_weights(ours)]
        ours.trained.optimizer.reload_model_params()
        loaded = all(map(torch.equal, main, main_weights(ours)))
        return {**scores_and_weights(ours), "loaded by the optimizer": loaded}
    except TrainerError as error:
        return {"error": str(error)}
    finally:
        ours.close()


def main_weights(ours: Any) -> list[torch.Tensor]:
    """Return the parameters that the optimizer steps."""
    return [
        parameter
        for part in inner_optimizers(ours.trained.optimizer)
        for group in part.optimizer.param_groups
        for parameter in group["params"]
    ]


def fresh_adapters(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict,
    directory: str,
    *,
    only_error: bool = False,
) -> dict[str, Any]:
    """Load the weights of a checkpoint and return their scores; with `only_error` the error."""
    config = TrainConfig.model_validate(train)
    ours = engine(model_dir, config, rank, world_size, port)
    try:
        if only_error:
            return {"error": _error(ours, directory, weights_only=True)}
        ours.load_checkpoint(directory, weights_only=True)
        found: dict[str, Any] = {"digest": ours.weights_digest()}
        scores = ours.score(make_batch())
        ours.train(*columns_and_plan(ours, scores, 0))
        ours.load_reference(directory)
        found |= {"second digest": ours.weights_digest(), "scores": ours.score(make_batch())}
        found["reference"] = ours.score(make_batch(), model="reference")
        found["saved"] = scores
        found["whole state"] = _error(ours, directory, weights_only=False)
        return found
    finally:
        ours.close()


def _error(ours: Any, directory: str, *, weights_only: bool) -> str:
    try:
        ours.load_checkpoint(directory, weights_only=weights_only)
    except TrainerError as error:
        return str(error)
    return "no error"


def offload_and_score(
    rank: int, world_size: int, port: int, model_dir: str, train: dict
) -> dict[str, Any]:
    """Train, offload everything, restore it, and return what must not have changed."""
    config = TrainConfig.model_validate(train)
    ours = engine(model_dir, config, rank, world_size, port)
    try:
        ours.load_hf()
        ours.keep_reference()
        columns, packing = columns_and_plan(ours, ours.score(make_batch()), 0)
        ours.train(columns, packing)
        before = (ours.state_digest(), *ours.score_with_reference(make_batch()))
        kept = ours.occupy(())["kept_bytes"]
        ours.occupy()
        after = (ours.state_digest(), *ours.score_with_reference(make_batch()))
        return {
            "kept": kept,
            "equal": all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)),
            "differs": not np.array_equal(before[1], before[2]),
        }
    finally:
        ours.close()
