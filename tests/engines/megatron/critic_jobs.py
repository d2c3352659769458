"""Helpers for tests of a critic with its own ranks: engines, and a history of both models."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlpipe.batch.packing import plan
from rlpipe.config.model import HuggingFaceModel, ModelConfig
from rlpipe.config.train import CriticConfig, TrainConfig
from rlpipe.engines.megatron.checkpoint import disk_space
from rlpipe.engines.megatron.critic_exchange import ExchangeAddress
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.engines.megatron.train.critic_engine import CriticEngine
from rlpipe.errors import StoreFull
from tests.engines.megatron.ranks import engine, make_batch, with_returns

Engine = MegatronEngine | CriticEngine
STEPS = 100


def policy(
    model_dir: str,
    train: dict[str, Any],
    rank: int,
    world_size: int,
    port: int,
    place: ExchangeAddress,
) -> MegatronEngine:
    """Make a rank of a policy that has no critic in its ranks."""
    return engine(
        model_dir, TrainConfig.model_validate(train), rank, world_size, port, critic_exchange=place
    )


def shared(
    model_dir: str, train: dict[str, Any], port: int, critic: dict[str, Any]
) -> MegatronEngine:
    """Make the one rank of a policy and critic that share it."""
    config = CriticConfig.model_validate(critic)
    return engine(
        model_dir,
        TrainConfig.model_validate(train),
        0,
        1,
        port,
        critic=config,
        critic_optimizer_steps=STEPS,
    )


def critic_of_its_own(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict[str, Any],
    critic: dict[str, Any],
    place: ExchangeAddress,
) -> CriticEngine:
    """Make a rank of the critic."""
    source = HuggingFaceModel(type="huggingface", hf_checkpoint=model_dir)
    return CriticEngine(
        CriticConfig.model_validate(critic),
        model_dir,
        ModelConfig(source=source, dtype="float32"),
        TrainConfig.model_validate(train),
        optimizer_steps=STEPS,
        rank=rank,
        world_size=world_size,
        master=("127.0.0.1", port),
        critic_exchange=place,
        threads=1,
        timeout_s=60.0,
    )


def history(ours: Engine, saved: str, *others: str) -> dict[str, Any]:
    """Train the critic alone, then both, two optimizer steps each; save; load other checkpoints.

    Returns everything to compare; `loaded`: the digest after each load, the last with weights only.
    """
    ours.load_hf()
    found: dict[str, Any] = {"begun": ours.state_digest(), "steps": [], "values": []}
    for seed in range(2):
        batch = make_batch(seed=seed)
        found["values"].append(ours.values(batch))
        batch = with_returns(
            batch.with_columns(proximal_log_probs=batch.rollout_log_probs),
            found["values"][-1],
            seed,
        )
        packing = plan(
            batch.lengths,
            global_batch_size=12,
            max_tokens=ours.max_tokens,
            data_parallel=ours.data_parallel,
        )
        result = ours.train(batch, packing, critic_only=seed == 0)
        found["steps"] += result.steps
    found["trained"] = result.state_digest
    ours.save_checkpoint(saved, 1)
    ours.state_digest()  # which both take part in: then both have saved
    found["loaded"] = []
    for directory in (saved, *others):
        ours.load_checkpoint(directory, weights_only=directory == others[-1] if others else False)
        found["loaded"].append(ours.state_digest())
    found["values"].append(ours.values(make_batch(seed=2)))
    return found


def one_rank_each(
    rank: int,
    _world_size: int,
    _port: int,
    model_dir: str,
    train: dict[str, Any],
    critic: dict[str, Any],
    ports: tuple[int, int, int],
    directories: tuple[str, ...],
) -> dict[str, Any]:
    """Run the policy on rank 0 and the critic on rank 1."""
    place = ExchangeAddress(("127.0.0.1", ports[2]), 1, 1)
    if rank == 0:
        ours: Engine = policy(model_dir, train, 0, 1, ports[0], place)
    else:
        ours = critic_of_its_own(0, 1, ports[1], model_dir, train, critic, place)
    try:
        return {
            "no room": without_room_for_both(ours, directories[0]),
            **history(ours, *directories),
        }
    finally:
        ours.close()


def without_room_for_both(ours: Engine, directory: str) -> str:
    """Return the error of a save if the disk has space for only one of the two checkpoints."""
    model = ours.trained if isinstance(ours, MegatronEngine) else ours.critic.trained
    needed = disk_space._disk_space([model], Path(directory) / "iter_0000001").needed_bytes
    original = shutil.disk_usage
    free: Any = lambda _: SimpleNamespace(free=needed * 3 // 2)  # noqa: E731
    shutil.disk_usage = free
    try:
        ours.save_checkpoint(directory, 1)
    except StoreFull as error:
        return error.problem
    finally:
        shutil.disk_usage = original
    return "it was saved"


def of_critic(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict[str, Any],
    critic: dict[str, Any],
    meeting: int,
    saved: str,
) -> dict[str, Any]:
    """Run the critic on all ranks; the policy is one rank of another process."""
    place = ExchangeAddress(("127.0.0.1", meeting), 1, world_size)
    ours = critic_of_its_own(rank, world_size, port, model_dir, train, critic, place)
    try:
        return history(ours, saved)
    finally:
        ours.close()


def same_values(
    found: dict[str, Any], wanted: dict[str, Any], *, tokens_of=(0, 1, 2), within: float = 0.0
) -> bool:
    """Return whether the values of these batches are close to the expected ones."""
    return all(np.abs(found["values"][i] - wanted["values"][i]).max() <= within for i in tokens_of)


def without_critic(model_dir: str, train: dict[str, Any], port: int, directory: Path) -> str:
    """Save a checkpoint of a policy that was trained without a critic."""
    alone = engine(model_dir, TrainConfig.model_validate(train), 0, 1, port)
    batch = make_batch(seed=5)
    alone.load_hf()
    packing = plan(
        batch.lengths, global_batch_size=None, max_tokens=alone.max_tokens, data_parallel=1
    )
    alone.train(batch.with_columns(proximal_log_probs=batch.rollout_log_probs), packing)
    alone.save_checkpoint(directory, 1)
    alone.close()
    return str(directory)
