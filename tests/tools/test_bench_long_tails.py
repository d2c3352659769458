"""Forced response lengths and figures of whole runs with long tails (tools.bench.long_tails)."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

import pytest

from rlpipe.config.load import load_run
from rlpipe.errors import DataError
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from tools.bench import long_tails
from tools.bench.long_tails import CASES, LONGEST, response_length
from tools.bench.utilisation import Moment


def test_lengths_are_log_normal_and_the_same_in_every_run():
    lengths = [response_length(str(number), 0, 1000) for number in range(20_000)]
    assert lengths == [response_length(str(number), 0, 1000) for number in range(20_000)]
    assert statistics.median(lengths) == pytest.approx(1000, rel=0.03)
    assert max(lengths) == LONGEST * 1000
    assert statistics.mean(length == max(lengths) for length in lengths) == pytest.approx(
        0.01, abs=0.003
    )


async def test_a_request_has_the_length_of_its_sample(monkeypatch):
    asked = []

    async def generate_response(args, sample, sampling_params):
        asked.append(sampling_params)
        return sample

    monkeypatch.setattr(long_tails, "generate_response", generate_response)
    sample = SimpleNamespace(prompt="a b c", index=3)
    params = {"max_new_tokens": 8 * 64, "temperature": 1.0}
    assert await long_tails.generate(None, sample, params) is sample
    assert asked == [{"max_new_tokens": response_length("a b c", 3, 64), "temperature": 1.0}]


def test_the_cases_are_valid_configurations(tmp_path):
    bench = long_tails.open_bench(tmp_path, "tiny", ["num_rollout=4"], seconds=1.0, repeats=1)
    sizes = [
        load_run(bench.recipe, [*bench.overrides, *case.overrides], "run").async_buffer_size
        for case in CASES
    ]
    assert sizes == [0, 1, 2, 4]


def test_the_first_iterations_and_those_without_rollouts_ahead_do_not_count():
    assert long_tails.counted_iterations(range(8), ahead=0) == range(2, 7)
    assert long_tails.counted_iterations(range(8), ahead=2) == range(2, 5)
    with pytest.raises(DataError, match="too few iterations"):
        long_tails.counted_iterations(range(4), ahead=1)


def test_stale_tokens_and_staleness_follow_from_the_records(monkeypatch, tmp_path):
    rows = [
        {"group_id": "fresh", "weight_versions": [{"tokens": 30, "version": 5}]},
        {
            "group_id": "aged",
            "weight_versions": [{"tokens": 20, "version": 3}, {"tokens": 10, "version": 4}],
        },
        {"group_id": "old", "weight_versions": [{"tokens": 40, "version": 0}]},
        {"group_id": "open", "weight_versions": [{"tokens": 99, "version": 4}]},
    ]
    node = SimpleNamespace(
        files=(), outputs={"accepted": ["fresh", "aged"], "dropped": {"old": "stale"}}
    )
    commit = SimpleNamespace(nodes={"rollout": "digest"})
    monkeypatch.setattr(Branches, "read", lambda self, branch, k: commit)
    monkeypatch.setattr(Nodes, "get", lambda self, stage, digest: node)
    monkeypatch.setattr(
        long_tails, "get_run", lambda home, name: SimpleNamespace(store=str(tmp_path))
    )
    monkeypatch.setattr(long_tails, "read_rows", lambda *_: SimpleNamespace(to_pylist=lambda: rows))
    found = long_tails.of_store(tmp_path / "run", "run", [5])
    assert found == {"stale_tokens": 0.4, "staleness": (20 * 2 + 10 * 1) / 60}


def test_the_picture_has_both_gpus_of_each_case(tmp_path):
    moments = [
        Moment(time / 10, gpu, 50 + time % 50, 1000) for time in range(40) for gpu in ("0", "1")
    ]
    long_tails.draw({"synchronous": moments, "S = 1": moments}, tmp_path / "busy.png")
    assert (tmp_path / "busy.png").read_bytes().startswith(b"\x89PNG")
