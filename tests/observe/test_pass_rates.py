"""The distribution of the pass rate by prompt (rlpipe.observe.pass_rates)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.data import EvalDataset
from rlpipe.observe.pass_rates import PARTS, draw_metrics, pass_rate_metrics, training_threshold
from rlpipe.types import BufferedGroup, DataState, Plan, PlannedGroup

LIMITS = {"0_25": (0.0, 0.25), "25_50": (0.25, 0.5), "50_75": (0.5, 0.75), "75_100": (0.75, 1.0)}


def dataset(name: str, **keys) -> EvalDataset:
    return EvalDataset.model_validate(
        {"name": name, "prompts": {"type": "file", "paths": ["x.jsonl"]}, **keys}
    )


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=9), min_size=1))
def test_the_shares_equal_those_of_a_loop_over_prompts(groups: list[list[float | None]]):
    ids = [f"run:{group:08d}" for group, rewards in enumerate(groups) for _ in rewards]
    metrics = pass_rate_metrics(ids, [reward for group in groups for reward in group])
    scored = [[reward for reward in group if reward is not None] for group in groups]
    rates = np.array([np.mean(group) for group in scored if group])
    if max(map(len, scored)) < 2:
        assert metrics == {}
        return
    expected = {"0": np.mean(rates == 0), "100": np.mean(rates == 1), "mean": rates.mean()}
    expected["between"] = np.mean((rates > 0) & (rates < 1))
    for part, (low, high) in LIMITS.items():
        inside = (rates > 0) & (rates < 1) & (rates >= low) & (rates < high)
        expected[part] = np.mean(inside)
    assert metrics == pytest.approx({f"rollout/pass_rate/{n}": v for n, v in expected.items()})
    assert sum(metrics[f"rollout/pass_rate/{part}"] for part in PARTS) == pytest.approx(1)


def test_rewards_of_another_scale_have_no_pass_rate_without_a_threshold():
    ids = ["a", "a", "b", "b"]
    assert pass_rate_metrics(ids, [0.0, 0.9, 0.5, 0.2]) == {}
    assert pass_rate_metrics(ids, [-1.0, 1.0, 1.0, 1.0]) == {}
    found = pass_rate_metrics(ids, [-1.0, 0.4, 0.5, 2.0], threshold=0.5)
    assert (found["rollout/pass_rate/0"], found["rollout/pass_rate/100"]) == (0.5, 0.5)


def test_full_reward_is_1_where_rewards_are_parts_of_1():
    found = pass_rate_metrics(["a", "a", "b", "b"], [0.0, 1.0, 0.5, 0.9])
    assert (found["rollout/pass_rate/0"], found["rollout/pass_rate/50_75"]) == (0.5, 0.5)


def test_one_sample_a_prompt_has_no_distribution():
    assert pass_rate_metrics(["a", "b"], [0.0, 1.0]) == {}
    assert pass_rate_metrics([], []) == {}


def test_the_threshold_of_training_is_that_of_the_held_out_sets_with_the_same_reward():
    own = {"reward": {"function": {"type": "math"}}, "pass_threshold": 0.1}
    assert training_threshold([dataset("a", pass_threshold=0.5), dataset("b", **own)]) == 0.5
    assert training_threshold([dataset("a", pass_threshold=0.5), dataset("b")]) is None
    assert training_threshold([dataset("a")]) is None
    assert training_threshold([dataset("b", **own)]) is None
    assert training_threshold([]) is None


def planned(number: int, *row: object) -> PlannedGroup:
    return PlannedGroup.model_validate(
        {
            "group_id": f"run:{number:08d}",
            "prompt": "p",
            "prompt_ids": (),
            "seeds": (1, 2),
            "row": row or None,
        }
    )


def test_metrics_of_draws_are_shares_of_new_draws_and_mean_pass_rates():
    waiting = BufferedGroup(group_id="run:00000000", plan="p")
    groups = (
        planned(0, 7, "a", "hard"),
        planned(1, 5, "a", "normal"),
        planned(2, 6, "b", "normal"),
        planned(3, 8, "b", "normal"),
        planned(4, 9, "b", "easy"),
    )
    before = DataState(buffer=(waiting,))
    plan = Plan(branch="run", iteration=1, groups=groups, before=before, after=DataState())
    visits = {"run:00000000": (1, 4), "run:00000001": (2, 2), "run:00000002": (1, 2)}
    assert draw_metrics([plan], visits) == {
        "rollout/difficulty/easy/share": 0.25,
        "rollout/difficulty/hard/pass_rate": 0.25,
        "rollout/difficulty/normal/pass_rate": 0.75,
        "rollout/difficulty/normal/share": 0.75,
        "rollout/source/a/pass_rate": 0.625,
        "rollout/source/a/share": 0.25,
        "rollout/source/b/pass_rate": 0.5,
        "rollout/source/b/share": 0.75,
    }


def test_a_plan_without_a_curriculum_has_no_metrics_of_draws():
    plan = Plan(
        branch="run", iteration=0, groups=(planned(0),), before=DataState(), after=DataState()
    )
    assert draw_metrics([plan], {"run:00000000": (1, 1)}) == {}
