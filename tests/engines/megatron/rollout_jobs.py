"""A batch of rollouts with two samples each, scored by an engine, and the job that trains it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from tests.engines.megatron.ranks import engine, make_batch, near


def fanned_batch(ours: Any) -> tuple[BatchColumns, np.ndarray]:
    """Return the batch, with log-probs close to the engine's, and the engine's log-probs."""
    batch = make_batch()
    scores = ours.score(batch)
    columns = {"proximal_log_probs": 0.1, "reference_log_probs": 0.3, "rollout_log_probs": 0.6}
    around = {name: near(scores, scale, seed) for seed, (name, scale) in enumerate(columns.items())}
    return batch.with_columns(**around, rollout=np.arange(len(batch)) // 2), scores


def train_fanned(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict[str, Any],
    hook_args: Any = None,
) -> dict[str, Any]:
    """Return the metrics of three optimizer steps, and the digest after them."""
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    try:
        ours.load_hf()
        batch, _ = fanned_batch(ours)
        packing = plan(
            batch.lengths,
            global_batch_size=None,
            num_steps=3,
            rollout=batch.rollout,
            max_tokens=ours.max_tokens,
            data_parallel=ours.data_parallel,
        )
        result = ours.train(batch, packing, hook_args=hook_args)
        return {"steps": result.steps, "digest": result.state_digest}
    finally:
        ours.close()
