"""Engines on GPUs compute the pushed model, in bf16 and in FP8 (`pytest -m gpu`)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from rlpipe.errors import SyncError
from rlpipe.sync.transports.base import Push
from tests.sync.gpu import Bench, difference, make_model, round_trip, served

LAYERS = 4
LARGEST = {"ipc": 0.4, "tensor": 0.4, "fp8": 0.8, "distributed": 0.4}
"""Bound on the largest difference of some hundred log-probs of a random model.

0.22 was measured with bf16."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(LAYERS, tmp_path_factory.mktemp("gpu"))


def _push_and_compare(bench: Bench, method: str) -> None:
    with bench.engine(method) as server:
        transport = bench.transport(method)
        for seed, check in ((1, False), (2, method != "fp8"), (3, False)):
            model = make_model(LAYERS, seed)
            assert transport.send(
                served(method, model),
                Push(f"b@{seed}@x", [server.url], engine_ranks={server.url: [0]}, check=check),
            ).engines == (server.url,)
            if method == "fp8":
                round_trip(model)
            assert difference(server.url, model) < LARGEST[method]
            assert difference(server.url, make_model(LAYERS, seed + 10)) > 2 * LARGEST[method], (
                "another model differs"
            )
        transport.close()


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["ipc", "tensor", "fp8"])
def test_an_engine_on_the_trainers_gpu_computes_as_the_pushed_model(bench, method):
    _push_and_compare(bench, method)


@pytest.mark.gpu
def test_pushes_of_handles_leak_no_memory(bench):
    model = make_model(LAYERS, seed=1)
    with bench.engine("ipc") as server:
        transport = bench.transport("ipc")
        used = []
        for number in range(20):
            transport.send(
                served("ipc", model),
                Push(f"b@{number}@x", [server.url], engine_ranks={server.url: [0]}),
            )
            free, total = torch.cuda.mem_get_info(0)
            used.append(total - free)
    assert used[-1] - used[2] < 64 * 1024**2


@pytest.mark.gpu(2)
def test_an_engine_on_another_gpu_computes_as_the_broadcast_model(bench):
    _push_and_compare(bench, "distributed")


@pytest.mark.gpu(2)
def test_an_engine_that_dies_in_a_broadcast_is_detected_and_its_replacement_joins(
    bench, tmp_path: Path
):
    model = make_model(LAYERS, seed=4)
    method = "distributed"
    transport = bench.transport(method, timeout_s=60.0)
    with bench.engine(method) as first:
        transport.send(served(method, model), Push("b@0@first", [first.url]))

        def tensors():
            for number, item in enumerate(served(method, model)):
                if number == 20:
                    first.stop()
                yield item

        start_s = time.monotonic()
        with pytest.raises(SyncError):
            transport.send(tensors(), Push("b@0@broken", [first.url]))
        assert time.monotonic() - start_s < 30
    with bench.engine(method) as second:
        transport.send(served(method, model), Push("b@0@second", [second.url]))
        assert difference(second.url, model) < LARGEST[method]
    transport.close()
