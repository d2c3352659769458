"""The common result of all trainer ranks (tasks.train)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpipe.batch.packing import plan
from rlpipe.config.model import ResourcesConfig
from rlpipe.errors import TrainerError
from rlpipe.store.objects.files import Files
from tasks.train import _agreed


def answer(max_tokens: int) -> dict[str, Any]:
    """Return the answer of rank 0 of the policy or of the critic."""
    packing = plan([3, 4], global_batch_size=None, max_tokens=max_tokens, data_parallel=1)
    return {
        "state_digest": "state",
        "packing": packing.model_dump(),
        "steps": [{"loss": 1.0}, {"loss": 3.0}],
        "metrics": {"train/kl": 0.5},
        "tokens": 7,
        "machine": {},
        "files": [],
    }


def run(folder: Path, **resources: int) -> Any:
    config = SimpleNamespace(resources=ResourcesConfig(**resources))  # type: ignore[arg-type]
    return SimpleNamespace(config=config, files=Files(folder))


OTHER = {"state_digest": "state"}
"""Answer of another rank: one plan for each of 512 ranks would be 16,384 samples 512 times."""


def test_metrics_and_plan_are_those_of_rank_0(tmp_path: Path):
    ctx = run(tmp_path, actor_num_gpus_per_node=3)
    result = _agreed(ctx, "d", 4, [answer(10), OTHER, OTHER])
    assert len(result["files"]) == 1
    assert result["outputs"]["metrics"] == {"train/loss": 2.0, "train/kl": 0.5}


def test_the_plan_of_a_separate_critic_is_that_of_its_first_rank(tmp_path: Path):
    ctx = run(tmp_path, actor_num_gpus_per_node=2, critic_num_gpus_per_node=2)
    assert len(_agreed(ctx, "d", 4, [answer(10), OTHER, answer(5), OTHER])["files"]) == 2
    assert len(_agreed(ctx, "e", 4, [answer(10), OTHER, answer(10), OTHER])["files"]) == 1


def test_ranks_with_different_states_are_an_error(tmp_path: Path):
    ctx = run(tmp_path, actor_num_gpus_per_node=2)
    with pytest.raises(TrainerError, match="trainer ranks hold different states"):
        _agreed(ctx, "d", 4, [answer(10), {"state_digest": "other"}])
