"""Stores and groups of torch.distributed listen on one address (rlpipe.system.rendezvous)."""

from __future__ import annotations

import os
from datetime import timedelta

import psutil
import pytest
from torch.distributed import DistNetworkError, ProcessGroupGloo

from rlpipe.system.rendezvous import GLOO, gloo_at, tcp_store

SOON = timedelta(seconds=5)


def listening() -> set[tuple[str, int]]:
    return {
        (known.laddr.ip, known.laddr.port)
        for known in psutil.Process().net_connections()
        if known.status == psutil.CONN_LISTEN
    }


def test_a_store_listens_at_its_address_only():
    before = listening()
    server = tcp_store("127.0.0.2", 0, listens=True, timeout=SOON)
    assert listening() - before == {("127.0.0.2", server.port)}
    tcp_store("127.0.0.2", server.port, listens=False, timeout=SOON, world_size=1, wait=True).set(
        "key", "value"
    )
    assert server.get("key") == b"value"
    with pytest.raises(DistNetworkError, match="in use"):
        tcp_store("127.0.0.2", server.port, listens=True, timeout=SOON)


def test_gloo_listens_on_loopback_unless_the_environment_sets_an_interface(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv(GLOO, raising=False)
    meeting = tcp_store("localhost", 0, listens=True, timeout=SOON)
    before = listening()
    with gloo_at("localhost"):
        assert os.environ[GLOO] == "lo"
        group = ProcessGroupGloo(meeting, 0, 1, SOON)
    assert GLOO not in os.environ
    assert {address for address, _ in listening() - before} <= {"127.0.0.1"}
    del group
    with gloo_at("192.0.2.1"):
        assert GLOO not in os.environ
    monkeypatch.setenv(GLOO, "ib0")
    with gloo_at("127.0.0.1"):
        assert os.environ[GLOO] == "ib0"
    assert os.environ[GLOO] == "ib0"
