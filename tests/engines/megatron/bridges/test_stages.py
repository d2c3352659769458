"""Weights of each pipeline stage, and pushes by stages (rlpipe.sync.transports.staged)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpipe.config.train import SyncConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import DeadlineExceeded
from rlpipe.sync.transports import staged
from rlpipe.sync.transports.base import TransportSetup
from rlpipe.sync.transports.distributed import GROUP_NAME
from rlpipe.sync.transports.staged import Board, StagedTransport, stage_group_name
from tests.engines.megatron.stage_jobs import export_both_ways, push_by_stages
from tests.engines.megatron.test_virtual_pipeline import CHUNKS
from tests.live_engine import Live, live_engine, log_probs, make_model

TOKENS = [5, 9, 20, 31]


@pytest.fixture
def live(request: pytest.FixtureRequest) -> Live:
    return live_engine(request.config)


async def holds(live: Live, model: Any) -> str:
    """The engine's stamp, once it is seen to compute what this model does."""
    async with Engine(live.server.url) as engine:
        found = (await engine.score([TOKENS]))[0]
        np.testing.assert_allclose(found, log_probs(model, TOKENS[:1], TOKENS[1:]), atol=1e-4)
        return await engine.weight_version()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "train", "senders"),
    [
        ("qwen3", {"parallel": {"pipeline_model_parallel_size": 2}}, [True, True]),
        ("qwen3_deep", CHUNKS, [True, True]),
        ("llama", {"parallel": {"tensor_model_parallel_size": 2}}, [True, False]),
        ("qwen3_moe", {"parallel": {"expert_model_parallel_size": 2}}, [True, False]),
    ],
)
def test_the_weights_of_all_stages_equal_the_model(
    models, two_ranks, family: str, train: dict, senders: list[bool]
):
    found = two_ranks.run(export_both_ways, models[family], train)
    assert [one["is_sender"] for one in found] == senders
    joined: dict[str, np.ndarray] = {}
    for one in found:
        if one["is_sender"]:
            assert not joined.keys() & one["stage"].keys(), "each is sent once"
            joined |= one["stage"]
    for whole in (found[0]["mbridge's"], found[0]["whole"], found[1]["whole"]):
        assert joined.keys() == whole.keys()
        assert all(np.array_equal(joined[name], tensor) for name, tensor in whole.items())


@pytest.mark.integration
def test_a_push_by_two_stages_updates_the_engine_and_keeps_the_groups(
    live, two_ranks, tmp_path: Path
):
    live.model = [make_model(tmp_path / str(seed), seed=seed) for seed in (31, 32)][-1]
    folders = [str(tmp_path / name) for name in ("31", "32")]
    leader, source = two_ranks.run(push_by_stages, folders, live.server.url, None)
    assert asyncio.run(holds(live, live.model)) == "b@1@staged"
    assert leader[0]["buckets"] == leader[1]["buckets"] > 2
    assert leader[0]["group"] == leader[1]["group"]
    assert leader[0]["tensors"] == len(set(live.model.state_dict()) - {"lm_head.weight"})
    assert source[0]["bytes"] == source[1]["bytes"] > 0


@pytest.mark.integration
def test_a_broken_group_fails_the_push_and_the_next_push_opens_new_groups(
    live, two_ranks, tmp_path
):
    live.model = [make_model(tmp_path / str(seed), seed=seed) for seed in (33, 34, 35)][-1]
    folders = [str(tmp_path / name) for name in ("33", "34", "35")]
    leader, _ = two_ranks.run(push_by_stages, folders, live.server.url, stage_group_name(1))
    assert "of stage 1" in leader[1] and "rlpipe-1" in leader[1]
    assert leader[0]["group"] != leader[2]["group"]
    assert asyncio.run(holds(live, live.model)) == "b@2@staged"


async def test_ranks_on_other_machines_reach_the_first_at_its_address(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    make_model(tmp_path, seed=0)
    told: list[Any] = []
    monkeypatch.setattr(staged, "CALL_S", 5.0)
    monkeypatch.setattr(staged.dist, "broadcast_object_list", lambda where, src: told.extend(where))
    sync = SyncConfig(update_weight_buffer_size=40_000, timeout_s=60.0)
    setup = TransportSetup(model_dir=tmp_path, sync=sync, num_stages=2, address="127.0.0.2")
    first = StagedTransport(setup)
    Board(*told[0]).put("a", 1)
    assert first.leader is not None and await first.leader.board.take("a", timeout_s=5) == 1


async def test_a_message_is_taken_once_and_waited_for_no_longer_than_is_said():
    first = Board("127.0.0.1")
    second = Board("127.0.0.1", first.port)
    second.put("a", {"do": [1, "x"]})
    assert await first.take("a", timeout_s=5) == {"do": [1, "x"]}
    with pytest.raises(DeadlineExceeded, match="push: a"):
        await second.take("a", timeout_s=0.01)
    assert (stage_group_name(0), stage_group_name(3)) == (GROUP_NAME, "rlpipe-3")
