"""Jobs of training ranks for tests of pipeline stages that send their own weights."""

from __future__ import annotations

from typing import Any

import httpx

from rlpipe.config.train import SyncConfig, TrainConfig
from rlpipe.errors import SyncError
from rlpipe.sync.transports.base import Push, TransportSetup
from rlpipe.sync.transports.staged import StagedTransport
from tests.engines.megatron.ranks import engine

SYNC = SyncConfig(update_weight_buffer_size=40_000, timeout_s=60.0)


def export_both_ways(
    rank: int, world_size: int, port: int, model_dir: str, train: dict
) -> dict[str, Any]:
    """Return the tensors of this rank's stage, of the full model and of mbridge's export."""
    from rlpipe.engines.megatron.bridges.bridge import mbridge_view
    from rlpipe.engines.megatron.bridges.stages import pipeline_position, stage_weights

    ours = engine(model_dir, TrainConfig.model_validate(train), rank, world_size, port)
    try:
        ours.load_hf()
        bridge = ours.trained.bridge
        chunks = ours.trained.chunks
        staged = stage_weights(bridge, chunks)
        return {
            "stage": {name: tensor.clone().numpy() for name, tensor in staged},
            "whole": {name: tensor.clone().numpy() for name, tensor in ours.named_hf_tensors()},
            "mbridge's": {
                name: tensor.detach().numpy()
                for name, tensor in bridge.export_weights(
                    [mbridge_view(bridge, chunk) for chunk in chunks]
                )
            },
            "is_sender": pipeline_position().is_sender,
        }
    finally:
        ours.close()


def push_by_stages(
    rank: int, world_size: int, port: int, model_dirs: list[str], url: str, spoil: str | None
) -> list[Any]:
    """Push each model; return (buckets, tensors), other ranks' bytes, or the error of each push.

    `spoil`: a group that the engine leaves before the second push.
    """
    from rlpipe.engines.megatron.bridges.stages import pipeline_position, stage_weights

    train = TrainConfig.model_validate({"parallel": {"pipeline_model_parallel_size": 2}})
    ours = engine(model_dirs[0], train, rank, world_size, port)
    position = pipeline_position()
    transport = StagedTransport(
        TransportSetup(
            model_dir=model_dirs[0],
            sync=SYNC,
            rank=rank,
            world_size=world_size,
            stage=position.stage,
            num_stages=position.stages,
            sends_stage=position.is_sender,
            address="127.0.0.2",
        )
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

            tensors = stage_weights(ours.trained.bridge, ours.trained.chunks)
            try:
                report = transport.send(tensors, Push(f"b@{number}@staged", [url]))
                found.append(
                    {
                        "bytes": report.size_bytes,
                        "buckets": report.buckets,
                        "tensors": report.tensors,
                        "group": id(transport.leader._group) if transport.leader else None,
                    }
                )
            except SyncError as error:
                found.append(str(error))
        return found
    finally:
        transport.close()
        ours.close()
