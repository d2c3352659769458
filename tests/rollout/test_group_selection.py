"""Filters, verdicts about groups, and the selection of a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.data import RewardConfig
from rlpipe.errors import ConfigError, RewardError
from rlpipe.rollout.filters import Rejection, load_filter, reward_nonzero_std
from rlpipe.rollout.group_selection import GroupJudge, Selection, Verdict
from rlpipe.types import Sample, Status

BUILT_IN = "rlpipe.rollout.filters.reward_nonzero_std"


def _group(
    group_id: str, *rewards: float | None, status: Status = Status.COMPLETED
) -> list[Sample]:
    return [
        Sample(
            group_id,
            index,
            "p",
            [1],
            response_ids=[2],
            status=status,
            reward=reward,
            metadata={"reward": reward},
        )
        for index, reward in enumerate(rewards)
    ]


def _hook(folder: Path, source: str) -> str:
    file = folder / "hook.py"
    file.write_text(source)
    return f"{file}:hook"


def _reward(folder: Path, source: str) -> RewardConfig:
    (folder / "reward.py").write_text(source)
    return RewardConfig.model_validate(
        {"function": {"type": "python", "path": f"{folder / 'reward.py'}:reward"}, "workers": 0}
    )


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((0.0, 1.0), True),
        ((1.0, 1.0), False),
        ((0.0, 0.0, 0.5), True),
        ((0.0, 1e-7), False),
        ((0.5, 0.5 + 1e-6), False),
        ((0.0, 1e-5), True),
        ((0.1 + 0.2, 0.3), False),
        ((1.0,), False),
    ],
)
def test_groups_of_equal_rewards_are_rejected_also_with_rounding(
    rewards: tuple[float, ...], kept: bool
):
    expected = (
        torch.tensor(rewards, dtype=torch.float64).std(correction=len(rewards) > 1).item() > 1e-6
    )
    assert kept is expected, "slime's check_reward_nonzero_std"
    assert reward_nonzero_std(_group("b:1", *rewards)).keep is kept
    reason = f"zero_std_{round(rewards[0], 1):g}"
    assert load_filter(BUILT_IN)(_group("b:1", *rewards)) == (None if kept else Rejection(reason))
    fallback = load_filter(f"{BUILT_IN}_with_fallback")(_group("b:1", *rewards))
    assert fallback == (None if kept else Rejection(reason, fallback=True))


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_group_without_finite_rewards_is_an_error(reward: float | None):
    with pytest.raises(RewardError, match="sample 1 has no finite reward"):
        load_filter(BUILT_IN)(_group("b:1", 0.0, reward))


@pytest.mark.parametrize(
    ("body", "rejection"),
    [
        ("return True", None),
        ("return False", Rejection("filtered")),
        ("return False, 'dull'", Rejection("dull")),
        ("return True, 'x'", None),
        ("return DynamicFilterOutput(False, 'dull', True)", Rejection("dull", fallback=True)),
        ("return DynamicFilterOutput(keep=False)", Rejection("filtered")),
        ("return DynamicFilterOutput(keep=True, keep_when_insufficient=True)", None),
        (
            "return check_reward_nonzero_std_with_fallback(None, samples)",
            Rejection("zero_std_1", fallback=True),
        ),
    ],
)
def test_a_filter_returns_a_bool_a_reason_or_slimes_object(
    tmp_path: Path, body: str, rejection: Rejection | None
):
    imports = (
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "from slime.rollout.filter_hub.dynamic_sampling_filters import "
        "check_reward_nonzero_std_with_fallback\n"
    )
    path = _hook(tmp_path, f"{imports}def hook(samples):\n    {body}\n")
    assert load_filter(path)(_group("b:1", 1.0)) == rejection


@pytest.mark.parametrize(
    "body",
    [
        "return 1",
        "return None",
        "raise KeyError('x')",
        "return (None, 'x')",
        "from types import SimpleNamespace\n"
        "    return SimpleNamespace(keep=False, keep_when_insufficient='yes')",
    ],
)
def test_an_exception_or_wrong_answer_of_a_filter_is_named(tmp_path: Path, body: str):
    with pytest.raises(RewardError, match=r"(?s)hook.py:hook/b:1: the filter failed"):
        load_filter(_hook(tmp_path, f"def hook(samples):\n    {body}\n"))(_group("b:1", 1.0))


@pytest.mark.parametrize(
    "source",
    [
        "def hook():\n    pass\n",
        "def hook(a, b):\n    pass\n",
        "async def hook(samples):\n    pass\n",
    ],
)
def test_a_filter_with_a_wrong_signature_is_refused_when_it_is_loaded(tmp_path: Path, source: str):
    with pytest.raises(ConfigError, match=r"rollout.dynamic_sampling_filter_path"):
        load_filter(_hook(tmp_path, source))


def test_failed_and_aborted_groups_have_a_verdict_without_rewards():
    judge = GroupJudge(lambda samples: None)
    failed = _group("b:1", None, status=Status.FAILED)
    failed[0].error = "EngineError: gone"
    assert judge.at_once(failed) == Verdict("b:1", "failed", "EngineError: gone")
    assert judge.at_once(_group("b:2", None, status=Status.ABORTED)) == Verdict("b:2", "aborted")
    assert judge.at_once(_group("b:3", None)) is None
    assert GroupJudge().at_once(_group("b:3", None)) == Verdict("b:3", None)


async def test_groups_are_scored_with_the_runs_reward_before_the_filter(tmp_path: Path):
    reward = _reward(tmp_path, "def reward(sample):\n    return sample.metadata['reward']\n")
    groups = [_group("b:1", 0.0, 1.0), _group("b:2", 1.0, 1.0), _group("b:3", 1.0, None)]
    for group in groups:
        for sample in group:
            sample.reward = None
    verdicts = await GroupJudge(load_filter(BUILT_IN), reward).verdicts(groups)
    assert [verdict[:2] for verdict in verdicts] == [
        ("b:1", None),
        ("b:2", "zero_std_1"),
        ("b:3", "reward_error"),
    ]
    assert verdicts[2].error is not None
    assert all(sample.reward is None for group in groups for sample in group), (
        "the samples are left as they are"
    )


async def test_an_error_of_a_filter_rejects_its_group_only():
    def keep(samples):
        if samples[0].group_id == "b:1":
            raise RewardError("the filter failed")

    verdicts = await GroupJudge(keep).verdicts([_group("b:1", 0.0), _group("b:2", 0.0)])
    assert verdicts == [Verdict("b:1", "filter_error", "the filter failed"), Verdict("b:2", None)]


async def test_a_verdict_marks_a_fallback_group():
    judge = GroupJudge(lambda samples: Rejection("dull", fallback=samples[0].group_id == "b:1"))
    verdicts = await judge.verdicts([_group("b:1", 0.0), _group("b:2", 0.0)])
    assert verdicts == [Verdict("b:1", "dull", fallback=True), Verdict("b:2", "dull")]


VERDICTS = st.lists(st.sampled_from([None, "dull", "failed", "fallback"]), min_size=1, max_size=12)


@given(VERDICTS, st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_the_first_fit_groups_are_accepted_by_time_or_in_order_of_the_plan(
    reasons, batch, in_order, random_order
):
    names = [f"b:{number:02d}" for number in range(len(reasons))]
    selection = Selection(batch, in_order=in_order)
    selection.add(names)
    arrived = random_order.sample(names, len(names))
    for name in arrived:
        if selection.decided:
            break
        reason = reasons[names.index(name)]
        selection.decide(name, reason, fallback=reason == "fallback")
        selection.decide(name, "a second verdict does not count")
    order = names if in_order else arrived
    fit = [name for name in order if reasons[names.index(name)] is None][:batch]
    spare = [name for name in order if reasons[names.index(name)] == "fallback"][: batch - len(fit)]
    assert selection.decided and selection.accepted == tuple(sorted([*fit, *spare]))
    assert selection.fallbacks == dict.fromkeys(spare, "fallback")
    assert selection.full == (len([*fit, *spare]) >= batch) and not set(selection.rejected) & set(
        selection.accepted
    )
    decided = (
        set(arrived)
        if len(fit) < batch or in_order
        else set(selection.accepted) | set(selection.rejected)
    )
    assert {*selection.accepted, *selection.rejected} >= {
        n for n in decided if reasons[names.index(n)] is not None
    }


def test_a_fallback_never_displaces_a_fit_group_and_counts_after_the_round_only():
    selection = Selection(2, in_order=False)
    selection.add(["b:1", "b:2", "b:3"])
    selection.decide("b:1", "dull", fallback=True)
    selection.decide("b:2", None)
    assert (selection.accepted, selection.decided) == (("b:2",), False)
    selection.decide("b:3", None)
    assert (selection.accepted, selection.fallbacks, selection.rejected) == (
        ("b:2", "b:3"),
        {},
        {"b:1": "dull"},
    )
