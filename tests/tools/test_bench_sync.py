"""The benchmark of pushes: what its figures are (tools.bench.syncing)."""

from __future__ import annotations

import pytest

from tools.bench.bench import Bench, open_bench
from tools.bench.syncing import Pushed, of_transport, transports


@pytest.fixture
def bench(tmp_path) -> Bench:
    """On the tiny model, which nothing here needs."""
    return open_bench(tmp_path, "tiny", [], seconds=1, repeats=1)


def test_a_rate_is_of_all_weights_and_a_share_of_what_was_sent(bench):
    copies = [Pushed(0.5, 0.0, 2_000_000_000)] * 2
    pushes = [
        Pushed(1.0, 0.2, 500_000_000, {"bucket": 0.1, "pause": 0.6}),
        Pushed(2.0, 0.3, 10**9, {"bucket": 0.3, "echo": 1e-4}),
    ]
    rows = {row.what: row for row in of_transport(bench, "delta", pushes, copies, gpu=1)}
    assert rows["delta: rate"].ours == (2.0, 1.0) and rows["delta: rate"].ratios == (0.5, 0.25)
    assert rows["delta: rate"].against == "copy to GPU 1"
    assert rows["delta: share"].ours == (25.0, 50.0)
    assert rows["delta: paused"].ours == (0.2, 0.3)
    assert rows["delta: paused"].note == "ms by step: pause 300, bucket 200"
    assert "tensor: share" not in {
        row.what for row in of_transport(bench, "tensor", copies, copies)
    }


def test_transports_fit_where_the_engines_are():
    assert transports(on_gpus=True, shared=True) == ["ipc", "tensor", "disk", "delta"]
    assert transports(on_gpus=True, shared=False) == ["distributed", "tensor", "disk", "delta"]
    assert transports(on_gpus=False, shared=True) == [
        "ipc",
        "distributed",
        "tensor",
        "disk",
        "delta",
    ]
