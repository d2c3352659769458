"""A job of training ranks: record routing, disturb the routers, replay the routing."""

from __future__ import annotations

import numpy as np
import torch

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.errors import ConfigError
from tests.engines.megatron.ranks import engine, make_batch, near, scored


def routers(ours) -> list:
    from megatron.core.transformer.moe.router import TopKRouter

    return [
        module
        for model in ours.trained.models
        for module in model.modules()
        if isinstance(module, TopKRouter)
    ]


@torch.no_grad()
def disturb(ours) -> None:
    """Make the routers prefer other experts."""
    for router in routers(ours):
        router.weight.neg_()
    ours.trained.optimizer.reload_model_params()


def record_and_replay(rank: int, world_size: int, port: int, model_dir: str, train: dict) -> dict:
    """Record experts, disturb the routers, then score and train with the recorded experts."""
    config = TrainConfig.model_validate({**train, "use_routing_replay": True})
    ours = engine(model_dir, config, rank, world_size, port)
    try:
        ours.load_hf()
        batch = make_batch()
        scores, experts = ours.score_and_route(batch)
        own = scored(ours, batch)
        assert np.array_equal(ours.score_and_route(own)[1], experts)
        again = ours.score_and_route(batch, max_tokens=32)
        disturb(ours)
        others = ours.score_and_route(batch)[1]
        batch = batch.with_columns(proximal_log_probs=near(scores, 0.2, 0), routed_experts=experts)
        replayed = ours.score(batch, replay=True)
        assert np.array_equal(ours.score(scored(ours, batch), replay=True), replayed)
        packing = plan(
            batch.lengths,
            global_batch_size=12,
            max_tokens=ours.max_tokens,
            data_parallel=ours.data_parallel,
        )
        result = ours.train(batch, packing)
        free = [router.router_replay.router_replay_action for router in routers(ours)]
        return {
            "scores": scores,
            "experts": experts,
            "again": again[1],
            "others": others,
            "replayed": replayed,
            "steps": result.steps,
            "digest": result.state_digest,
            "free": free,
        }
    finally:
        ours.close()


def refusal(rank: int, world_size: int, port: int, model_dir: str, train: dict) -> str:
    """Return the error of building an engine."""
    try:
        engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port).close()
    except ConfigError as error:
        return str(error)
    return "it was built"
