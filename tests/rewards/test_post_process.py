"""Post-processing of all rewards of an iteration by a user function."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from rlpipe.errors import RewardError
from rlpipe.rewards.post_process import post_process
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.types import Sample

SAMPLES = [Sample("g", index, "", [1], response="x" * index) for index in range(3)]
ROWS = [
    RewardRow("g", 0, 1.0, {"format": 1.0}),
    RewardRow("g", 1, None, error="late"),
    RewardRow("g", 2, 3.0),
]


@pytest.fixture
def path(tmp_path: Path):
    def write(body: str) -> str:
        (tmp_path / "mine.py").write_text(f"def post_process(args, samples):\n    {body}\n")
        return f"{tmp_path}/mine.py:post_process"

    return write


def test_the_function_gets_scored_samples_and_sets_their_rewards(path):
    hook = path(
        "return [s.reward for s in samples], "
        "[args.scale * (s.reward - len(s.response)) for s in samples]"
    )
    rows = post_process(hook, Namespace(scale=10), SAMPLES, ROWS)
    assert [row.reward for row in rows] == [10.0, None, 10.0]
    assert [row.parts for row in rows] == [
        {"format": 1.0, "raw_reward": 1.0},
        {},
        {"raw_reward": 3.0},
    ]
    assert rows[1].error == "late"
    assert ROWS[0].reward == 1.0


def test_the_function_is_not_called_without_scored_samples(path):
    assert post_process(path("raise ValueError"), Namespace(), SAMPLES[1:2], ROWS[1:2]) == ROWS[1:2]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return [1], [1]", "two lists of 2 finite numbers"),
        ("return [1, 2], [1, float('nan')]", "1 numbers that are not finite"),
        ("return [1, 2]", "post-processing of rewards failed"),
        ("raise KeyError('x')", "KeyError"),
    ],
)
def test_another_result_or_an_exception_is_an_error_of_the_stage(path, body: str, problem: str):
    with pytest.raises(RewardError) as caught:
        post_process(path(body), Namespace(), SAMPLES, ROWS)
    assert problem in str(caught.value)
