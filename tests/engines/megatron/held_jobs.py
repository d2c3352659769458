"""A job of training ranks: score and train with the whole batch, or each rank with its samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rlpipe.batch.columns import BatchColumns, BatchPart
from rlpipe.batch.packing import plan
from rlpipe.config.train import CriticConfig, TrainConfig
from rlpipe.errors import DataError
from tests.engines.megatron.ranks import engine, held, make_batch, near, with_returns


def score_and_train_held(
    rank: int,
    world_size: int,
    port: int,
    model_dir: str,
    train: dict,
    samples: int,
    own: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return scores, metrics and state after one iteration of `options["steps"]` optimizer steps.

    `own`: a rank holds the samples that it reads. `options`: `scored`, with proximal log-probs;
    `fanned`, several samples a rollout; `critic`.
    """
    config = TrainConfig.model_validate(train)
    critic = CriticConfig() if options.get("critic") else None
    ours = engine(
        model_dir, config, rank, world_size, port, critic=critic, critic_optimizer_steps=100
    )

    try:
        ours.load_hf()
        batch = make_batch(samples)
        if options.get("fanned"):
            batch = batch.with_columns(rollout=np.arange(samples) // 2)
        scoring = shuffled(batch) if options.get("shuffled") else batch
        scored = held(scoring, ours.scored_samples(scoring.sizes)) if own else scoring
        results: dict[str, Any] = {"scores": ours.score(scored)}
        if config.use_routing_replay:
            results["experts"] = ours.score_and_route(scored)[1]
            batch = batch.with_columns(routed_experts=results["experts"])
        batch = batch.with_columns(reference_log_probs=near(results["scores"], 0.3, 1))
        if critic:
            results["values"] = ours.values(scored)
            batch = with_returns(batch, results["values"], 2)
        if options.get("scored"):
            batch = batch.with_columns(proximal_log_probs=near(results["scores"], 0.2, 0))
        packing = plan(
            batch.lengths,
            global_batch_size=None,
            num_steps=options.get("steps", 1),
            max_tokens=ours.max_tokens,
            data_parallel=ours.data_parallel,
            rollout=batch.rollout,
        )
        assert not ours.reads_whole_batch(scored=bool(options.get("scored")))
        trained = held(batch, ours.trained_samples(packing)) if own else batch
        result = ours.train(trained, packing)
        thirds = np.arange(samples)[:, None] / 3
        own_thirds = thirds if trained.part is None else thirds[trained.part.samples]
        assert np.array_equal(ours.rows_of_all(trained, own_thirds), thirds)
        return results | {
            "steps": result.steps,
            "digest": result.state_digest,
            "proximal": result.proximal_log_probs,
            "trained": len(ours.trained_samples(packing)),
        }
    finally:
        ours.close()


def shuffled(batch: BatchColumns) -> BatchColumns:
    """Return the batch as if its rollout had stored the samples in another order."""
    order = np.random.default_rng(3).permutation(len(batch))
    sizes = replace(batch.sizes, stored_order=order)
    return replace(batch, part=BatchPart(sizes, np.arange(len(batch))))


def value_and_error_of_rank_0(
    rank: int, world_size: int, port: int, model_dir: str, train: dict[str, Any]
) -> tuple[int, str]:
    """Return the value and the problem that rank 0 made."""
    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)

    def fail() -> None:
        raise DataError(f"of rank {rank}", where="here")

    try:
        value = ours.from_rank_0(lambda: rank)
        try:
            ours.from_rank_0(fail)
        except DataError as error:
            return value, error.problem
        raise AssertionError("no error")
    finally:
        ours.close()
