"""Weights are broadcast to real engines over gloo (rlpipe.sync.transports.distributed)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest

from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import EngineRejected, EngineUnavailable, SyncError
from rlpipe.sync.session import Session
from rlpipe.sync.transports import distributed
from rlpipe.sync.transports.base import Push
from rlpipe.sync.transports.distributed import (
    GROUP_NAME,
    BroadcastGroup,
    DistributedTransport,
    own_address_towards,
)
from tests.live_engine import log_probs, make_model
from tests.sync.setups import transport_setup

TOKENS = [5, 9, 20, 31]


@pytest.fixture
def transport(live) -> Iterator[DistributedTransport]:
    made = _transport(live.model_dir)
    yield made
    made.close()


def _transport(model_dir: Path, **keywords) -> DistributedTransport:
    return DistributedTransport(transport_setup(model_dir, **keywords))


class FakeEngine:
    """An engine that joins groups."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stamp = "default"
        self.joined = 0
        self.is_silent = False

    async def weight_version(self) -> str:
        if self.is_silent:
            raise EngineUnavailable("no answer", where=self.url)
        return self.stamp

    async def join_group(self, name: str, **_: Any) -> None:
        self.joined += 1


class FakeGroup:
    """A group that needs no engines."""

    address = "127.0.0.1"
    port = 1

    def __init__(self, engine_ranks: int, **_: Any) -> None:
        self.world_size = 1 + engine_ranks

    def join(self) -> None: ...

    def drop(self) -> None: ...


def _require_equal(url: str, model) -> None:
    async def score() -> list[float]:
        async with Engine(url) as engine:
            return (await engine.score([TOKENS]))[0]

    np.testing.assert_allclose(
        asyncio.run(score()), log_probs(model, TOKENS[:1], TOKENS[1:]), atol=1e-4
    )


@pytest.mark.integration
def test_after_a_broadcast_the_engine_computes_as_the_new_model_and_the_group_stays(
    live, transport, tmp_path
):
    groups = set()
    for seed in (21, 22):
        live.model = make_model(tmp_path / str(seed), seed=seed)
        report = transport.send(
            live.model.state_dict().items(), Push(f"b@{seed}@x", [live.server.url])
        )
        assert report.engines == (live.server.url,) and report.buckets > 1
        assert report.tensors == len(transport.expected) and ("group" in report.steps) == (
            not groups
        )
        _require_equal(live.server.url, live.model)
        groups.add(transport._group)
    assert len(groups) == 1


@pytest.mark.integration
def test_a_broadcast_can_be_checked_against_random_numbers(live, transport, tmp_path):
    live.model = make_model(tmp_path / "other", seed=23)
    report = transport.send(
        live.model.state_dict().items(), Push("b@0@checked", [live.server.url], check=True)
    )
    assert report.tensors == 2 * len(transport.expected), "each is sent twice"
    _require_equal(live.server.url, live.model)


@pytest.mark.integration
def test_a_new_trainer_ends_the_group_of_a_dead_one(live, tmp_path):
    first = _transport(live.model_dir)
    second = _transport(live.model_dir)
    first.send(live.model.state_dict().items(), Push("b@0@first", [live.server.url]))
    live.model = make_model(tmp_path / "other", seed=24)
    second.send(live.model.state_dict().items(), Push("b@0@second", [live.server.url]))
    _require_equal(live.server.url, live.model)
    first.close()
    second.close()


@pytest.mark.integration
def test_a_refused_bucket_ends_the_push_and_the_next_push_makes_a_new_group(live, transport):
    weights = live.model.state_dict()
    transport.send(weights.items(), Push("b@0@first", [live.server.url]))
    httpx.post(
        f"{live.server.url}/destroy_weights_update_group",
        json={"group_name": GROUP_NAME},
        timeout=30,
    ).raise_for_status()
    read = []
    start_s = time.monotonic()

    def tensors():
        for name, tensor in weights.items():
            read.append(name)
            yield name, tensor

    with pytest.raises(SyncError, match="the broadcast broke"):
        transport.send(tensors(), Push("b@0@refused", [live.server.url]))
    assert time.monotonic() - start_s < transport.setup.sync.timeout_s / 4, (
        "the push does not wait for the hanging broadcast"
    )
    assert read == list(weights) and transport.members == ()
    transport.send(weights.items(), Push("b@0@again", [live.server.url]))
    _require_equal(live.server.url, live.model)


async def test_a_restarted_server_gets_a_new_group_with_all_engines(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(distributed, "BroadcastGroup", FakeGroup)
    make_model(tmp_path, seed=0)
    transport = _transport(tmp_path)
    engines = [FakeEngine("http://127.0.0.1:1"), FakeEngine("http://127.0.0.1:2")]
    groups = []
    for number, restarted in enumerate((False, False, True, False)):
        if restarted:
            engines[1].stamp = "default"
        await transport.connect(Session(cast("Any", list(engines)), f"b@{number}@x"))
        groups.append(transport._group)
        for engine in engines:
            engine.stamp = f"b@{number}@x"
    assert groups[0] is groups[1] and groups[1] is not groups[2] and groups[2] is groups[3]
    assert [engine.joined for engine in engines] == [2, 2]
    engines[0].is_silent = True
    session = Session(cast("Any", list(engines)), "b@4@x")
    await transport.connect(session)
    assert transport.members == (engines[1].url,) and list(session.unknown) == [engines[0].url]


async def test_the_error_of_a_broken_broadcast_is_that_of_the_engine(tmp_path):
    async def closed() -> None:
        raise RuntimeError("Connection closed by peer")

    async def rejected() -> None:
        await asyncio.sleep(0.01)
        raise EngineRejected("the request was refused", found="HTTP 400: Group rlpipe not in []")

    make_model(tmp_path, seed=0)
    with pytest.raises(SyncError, match=r"(?s)the broadcast broke.*Group rlpipe not in"):
        await _transport(tmp_path)._together([closed(), rejected()], Session([], "b@0@x"))


def test_remote_engines_connect_to_the_interface_that_routes_to_them():
    assert own_address_towards("http://127.0.0.1:30000") == "127.0.0.1"
    assert own_address_towards("http://127.0.0.9:30000").startswith("127.0.0.")


def test_a_group_without_members_times_out():
    group = BroadcastGroup(1, address="127.0.0.1", backend="gloo", timeout_s=0.5)
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        group.join()
    group.drop()
