"""Profiles of trainer ranks and their files (rlpipe.actors.trainer.profiling)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpipe.actors.trainer.profiling import ProfiledPart, check_profiling, profiled
from rlpipe.config.observe import ObserveConfig
from rlpipe.errors import ConfigError


def record(
    folder: Path, part: ProfiledPart, iteration: int, rank: int = 0, **keys: Any
) -> list[str]:
    """Multiply matrices in a profiled block; return the names of the written files."""
    observe = ObserveConfig.model_validate({"profile_step_start": 2, "profile_step_end": 4, **keys})
    with profiled(observe, part, iteration=iteration, rank=rank, work_dir=str(folder)):
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    return sorted(path.name for path in (folder / "profile").glob("*"))


def test_a_trace_has_the_operations_and_memory_of_the_block(tmp_path: Path):
    assert record(tmp_path, "train_actor", 3, profile_target=["train_actor"]) == [
        "train_actor-0000003-rank0.json.gz"
    ]
    trace = json.loads(
        gzip.decompress((tmp_path / "profile" / "train_actor-0000003-rank0.json.gz").read_bytes())
    )
    names = {event["name"] for event in trace["traceEvents"]}
    assert "aten::mm" in names
    assert "[memory]" in names


def test_overall_records_both_parts_of_every_selected_iteration(tmp_path: Path):
    for iteration in range(6):
        for part in ("train_log_probs", "train_actor"):
            files = record(tmp_path, part, iteration, profile_target=["train_overall"])
    assert files == [
        f"{part}-{iteration:07d}-rank0.json.gz"
        for part in ("train_actor", "train_log_probs")
        for iteration in (2, 3)
    ]


@pytest.mark.parametrize(
    ("iteration", "rank", "keys"),
    [
        (3, 0, {}),
        (1, 0, {"profile_target": ["train_actor"]}),
        (3, 1, {"profile_target": ["train_actor"]}),
    ],
)
def test_unselected_parts_iterations_and_ranks_are_not_recorded(
    tmp_path: Path, iteration: int, rank: int, keys: dict[str, Any]
):
    assert record(tmp_path, "train_actor", iteration, rank, **keys) == []


def test_the_history_of_cuda_memory_is_refused_without_cuda():
    assert not torch.cuda.is_available(), "this test needs a machine without CUDA"
    check_profiling(ObserveConfig())
    with pytest.raises(ConfigError, match="no CUDA memory"):
        check_profiling(ObserveConfig(record_memory_history=True))


def test_a_block_that_raises_leaves_no_trace_file(tmp_path: Path):
    observe = ObserveConfig(profile_target=("train_actor",), profile_step_start=0)
    with (
        pytest.raises(ZeroDivisionError),
        profiled(observe, "train_actor", iteration=0, rank=0, work_dir=str(tmp_path)),
    ):
        _ = 1 / 0
    assert not list(tmp_path.iterdir())
