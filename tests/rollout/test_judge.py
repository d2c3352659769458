"""The verdict about a group: failed, aborted, unscored, filtered, or fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.config.data import RewardConfig
from rlpipe.errors import ConfigError, RewardError
from rlpipe.rollout.filters import load_filter, reward_nonzero_std
from rlpipe.rollout.judge import Judge, Verdict
from rlpipe.rollout.selection import Selection
from rlpipe.types import Sample, Status

BUILT_IN = "rlpipe.rollout.filters.reward_nonzero_std"


def _group(group_id: str, *rewards: float | None, status: Status = Status.COMPLETED) -> list[Sample]:
    return [
        Sample(group_id, index, "p", [1], response_ids=[2], status=status, reward=reward, metadata={"reward": reward})
        for index, reward in enumerate(rewards)
    ]


def _hook(folder: Path, source: str) -> str:
    file = folder / "hook.py"
    file.write_text(source)
    return f"{file}:hook"


def _reward(folder: Path, source: str) -> RewardConfig:
    (folder / "reward.py").write_text(source)
    return RewardConfig.model_validate({"function": {"type": "python", "path": f"{folder / 'reward.py'}:reward"}, "workers": 0})


@pytest.mark.parametrize(("rewards", "kept"), [((0.0, 1.0), True), ((1.0, 1.0), False), ((0.0, 0.0, 0.5), True)])
def test_equal_rewards_teach_nothing(rewards: tuple[float, ...], kept: bool):
    assert reward_nonzero_std(_group("b:1", *rewards))[0] is kept
    assert load_filter(BUILT_IN)(_group("b:1", *rewards)) == (None if kept else f"zero_std_{rewards[0]:g}")


@pytest.mark.parametrize(
    ("body", "reason"),
    [("return True", None), ("return False", "filtered"), ("return False, 'dull'", "dull"), ("return True, 'x'", None)],
)
def test_a_filter_answers_with_a_bool_or_with_a_reason_too(tmp_path: Path, body: str, reason: str | None):
    assert load_filter(_hook(tmp_path, f"def hook(samples):\n    {body}\n"))(_group("b:1", 1.0)) == reason


@pytest.mark.parametrize("body", ["return 1", "return None", "raise KeyError('x')", "return (None, 'x')"])
def test_what_goes_wrong_in_a_filter_is_named(tmp_path: Path, body: str):
    with pytest.raises(RewardError, match=r"(?s)hook.py:hook/b:1: the filter failed"):
        load_filter(_hook(tmp_path, f"def hook(samples):\n    {body}\n"))(_group("b:1", 1.0))


@pytest.mark.parametrize(
    "source", ["def hook():\n    pass\n", "def hook(a, b):\n    pass\n", "async def hook(samples):\n    pass\n"]
)
def test_a_filter_that_cannot_be_called_is_refused_when_it_is_loaded(tmp_path: Path, source: str):
    with pytest.raises(ConfigError, match=r"rollout.dynamic_sampling_filter_path"):
        load_filter(_hook(tmp_path, source))


def test_failed_and_aborted_groups_are_seen_without_rewards():
    judge = Judge(lambda samples: None)
    failed = _group("b:1", None, status=Status.FAILED)
    failed[0].error = "EngineError: gone"
    assert judge.at_once(failed) == Verdict("b:1", "failed", "EngineError: gone")
    assert judge.at_once(_group("b:2", None, status=Status.ABORTED)) == Verdict("b:2", "aborted")
    assert judge.at_once(_group("b:3", None)) is None
    assert Judge().at_once(_group("b:3", None)) == Verdict("b:3", None)


async def test_groups_are_scored_by_the_run_s_reward_before_the_filter_sees_them(tmp_path: Path):
    reward = _reward(tmp_path, "def reward(sample):\n    return sample.metadata['reward']\n")
    groups = [_group("b:1", 0.0, 1.0), _group("b:2", 1.0, 1.0), _group("b:3", 1.0, None)]
    for group in groups:
        for sample in group:
            sample.reward = None
    verdicts = await Judge(load_filter(BUILT_IN), reward).verdicts(groups)
    assert [verdict[:2] for verdict in verdicts] == [("b:1", None), ("b:2", "zero_std_1"), ("b:3", "reward_error")]
    assert verdicts[2].error is not None
    assert all(sample.reward is None for group in groups for sample in group), "the samples are left as they are"


async def test_a_filter_s_error_rejects_its_group_only():
    def keep(samples):
        if samples[0].group_id == "b:1":
            raise RewardError("the filter failed")

    verdicts = await Judge(keep).verdicts([_group("b:1", 0.0), _group("b:2", 0.0)])
    assert verdicts == [Verdict("b:1", "filter_error", "the filter failed"), Verdict("b:2", None)]


VERDICTS = st.lists(st.sampled_from([None, "dull", "failed"]), min_size=1, max_size=12)


@given(VERDICTS, st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_the_first_fit_groups_are_accepted_and_in_order_it_does_not_matter_who_came_first(reasons, batch, in_order, dice):
    names = [f"b:{number:02d}" for number in range(len(reasons))]
    selection = Selection(batch, in_order=in_order)
    selection.add(names)
    came = dice.sample(names, len(names))
    for name in came:
        if selection.over:
            break
        selection.decide(name, reasons[names.index(name)])
        selection.decide(name, "a second verdict does not count")
    fit = [name for name in (names if in_order else came) if reasons[names.index(name)] is None]
    assert selection.over and selection.accepted == tuple(sorted(fit[:batch]))
    assert selection.full == (len(fit) >= batch) and not set(selection.rejected) & set(selection.accepted)
