"""`layouts` and `node` of the benchmark (tools.bench.layouts, tools.bench.node)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from rlpipe.config.load import load_run
from rlpipe.errors import ResourceError
from tools.bench import layouts, node
from tools.bench.bench import Bench, open_bench
from tools.bench.layout_ranks import RankPool
from tools.bench.measures import Row
from tools.bench.shapes import SHAPES


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("name", ["4b", "moe", "tiny"])
def test_every_layout_divides_the_gpus_and_the_model(gpus: int, name: str) -> None:
    shape = SHAPES[name]
    found = layouts.layouts(gpus, shape)
    names = [layout.name(gpus) for layout in found]
    assert len(set(names)) == len(names) >= 3
    for layout in found:
        assert gpus % (layout.tp * layout.pp * layout.cp) == 0
        assert shape.num_layers % layout.pp == 0 and shape.num_kv_heads % layout.tp == 0
        assert (shape.num_experts > 0) or (layout.ep == 1 and not layout.grouped)
        assert shape.num_experts == 0 or layout.tp == 1 or layout.ep > 1


def test_eight_gpus_have_the_layouts_of_large_runs() -> None:
    dense = [layout.name(8) for layout in layouts.layouts(8, SHAPES["4b"])]
    assert {"DP8", "TP2×DP4", "TP4×PP2", "TP2×PP2×CP2", "DP8, no distributed optimizer"} <= {*dense}
    experts = [layout.name(8) for layout in layouts.layouts(8, SHAPES["moe"])]
    assert {"EP8×DP8, grouped", "EP4×DP8, grouped", "TP2×EP4×DP4, grouped"} <= {*experts}


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_overrides_of_whole_iterations_are_valid(tmp_path: Path, gpus: int) -> None:
    bench = open_bench(tmp_path, "tiny", [], seconds=1, repeats=1)
    together = load_run(bench.recipe, node.colocated(gpus), "a").resources
    assert together.shares_gpus and together.actor_num_gpus_per_node == gpus
    assert together.rollout_num_gpus == gpus
    apart = load_run(bench.recipe, node.separate(gpus), "b")
    assert not apart.resources.shares_gpus and apart.async_buffer_size == 1
    assert apart.resources.actor_num_gpus_per_node + apart.resources.rollout_num_gpus == gpus


def test_a_run_has_samples_and_the_rate_of_its_pushes(tmp_path: Path) -> None:
    bench = open_bench(tmp_path, "tiny", [], seconds=1, repeats=1)
    rows = [Row("iteration", "iteration", "s", (2.0, 4.0)), Row("iteration", "sync", "s", (0.5,))]
    found = {row.what: row for row in node.of_run(bench, "colocated", rows)}
    assert found["samples"].ours == (16.0, 8.0) and found["samples"].part == "colocated"
    size = bench.shape.parameters * (2 if bench.on_gpus else 4)
    assert found["push"].ours == pytest.approx((size / 1e9 / 0.5,))


@pytest.mark.integration
@pytest.mark.long
def test_layouts_equal_one_rank_and_checkpoints_change_layouts(tmp_path: Path) -> None:
    bench: Bench = open_bench(tmp_path, "tiny-moe", [], seconds=1, repeats=1)
    shown: list[Row] = []
    rows = layouts.measure(bench, show=shown.extend)
    assert [row.what for row in shown] == [row.what for row in rows]
    assert not [row for row in rows if "failed" in row.note]
    by_name = {row.what: row for row in rows}
    norms = [row for row in rows if row.what.endswith("grad norm")]
    assert len(norms) == len(layouts.layouts(2, bench.shape)) + 2
    for row in norms:
        assert row.ratios == pytest.approx((1.0,), rel=1e-4), row.what
    for row in rows:
        if row.what.endswith("log-probs"):
            assert row.ours[0] < 1e-5, row.what
    assert by_name["checkpoint: weights differ"].ours == (0.0,)
    assert by_name["checkpoint: state differs"].ours == (0.0,)


@pytest.mark.integration
@pytest.mark.long
def test_a_rank_that_ends_does_not_hold_up_the_others() -> None:
    with RankPool(2) as pool:
        with pytest.raises(ResourceError, match="rank 1"):
            pool.run(ends, timeout_s=120)
        assert pool.run(numbers, 10, timeout_s=120) == [10, 11]
        with pytest.raises(ResourceError, match="do not answer"):
            pool.run(waits, timeout_s=0.5)


def ends(rank: int, world_size: int, port: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def waits(rank: int, world_size: int, port: int) -> None:
    signal.pause()


def numbers(rank: int, world_size: int, port: int, first: int) -> int:
    assert np.isfinite(port) and world_size == 2
    return first + rank
