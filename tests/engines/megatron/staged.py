"""What training ranks do in tests of pipeline stages that send their own weights. Not a test."""

from __future__ import annotations

from typing import Any

import httpx

from rlpipe.config.train import TrainConfig
from rlpipe.errors import SyncError
from tests.engines.megatron.ranks import engine

KEYS = {"buffer_size_bytes": 40_000, "timeout_s": 60.0}


def export_both_ways(
    rank: int, world_size: int, port: int, model_dir: str, parallel: dict
) -> dict[str, Any]:
    """Tensors by name: of this rank's stage, of the whole model, and as mbridge exports it; and
    where this rank is."""
    from rlpipe.engines.megatron.bridges.bridge import shown
    from rlpipe.engines.megatron.bridges.stages import place, stage_weights

    ours = engine(
        model_dir, TrainConfig.model_validate({"parallel": parallel}), rank, world_size, port
    )
    try:
        ours.load_hf()
        bridge = ours.trained.bridge
        model = ours.trained.ddp
        staged = stage_weights(bridge, model)
        return {
            "stage": {name: tensor.clone().numpy() for name, tensor in staged},
            "whole": {name: tensor.clone().numpy() for name, tensor in ours.named_hf_tensors()},
            "mbridge's": {
                name: tensor.detach().numpy()
                for name, tensor in bridge.export_weights([shown(bridge, model)])
            },
            "speaks": place().speaks,
        }
    finally:
        ours.close()


def push_by_stages(
    rank: int, world_size: int, port: int, model_dirs: list[str], url: str, spoil: str | None
) -> list[Any]:
    """Push each model in turn; of each push (buckets, tensors), the bytes of a rank that is not the
    first, or what it raised.

    `spoil`: a group that the engine leaves before the second push.
    """
    from rlpipe.actors.trainer.staged_push import StagedPush

    train = TrainConfig.model_validate({"parallel": {"pipeline_model_parallel_size": 2}})
    ours = engine(model_dirs[0], train, rank, world_size, port)
    push = StagedPush(
        ours, model_dirs[0], rank=rank, address="127.0.0.2", tensor_parallel_size=1, **KEYS
    )
    found: list[Any] = []
    try:
        for number, folder in enumerate(model_dirs):
            if spoil is not None and number == 1 and rank == 0:
                httpx.post(
                    f"{url}/destroy_weights_update_group", json={"group_name": spoil}, timeout=30
                ).raise_for_status()
            ours._model_dir = folder
            ours.load_hf()
            stamp = f"b@{number}@staged"

            def send(transport, tensors, stamp=stamp):
                report = transport.push(tensors, [url], stamp)
                return {
                    "buckets": report.buckets,
                    "tensors": report.tensors,
                    "group": id(transport._group),
                }

            try:
                found.append(push.push(send, lambda tensors: tensors))
            except SyncError as error:
                found.append(str(error))
        return found
    finally:
        push.close()
        ours.close()
