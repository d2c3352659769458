"""Errors of the reward function are shown, and not in every iteration (tasks.reward)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlpipe.config.data import RewardConfig
from rlpipe.rewards.reward_rows import RewardRow, error_note, reward_outputs, waits_for
from rlpipe.types import Sample
from tasks import reward

ROWS = [RewardRow("g0", 0, 1.0), RewardRow("g0", 1, None, {}, "ValueError: x\n  found:    y")]
SAMPLES = [Sample(group_id="g0", index=n, response=f"answer {n}") for n in range(2)]


def config(**keys: Any) -> RewardConfig:
    return RewardConfig.model_validate(
        {"function": {"type": "python", "path": "mine.py:score"}, **keys}
    )


def test_the_note_names_function_error_and_sample():
    note = error_note(ROWS, SAMPLES, config())
    assert note is not None and note.startswith(
        "the reward function mine.py:score failed for 1 of 2 samples, and their 1 groups are left "
        "out (reward.on_error): ValueError: x; found y; sample 1 of g0, response 'answer 1'"
    )
    assert "their reward is -1 (" in (error_note(ROWS, SAMPLES, config(on_error=-1.0)) or "")
    assert error_note(ROWS[:1], SAMPLES[:1], config()) is None


def test_a_node_of_rewards_names_the_prompts_with_errors_and_the_last_error():
    failed = reward_outputs(ROWS, SAMPLES, [])["failed"]
    assert failed == {"prompts": {"''": 1}, "last_error": "ValueError: x; found y"}
    assert "failed" not in reward_outputs(ROWS[:1], SAMPLES[:1], [])


def test_the_terminal_shows_the_errors_of_the_first_iterations(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    logged: list[str] = []
    logger = SimpleNamespace(warning=lambda _, note: logged.append(note))
    monkeypatch.setattr(reward, "get_run_logger", lambda: logger)
    progress = SimpleNamespace(say=said.append)
    config = SimpleNamespace(run="run")
    ctx = cast("Any", SimpleNamespace(progress=progress, config=config, iterations_with_errors=0))
    for k in range(6):
        reward._warn_of_errors(ctx, k, "bad" if k else None)
    assert len(logged) == 5
    assert said == [
        "run: iteration 1: bad",
        "run: iteration 2: bad",
        "run: iteration 3: bad; later ones: rlpipe rollouts",
    ]


def test_the_terminal_gets_the_function_and_the_key_of_its_deadline():
    assert waits_for(config(sample_timeout_s=5.0)) == (
        "the reward function mine.py:score; each call has 5 s (reward.sample_timeout_s)"
    )
