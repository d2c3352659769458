"""Jobs of training ranks with frozen parameters."""

from __future__ import annotations

from typing import Any

import torch

from rlpipe.config.train import CriticConfig, TrainConfig
from rlpipe.errors import ConfigError, TrainerError
from tests.engines.megatron.lora_jobs import numbers
from tests.engines.megatron.ranks import columns_and_plan, engine, make_batch


def train_frozen(
    rank: int, world_size: int, port: int, model_dir: str, train: dict, dtype: str = "float32"
) -> dict[str, Any]:
    """Take four optimizer steps; return everything to compare."""
    config = TrainConfig.model_validate(train)
    ours = engine(model_dir, config, rank, world_size, port, dtype=dtype)
    try:
        ours.load_hf()
        before = weights(ours)
        scores = ours.score(make_batch())
        steps = []
        for iteration in range(2):
            result = ours.train(*columns_and_plan(ours, scores, iteration))
            steps += result.steps
        after = weights(ours)
        return {
            "scores": scores,
            "steps": steps,
            "digest": ours.state_digest(),
            "trained scores": ours.score(make_batch()),
            "after": {name: tensor.float().numpy() for name, tensor in after.items()},
            "changed": {name for name in after if not torch.equal(before[name], after[name])},
            "numbers": numbers(ours) | {"trained": number_trained(ours)},
        }
    finally:
        ours.close()


def weights(ours: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in ours.named_hf_tensors()}


def number_trained(ours: Any) -> int:
    """Return the number of trained parameters on this rank."""
    return sum(
        parameter.numel()
        for model in ours.trained.models
        for parameter in model.parameters()
        if parameter.requires_grad
    )


def error_of_engine(rank: int, world_size: int, port: int, model_dir: str, train: dict) -> str:
    """Return the error of building a trainer."""
    try:
        engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port).close()
    except ConfigError as error:
        return str(error)
    return "no error"


def load_with_others(
    rank: int, world_size: int, port: int, model_dir: str, train: dict, directory: str
) -> dict[str, str]:
    """Return the errors of loading a checkpoint's whole state, and its weights."""
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    try:
        found = {}
        for name, weights_only in (("state", False), ("weights", True)):
            try:
                ours.load_checkpoint(directory, weights_only=weights_only)
                found[name] = "no error"
            except TrainerError as error:
                found[name] = str(error)
        return found
    finally:
        ours.close()


def critic_gradients(
    rank: int, world_size: int, port: int, model_dir: str, train: dict
) -> dict[str, bool]:
    """Return the critic's parameters and if they are trained."""
    config = TrainConfig.model_validate(train)
    ours = engine(
        model_dir,
        config,
        rank,
        world_size,
        port,
        critic=CriticConfig(),
        critic_optimizer_steps=100,
    )
    try:
        return {
            name: parameter.requires_grad
            for model in ours.critic.trained.models
            for name, parameter in model.named_parameters()
        }
    finally:
        ours.close()
