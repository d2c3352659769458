"""Reprocess stored rollouts with other rewards, filters and estimators."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpipe.batch.files import read_batch, read_rewards
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError, DataError
from rlpipe.lineage.rollouts import StoredRollout, find
from rlpipe.reprocess.branch import Reprocessed, Reprocessor, finished_groups, lacking, reestimated
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Node, PlannedGroup, Sample, Stage
from tests.reprocessed import FILTER, History, configuration

LONGER = """
def score(sample):
    return {"reward": len(sample.response) + int(sample.response) / 100, "right": 1.0}
"""


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "store")


def other_reward(folder: Path, text: str = LONGER, **more: Any) -> dict[str, Any]:
    (folder / "other.py").write_text(text)
    return {
        "function": {"type": "python", "path": f"{folder}/other.py:score", "reward_key": "reward"},
        **more,
    }


def changed(config: RunConfig, run: str = "new", **sections: Any) -> RunConfig:
    values = config.model_dump(mode="json")
    for section, own in sections.items():
        values[section] = {**values[section], **own}
    return RunConfig.model_validate({**values, "run": run})


def stored(files: Files, run: str, k: int) -> StoredRollout:
    found = find(files, run, k)
    assert found is not None
    return found


def reprocessed(
    files: Files, config: RunConfig, *iterations: int, of: str = "run"
) -> list[Reprocessed]:
    async def all_of() -> list[Reprocessed]:
        async with Reprocessor(files, config) as reprocessor:
            return list(
                await asyncio.gather(
                    *(reprocessor.iteration(stored(files, of, k)) for k in iterations)
                )
            )

    return asyncio.run(all_of())


def contents(files: Files) -> dict[str, bytes]:
    return {name: files.read(name) for name in files.list()}


def test_with_nothing_changed_every_node_is_the_old_one(files: Files, tmp_path: Path):
    config = configuration(tmp_path)
    History(files, config).iterate(2)
    before = contents(files)
    made = reprocessed(files, changed(config), 0, 1)
    assert all(one.reused for one in made)
    for one in made:
        old = stored(files, "run", one.iteration)
        assert (one.rollout, one.reward, one.advantage) == (old.rollout, old.reward, old.advantage)
    assert set(contents(files)) - set(before) == {
        "rollouts/new/00000000.json",
        "rollouts/new/00000001.json",
    }


def test_another_reward_makes_new_columns_beside_the_old_and_once(files: Files, tmp_path: Path):
    config = configuration(tmp_path)
    History(files, config).iterate(2)
    before = contents(files)
    new = changed(config, reward=other_reward(tmp_path))
    made = reprocessed(files, new, 0, 1)
    assert not any(one.reused for one in made)
    after = contents(files)
    assert {name: after[name] for name in before} == before, "nothing that was there is another now"
    rows = read_rewards(files, made[1].reward)
    assert all(1.0 <= (row.reward or 0.0) < 3.0 for row in rows), (
        "the length of the response and a hundredth of it"
    )
    assert rows[0].parts == {"right": 1.0}
    assert made[1].advantage is not None
    old = read_batch(files, stored(files, "run", 1).advantage or made[1].advantage)
    fresh = read_batch(files, made[1].advantage)
    assert np.array_equal(old.proximal_log_probs, fresh.proximal_log_probs)  # type: ignore[arg-type]
    assert not np.array_equal(old.advantages, fresh.advantages)  # type: ignore[arg-type]
    assert made[1].advantage.parents["scored"] == stored(files, "run", 1).advantage.digest  # type: ignore[union-attr]
    again = reprocessed(files, new, 0, 1)
    assert all(one.reused for one in again)
    assert contents(files) == after
    assert stored(files, "new", 1).reward == made[1].reward


def test_another_estimator_alone_scores_nothing_again(files: Files, tmp_path: Path):
    config = configuration(tmp_path)
    History(files, config).iterate()
    (made,) = reprocessed(files, changed(config, advantage={"advantage_estimator": "rloo"}), 0)
    assert made.reward == stored(files, "run", 0).reward
    assert made.advantage is not None
    columns = read_batch(files, made.advantage)
    rewards = read_rewards(files, made.reward)
    groups = {row.group_id for row in rewards}
    others = {g: [row.reward or 0.0 for row in rewards if row.group_id == g] for g in groups}
    expected = [
        r - (sum(values) - r) / (len(values) - 1)
        for g in sorted(groups)
        for values in [others[g]]
        for r in values
    ]
    assert columns.advantages is not None
    found = [float(part[0]) for part in columns.split(columns.advantages)]
    assert found == pytest.approx(expected)


def test_a_filter_chooses_among_all_finished_groups(files: Files, tmp_path: Path):
    config = configuration(tmp_path, groups=6, rollout={"dynamic_sampling_filter_path": FILTER})
    History(files, config).iterate()
    old = stored(files, "run", 0).rollout.outputs
    assert old["dropped"], "some groups were all wrong"
    (made,) = reprocessed(files, changed(config, rollout={"dynamic_sampling_filter_path": None}), 0)
    assert set(made.rollout.outputs["accepted"]) == {*old["accepted"], *old["dropped"]}
    assert made.rollout.outputs["dropped"] == {}
    assert made.rollout.files == stored(files, "run", 0).rollout.files, "no row is written again"
    assert made.advantage is not None
    assert set(made.advantage.outputs["groups"]) == set(old["accepted"])
    assert set(made.advantage.outputs["dropped"].values()) == {"unscored"}
    assert {row.group_id for row in read_rewards(files, made.reward)} == set(
        made.rollout.outputs["accepted"]
    )


def test_a_filter_of_another_reward_drops_with_reasons_and_keeps_at_most_a_batch(
    files: Files, tmp_path: Path
):
    config = configuration(tmp_path, groups=6)
    History(files, config).iterate()
    (tmp_path / "keep.py").write_text(
        "def keep(samples):\n    return sum(s.reward for s in samples) > 5, 'short'\n"
    )
    (tmp_path / "sieve.py").write_text(
        "def sieve(args, groups):\n    groups[0][0].remove_sample = True\n"
    )
    paths = {
        "dynamic_sampling_filter_path": f"{tmp_path}/keep.py:keep",
        "rollout_sample_filter_path": f"{tmp_path}/sieve.py:sieve",
    }
    reward = other_reward(
        tmp_path, "def score(sample):\n    return {'reward': float(sample.response)}\n"
    )
    few = {**paths, "rollout_batch_size": 2}
    new = changed(config, reward=reward, rollout=few, train={"global_batch_size": 8})
    (made,) = reprocessed(files, new, 0)
    outputs = made.rollout.outputs
    sums = {}
    for row in read_rewards(
        files, Nodes(files).get(Stage.REWARD, made.rollout.config["judged_by"])
    ):
        sums[row.group_id] = sums.get(row.group_id, 0.0) + (row.reward or 0.0)
    good = [group for group in sorted(sums) if sums[group] > 5]
    assert outputs["accepted"] == good[:2]
    assert outputs["dropped"] == {
        **{g: "short" for g in sums if sums[g] <= 5},
        **dict.fromkeys(good[2:], "surplus"),
    }
    assert [tuple(key) for key in outputs["removed"]] == [(good[0], 0)]
    assert made.advantage is not None
    columns = read_batch(files, made.advantage)
    assert columns.split(columns.loss_mask)[0].max() == 0
    assert all(one.reused for one in reprocessed(files, new, 0))


def test_a_filter_with_fallback_fills_the_batch_in_the_order_of_the_groups(
    files: Files, tmp_path: Path
):
    config = configuration(tmp_path, groups=6)
    History(files, config).iterate()
    (tmp_path / "keep.py").write_text(
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "def keep(samples):\n"
        "    number = int(samples[0].group_id[-1])\n"
        "    fallback = number in (1, 2, 3)\n"
        "    return DynamicFilterOutput(number == 4, 'other', keep_when_insufficient=fallback)\n"
    )
    rollout = {"dynamic_sampling_filter_path": f"{tmp_path}/keep.py:keep", "rollout_batch_size": 2}
    (made,) = reprocessed(
        files, changed(config, rollout=rollout, train={"global_batch_size": 8}), 0
    )
    outputs = made.rollout.outputs
    assert outputs["accepted"] == ["run:00000001", "run:00000004"]
    assert outputs["fallbacks"] == {"run:00000001": "other"}
    assert set(outputs["dropped"]) == {f"run:0000000{number}" for number in (0, 2, 3, 5)}
    unfiltered = changed(config, "all", rollout={"dynamic_sampling_filter_path": None})
    assert "fallbacks" not in reprocessed(files, unfiltered, 0)[0].rollout.outputs


def test_post_processing_sees_what_the_filter_left(files: Files, tmp_path: Path):
    config = configuration(tmp_path)
    History(files, config).iterate()
    (tmp_path / "post.py").write_text(
        "def halve(args, samples):\n"
        "    raw = [s.reward for s in samples]\n"
        "    return raw, [r / 2 for r in raw]\n"
    )
    new = changed(
        config,
        reward={"custom_reward_post_process_path": f"{tmp_path}/post.py:halve"},
        rollout={"dynamic_sampling_filter_path": FILTER},
    )
    (made,) = reprocessed(files, new, 0)
    rows = read_rewards(files, made.reward)
    assert {row.group_id for row in rows} == set(made.rollout.outputs["accepted"])
    assert all(row.reward == row.parts["raw_reward"] / 2 for row in rows)
    assert {row.reward for row in rows} == {0.0, 0.5}


def test_advantages_that_need_missing_model_scores_are_left_to_training(
    files: Files, tmp_path: Path
):
    config = configuration(tmp_path)
    History(files, config).iterate()
    (made,) = reprocessed(files, changed(config, advantage={"advantage_estimator": "ppo"}), 0)
    assert made.advantage is None
    assert "no values" in made.without
    assert stored(files, "new", 0).advantage is None


def test_a_changed_function_needs_another_run_name(files: Files, tmp_path: Path):
    config = configuration(tmp_path)
    History(files, config).iterate()
    new = changed(config, reward=other_reward(tmp_path))
    reprocessed(files, new, 0)
    other_reward(tmp_path, "def score(sample):\n    return {'reward': 0.0}\n")
    with pytest.raises(ConfigError, match="take another name"):
        reprocessed(files, new, 0)


def test_a_run_without_rewards_is_refused_before_reading(files: Files, tmp_path: Path):
    with pytest.raises(ConfigError, match="nothing to score"):
        Reprocessor(files, configuration(tmp_path, reward={"function": {"type": "none"}}))


def test_an_unchanged_filter_and_reward_reuse_the_choice(files: Files, tmp_path: Path):
    config = configuration(tmp_path, groups=6, rollout={"dynamic_sampling_filter_path": FILTER})
    History(files, config).iterate()
    (made,) = reprocessed(files, changed(config, advantage={"advantage_estimator": "rloo"}), 0)
    old = stored(files, "run", 0)
    assert (made.rollout, made.reward) == (old.rollout, old.reward)
    assert made.advantage != old.advantage


def test_a_reprocessed_branch_can_be_reprocessed(files: Files, tmp_path: Path):
    config = configuration(tmp_path, groups=6, rollout={"dynamic_sampling_filter_path": FILTER})
    History(files, config).iterate()
    unfiltered = changed(config, rollout={"dynamic_sampling_filter_path": None})
    (first,) = reprocessed(files, unfiltered, 0)
    (second,) = reprocessed(
        files, changed(unfiltered, "newer", reward=other_reward(tmp_path)), 0, of="new"
    )
    assert second.rollout == first.rollout
    assert {row.group_id for row in read_rewards(files, second.reward)} == set(
        first.rollout.outputs["accepted"]
    )
    assert all((row.reward or 0.0) >= 1.0 for row in read_rewards(files, second.reward)), (
        "by the newer function, not by scores of before"
    )
    assert stored(files, "newer", 0).reward == second.reward


def test_a_changed_source_of_filter_or_reward_chooses_again(files: Files, tmp_path: Path):
    (tmp_path / "keep.py").write_text("def keep(samples):\n    return True, None\n")
    config = configuration(
        tmp_path, rollout={"dynamic_sampling_filter_path": f"{tmp_path}/keep.py:keep"}
    )
    History(files, config).iterate()
    (same,) = reprocessed(files, changed(config, "same"), 0)
    assert same.rollout == stored(files, "run", 0).rollout
    (tmp_path / "right.py").write_text("def score(sample):\n    return 0.5\n")
    (scored,) = reprocessed(files, changed(config, "scored"), 0)
    assert scored.rollout.digest != same.rollout.digest, "a filter chooses by rewards"
    (tmp_path / "keep.py").write_text(
        "def keep(samples):\n    return samples[0].group_id.endswith('1'), 'other'\n"
    )
    (kept,) = reprocessed(files, changed(config, "kept", train={"global_batch_size": 4}), 0)
    assert kept.rollout.outputs["accepted"] == ["run:00000001"]


def test_post_processing_and_batch_size_reuse_the_scores(files: Files, tmp_path: Path):
    config = configuration(tmp_path)
    History(files, config).iterate()
    (tmp_path / "post.py").write_text(
        "def halve(args, samples):\n    return [1.0] * len(samples), [0.5] * len(samples)\n"
    )
    filtered = changed(config, rollout={"dynamic_sampling_filter_path": FILTER})
    few = changed(
        filtered, "few", rollout={"rollout_batch_size": 1}, train={"global_batch_size": 4}
    )
    post = changed(
        filtered, "post", reward={"custom_reward_post_process_path": f"{tmp_path}/post.py:halve"}
    )
    made = [reprocessed(files, one, 0)[0] for one in (filtered, few, post)]
    assert len({one.rollout.config["judged_by"] for one in made}) == 1
    assert [len(one.rollout.outputs["accepted"]) for one in made[:2]] == [2, 1]


def test_a_filter_gets_samples_in_index_order(files: Files, tmp_path: Path):
    class Reversed(History):
        def _samples(self, group: PlannedGroup, k: int) -> list[Sample]:
            return super()._samples(group, k)[::-1]

    Reversed(files, configuration(tmp_path)).iterate()
    groups = finished_groups(files, stored(files, "run", 0).rollout)
    assert [[sample.index for sample in group] for group in groups.values()] == [[0, 1, 2, 3]] * 4


def at_version(files: Files, config: RunConfig, version: int) -> set[float]:
    """Values of the loss mask of the batch that the rows of iteration 0 make for these weights;
    empty: there is none."""
    old = stored(files, "run", 0)
    assert old.advantage is not None and old.reward is not None
    made = reestimated(
        files, config, scored=old.advantage, rollout=old.rollout, reward=old.reward, version=version
    )
    return set() if isinstance(made, str) else set(made[1].loss_mask.tolist())


def test_rows_may_be_as_old_as_the_run_allows_and_older_tokens_count_only_masked(tmp_path: Path):
    class Continued(History):
        def _samples(self, group: PlannedGroup, k: int) -> list[Sample]:
            return [
                replace(sample, weight_versions=[(1, 0), (2, 1)])
                for sample in super()._samples(group, k)
            ]

    config = configuration(tmp_path)
    files = Continued(Files(tmp_path / "store"), config).iterate().files
    allowed = config.model_copy(update={"async_buffer_size": 1})
    assert at_version(files, config, 0) == at_version(files, allowed, 1) == {1.0}
    assert at_version(files, config, 1) == at_version(files, allowed, 2) == set()
    masked = changed(
        config, rollout={"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    )
    assert at_version(files, masked, 1) == {0.0, 1.0}


def test_distillation_needs_log_probs_of_policy_and_teacher(files: Files, tmp_path: Path):
    config = configuration(tmp_path)
    History(files, config).iterate()
    advantage = stored(files, "run", 0).advantage
    assert advantage is not None
    columns = replace(read_batch(files, advantage), proximal_log_probs=None)
    distilled = config.model_copy(
        update={"advantage": config.advantage.model_copy(update={"use_opd": True})}
    )
    assert lacking(distilled, columns) == ["proximal_log_probs", "teacher_log_probs"]
    assert lacking(config, columns) == []


def test_a_batch_of_other_tokens_than_its_samples_is_an_error(files: Files, tmp_path: Path):
    class Other(History):
        def _batch(self, samples: list[Sample], *others: Any) -> Node:
            return super()._batch(
                [replace(sample, response_ids=[9, 9, 9]) for sample in samples], *others
            )

    config = configuration(tmp_path)
    Other(files, config).iterate()
    with pytest.raises(DataError, match="other tokens"):
        at_version(files, config, 0)
