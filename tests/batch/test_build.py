"""Which samples are trained, and why the others are not (rlpipe.batch.build)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.batch.build import Batch
from rlpipe.batch.build import fix_batch as fix_batch_of
from rlpipe.batch.estimate import with_advantages
from rlpipe.batch.metrics import batch_metrics, staleness_metrics
from rlpipe.config.algorithms import AdvantageConfig
from rlpipe.errors import DataError
from rlpipe.rewards.reward_rows import RewardRow
from rlpipe.store.routed_experts import NOT_ROUTED
from rlpipe.types import Sample, Status
from tests.rows import rows_of


def fix_batch(samples, rewards, *, accepted=None, routed=False, **keywords) -> Batch:
    """The batch, of all groups unless told otherwise."""
    everything = {sample.group_id for sample in samples}
    return fix_batch_of(
        rows_of(samples, routed=routed),
        rewards,
        accepted=everything if accepted is None else accepted,
        routed=routed,
        **keywords,
    ).batch(with_samples=True)


VERSION = 3
"""The weight version that is trained."""
TRAINABLE = (Status.COMPLETED, Status.TRUNCATED)
Row = tuple[Sample, RewardRow | None]


def sample(
    group: int = 0,
    index: int = 0,
    status: Status = Status.COMPLETED,
    response: tuple[int, ...] = (3, 4, 5),
) -> Sample:
    """A sample whose tokens are its own: they say which sample a row of the batch is."""
    ids = [1000 * group + 10 * index + token for token in response]
    return Sample(
        group_id=f"run:{group:08d}",
        index=index,
        prompt="p",
        prompt_ids=[1, 2],
        response_ids=ids,
        rollout_log_probs=[-0.001 * token for token in ids],
        status=status,
    )


def test_the_teachers_log_probs_that_samples_bring_are_a_column_of_the_batch():
    rows = [
        replace(sample(0, index), teacher_log_probs=[-0.5 - index, -1.0, -2.0])
        for index in range(2)
    ]
    scores = [reward(row) for row in rows]
    batch = fix_batch(rows, scores, scored=True, version=VERSION, own_teacher=True)
    assert batch.columns.teacher_log_probs is not None
    assert batch.columns.teacher_log_probs.tolist() == [-0.5, -1.0, -2.0, -1.5, -1.0, -2.0]
    config = AdvantageConfig(
        use_opd=True, opd_kl_coef=2.0, advantage_estimator="reinforce_plus_plus_baseline"
    )
    assert fix_batch(rows, scores, scored=True, version=VERSION).columns.teacher_log_probs is None
    scored = batch.columns.with_columns(
        proximal_log_probs=batch.columns.teacher_log_probs - np.float32(0.25)
    )
    apart = with_advantages(
        batch, scored, config.model_copy(update={"normalize_advantages": False})
    ).advantages
    assert apart is not None
    assert apart.tolist() == [0.5] * 6, (
        "-2 × (student - teacher), around a baseline of equal rewards"
    )
    with pytest.raises(DataError, match="a sample has no log-probs of the teacher") as caught:
        fix_batch([rows[0], sample(0, 1)], scores, scored=True, version=VERSION, own_teacher=True)
    assert caught.value.where == "advantage/run:00000000/1"


def reward(of: Sample, value: float | None = 1.0) -> RewardRow:
    return RewardRow(
        of.group_id, of.index, value, error=None if value is not None else "the verifier raised"
    )


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Samples of a rollout in any order, with whatever became of them, and their rewards if they
    have one."""
    made: list[Row] = []
    for group in range(draw(st.integers(1, 5))):
        for index in range(draw(st.integers(1, 4))):
            response = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
            status = draw(st.sampled_from([*TRAINABLE * 4, *Status]))
            versions = draw(
                st.sampled_from(
                    [[]]
                    + [[(len(response), VERSION)]] * 8
                    + [[(0, VERSION), (len(response), VERSION - 1)]]
                )
            )
            one = replace(sample(group, index, status, response), weight_versions=versions)
            value = draw(st.sampled_from([0.0, 0.0, 1.0, 0.5, -1.0, 1.0, None]))
            made.append((one, draw(st.sampled_from([reward(one, value)] * 5 + [None]))))
    return draw(st.permutations(made))


def fit(row: Row, scored: bool) -> bool:
    of, given_reward = row
    rewarded = not scored or (given_reward is not None and given_reward.reward is not None)
    fresh = all(version >= VERSION for _, version in of.weight_versions)
    return of.status in TRAINABLE and bool(of.response_ids) and rewarded and fresh


@given(rows(), st.booleans())
def test_every_group_is_trained_whole_or_dropped_with_a_reason(given_rows: list[Row], scored: bool):
    samples = [of for of, _ in given_rows]
    rewards = [row for _, row in given_rows if row is not None]
    groups = {of.group_id for of in samples}
    unfit = {row[0].group_id for row in given_rows if not fit(row, scored)}
    if unfit == groups:
        with pytest.raises(DataError, match="no group is left"):
            fix_batch(samples, rewards, scored=scored, version=VERSION)
        return
    batch = fix_batch(samples, rewards, scored=scored, version=VERSION)
    assert set(batch.dropped) == unfit
    assert set(batch.dropped.values()) <= {"failed", "aborted", "empty", "stale", "reward_error"}
    expected = sorted((of.group_id, of.index) for of in samples if of.group_id not in unfit)
    assert list(zip(batch.group_ids, batch.indices, strict=True)) == expected
    assert batch.groups == tuple(dict.fromkeys(group for group, _ in expected))


@given(rows(), st.booleans())
def test_each_row_of_the_batch_has_the_tokens_log_probs_and_reward_of_its_sample(
    given_rows: list[Row], scored: bool
):
    always = [(sample(9), reward(sample(9)))]
    samples, rewards = zip(*(given_rows + always), strict=True)
    batch = fix_batch(
        samples, [row for row in rewards if row is not None], scored=scored, version=VERSION
    )
    by_key = {(of.group_id, of.index): (of, row) for of, row in zip(samples, rewards, strict=True)}
    tokens = np.split(batch.columns.tokens, batch.columns.offsets[1:-1])
    assert batch.columns.rollout_log_probs is not None
    log_probs = np.split(batch.columns.rollout_log_probs, batch.columns.response_offsets[1:-1])
    assert len(tokens) == len(batch.group_ids)
    for number, key in enumerate(zip(batch.group_ids, batch.indices, strict=True)):
        of, row = by_key[key]
        assert tokens[number].tolist() == [*of.prompt_ids, *of.response_ids]
        assert log_probs[number].tolist() == np.float32(of.rollout_log_probs).tolist()
        assert batch.columns.prompt_lengths[number] == len(of.prompt_ids)
        assert batch.rewards[number] == (row.reward if scored and row is not None else 0.0)


@given(rows())
def test_the_order_of_the_rows_does_not_matter(given_rows: list[Row]):
    always = [(sample(9), reward(sample(9)))]
    first, second = (
        fix_batch(
            [of for of, _ in order],
            [row for _, row in order if row is not None],
            scored=True,
            version=VERSION,
        )
        for order in (given_rows + always, always + given_rows[::-1])
    )
    assert (first.group_ids, first.indices, first.dropped) == (
        second.group_ids,
        second.indices,
        second.dropped,
    )
    assert np.array_equal(first.columns.tokens, second.columns.tokens)
    assert np.array_equal(first.rewards, second.rewards)


@pytest.mark.parametrize(
    ("bad", "value", "reason"),
    [
        (sample(1, 1, Status.FAILED), None, "failed"),
        (sample(1, 1, Status.ABORTED), 1.0, "aborted"),
        (sample(1, 1, Status.PENDING), None, "aborted"),
        (sample(1, 1, Status.TRUNCATED), None, "reward_error"),
        (sample(1, 1), None, "reward_error"),
        (replace(sample(1, 1), weight_versions=[(1, VERSION), (2, VERSION - 1)]), 1.0, "stale"),
    ],
)
def test_one_unfit_sample_drops_its_group_and_no_other(
    bad: Sample, value: float | None, reason: str
):
    samples = [sample(0, 0), sample(1, 0), bad]
    batch = fix_batch(
        samples,
        [reward(samples[0]), reward(samples[1]), reward(bad, value)],
        scored=True,
        version=VERSION,
    )
    assert batch.dropped == {"run:00000001": reason}
    assert batch.groups == ("run:00000000",)


def test_tokens_of_the_weights_that_are_trained_are_not_stale():
    current = replace(sample(0, 0), weight_versions=[(3, VERSION)])
    assert fix_batch([current, sample(0, 1)], [], scored=False, version=VERSION).dropped == {}
    assert fix_batch([current, sample(1)], [], scored=False, version=VERSION + 1).dropped == {
        "run:00000000": "stale"
    }


def versions(
    *runs: tuple[int, int], group: int = 0, index: int = 0, mask: list[int] | None = None
) -> Sample:
    """A sample with `(tokens, staleness)` runs."""
    made = sample(group, index, response=tuple(range(sum(tokens for tokens, _ in runs))))
    return replace(
        made, weight_versions=[(tokens, VERSION - age) for tokens, age in runs], loss_mask=mask
    )


def test_groups_that_the_rollout_did_not_accept_are_ignored():
    samples = [sample(0), sample(1, 0, Status.ABORTED), sample(2, 0, Status.FAILED)]
    batch = fix_batch(samples, [], accepted=["run:00000000"], scored=False, version=VERSION)
    assert (batch.groups, batch.dropped) == (("run:00000000",), {})


def test_tokens_up_to_the_bound_are_trained_and_older_ones_drop_their_group():
    samples = [
        versions((1, 2), (2, 0)),
        versions((1, 3), (2, 0), group=1),
        versions((1, 3), (2, 1), group=2, mask=[0, 1, 1]),
    ]
    batch = fix_batch(samples, [], scored=False, version=VERSION, max_staleness=2)
    assert batch.dropped == {"run:00000001": "stale"}
    assert batch.groups == ("run:00000000", "run:00000002"), (
        "a masked token may be as old as it likes"
    )


def test_with_masking_old_tokens_have_no_part_in_the_loss():
    samples = [
        versions((1, 3), (2, 1)),
        versions((3, 5), index=1),
        versions((3, 4), group=1),
        versions((2, 0), group=2, mask=[0, 1]),
    ]
    batch = fix_batch(samples, [], scored=False, version=VERSION, max_staleness=1, mask_stale=True)
    assert batch.dropped == {"run:00000001": "stale"}
    assert batch.columns.loss_mask.tolist() == [0, 1, 1, 0, 0, 0, 0, 1]


def test_the_metrics_have_the_staleness_of_unmasked_tokens():
    samples = [versions((1, 3), (2, 1)), versions((1, 1), (4, 0), group=1)]
    batch = fix_batch(samples, [], scored=False, version=VERSION, max_staleness=1, mask_stale=True)
    assert batch.staleness is not None
    assert batch.staleness.tolist() == [3, 1, 1, 1, 0, 0, 0, 0]
    assert staleness_metrics(batch, batch.columns.loss_mask) == {
        "rollout/staleness/mean": pytest.approx(3 / 7),
        "rollout/staleness/max": 1.0,
        "staleness/0": pytest.approx(4 / 7),
        "staleness/1": pytest.approx(3 / 7),
    }
    supervised = fix_batch(
        [replace(sample(0), rollout_log_probs=None)], [], scored=False, version=VERSION
    )
    assert staleness_metrics(supervised, supervised.columns.loss_mask) == {}


def test_engine_and_trainer_are_compared_where_the_same_weights_sampled():
    samples = [versions((2, 0), (1, 1))]
    batch = fix_batch(samples, [], scored=False, version=VERSION, max_staleness=1)
    behaviour = batch.columns.rollout_log_probs
    assert behaviour is not None
    columns = batch.columns.with_columns(
        proximal_log_probs=behaviour + np.array([0.1, -0.2, 5.0], np.float32)
    )
    metrics = batch_metrics(batch, columns)
    assert metrics["rollout/logprob_abs_diff/max"] == pytest.approx(0.2, abs=1e-6)
    assert metrics["rollout/logprob_abs_diff/mean"] == pytest.approx(0.15, abs=1e-6)
    old = fix_batch([versions((3, 1))], [], scored=False, version=VERSION, max_staleness=1)
    assert "rollout/logprob_abs_diff/max" not in batch_metrics(old, columns)


def test_the_metrics_have_the_divergence_of_engine_and_trainer():
    batch = fix_batch([replace(sample(0), loss_mask=[1, 1, 0])], [], scored=False, version=VERSION)
    behaviour = batch.columns.rollout_log_probs
    assert behaviour is not None
    columns = batch.columns.with_columns(
        proximal_log_probs=behaviour + np.array([0.1, -0.3, 9.0], np.float32),
        reference_log_probs=behaviour,
        advantages=np.array([1, 2, 50], np.float32),
        returns=np.array([1, 4, 50], np.float32),
    )
    metrics = batch_metrics(batch, columns)
    assert metrics["rollout/mismatch_kl"] == pytest.approx(0.1, abs=1e-6)
    expected = np.mean([np.exp(d) - 1 - d for d in (0.1, -0.3)])
    assert metrics["rollout/mismatch_k3_kl"] == pytest.approx(expected, rel=1e-4)
    assert metrics["rollout/kl"] == pytest.approx(-0.1, abs=1e-6)
    assert (metrics["rollout/advantages"], metrics["rollout/returns"]) == (1.5, 2.5)


def routed(index: int, rows: int, mask: list[int] | None = None) -> Sample:
    """A sample of two prompt and three response tokens, experts for the first `rows`."""
    made = sample(index=index)
    made.rollout_routed_experts = np.full((rows, 4), index, np.uint16)
    made.loss_mask = mask
    return made


def test_every_token_that_counts_has_the_experts_it_was_sampled_with():
    unread = replace(sample(index=2), remove_sample=True)
    samples = [routed(0, 4), routed(1, 3, [1, 1, 0]), unread]
    batch = fix_batch(
        samples, [reward(of) for of in samples], scored=True, version=VERSION, routed=True
    )
    found = batch.columns.routed_experts
    assert found is not None and (found.shape, found.dtype) == ((15, 4), np.uint16)
    assert [row[0] for row in found.tolist()] == [*[0] * 4, NOT_ROUTED, *[1] * 3, *[NOT_ROUTED] * 7]
    plain = fix_batch(samples, [reward(of) for of in samples], scored=True, version=VERSION)
    assert plain.columns.routed_experts is None


@pytest.mark.parametrize("bad", [sample(index=1), routed(1, 3), routed(1, 2, [0, 1, 0])])
def test_a_group_with_a_token_that_counts_and_has_no_experts_is_left_out(bad: Sample):
    other = replace(routed(0, 4), group_id="run:00000001")
    samples = [routed(0, 4), bad, other]
    batch = fix_batch(
        samples,
        [reward(of) for of in samples],
        accepted={of.group_id for of in samples},
        scored=True,
        version=VERSION,
        routed=True,
    )
    assert (batch.groups, batch.dropped) == ((other.group_id,), {bad.group_id: "unrouted"})


def test_the_error_of_a_batch_without_experts_says_what_to_do():
    with pytest.raises(DataError, match=r"1 unrouted(.|\n)*use train.use_routing_replay"):
        fix_batch([sample()], [reward(sample())], scored=True, version=VERSION, routed=True)


def test_a_reward_of_zero_is_a_reward():
    batch = fix_batch(
        [sample(0, 0), sample(0, 1)],
        [reward(sample(0, 0), 0.0), reward(sample(0, 1), 2.5)],
        scored=True,
        version=VERSION,
    )
    assert batch.rewards.tolist() == [0.0, 2.5]
    assert batch.dropped == {}


def test_supervised_rows_need_no_reward_and_no_log_probs():
    given_rows = [replace(sample(0), rollout_log_probs=None, loss_mask=[0, 1, 1])]
    batch = fix_batch(given_rows, [], scored=False, version=VERSION)
    assert batch.columns.rollout_log_probs is None
    assert batch.columns.loss_mask.tolist() == [0, 1, 1]
    with pytest.raises(DataError, match=r"no group is left[\s\S]*do: +reward_error: the reward"):
        fix_batch(given_rows, [], scored=True, version=VERSION)


def test_a_sample_without_a_loss_mask_counts_with_every_response_token():
    batch = fix_batch(
        [sample(0, 0), replace(sample(0, 1), loss_mask=[1, 0, 1])],
        [],
        scored=False,
        version=VERSION,
    )
    assert batch.columns.loss_mask.tolist() == [1, 1, 1, 1, 0, 1]


def test_the_error_of_an_empty_batch_counts_the_drop_reasons():
    samples = [sample(0, 0, Status.FAILED), sample(1), sample(2)]
    with pytest.raises(DataError) as caught:
        fix_batch(samples, [reward(samples[1], None)], scored=True, version=VERSION)
    assert caught.value.found == (
        "3 groups left out: 1 failed, 2 reward_error; "
        "the first error of the reward function: the verifier raised"
    )
    assert caught.value.where == "advantage"


@dataclass
class Fanned(Sample):
    """A sample of a rollout that gave several, or that was removed after the fact."""

    rollout_id: int | None = None
    remove_sample: bool = False


def fanned(index: int, rollout: int | None, *, removed: bool = False) -> Fanned:
    made = sample(0, index)
    given = {
        field.name: getattr(made, field.name)
        for field in fields(Sample)
        if field.name not in vars(Fanned)
    }
    return Fanned(**given, rollout_id=rollout, remove_sample=removed)


def four(*samples: Sample, rewards: tuple[float, ...] = (1.0, 0.0, 0.0, 1.0)) -> Batch:
    given_rows = samples or tuple(sample(0, index) for index in range(4))
    rows = [reward(of, value) for of, value in zip(given_rows, rewards, strict=True)]
    return fix_batch(given_rows, rows, scored=True, version=VERSION)


def test_samples_of_one_rollout_get_one_number_and_one_part_of_the_baseline():
    batch = four(
        fanned(0, 0), fanned(1, 0), fanned(2, 0), fanned(3, 1), rewards=(1.0, 1.0, 1.0, 0.0)
    )
    assert batch.columns.rollouts.tolist() == [0, 0, 0, 1]
    columns = with_advantages(batch, batch.columns, AdvantageConfig(grpo_std_normalization=False))
    assert columns.advantages is not None
    assert columns.advantages[::3].tolist() == [0.5, 0.5, 0.5, -0.5]


def test_a_removed_sample_has_no_part_in_the_loss_but_counts_in_its_group():
    batch = four(fanned(0, None, removed=True), *(sample(0, index) for index in (1, 2, 3)))
    assert batch.columns.loss_mask.tolist() == [0, 0, 0] + [1] * 9
    columns = with_advantages(batch, batch.columns, AdvantageConfig(grpo_std_normalization=False))
    assert columns.advantages is not None
    assert columns.advantages[::3].tolist() == [0.5, -0.5, -0.5, 0.5]


def test_the_hand_values_of_grpo_arrive_on_every_token():
    batch = four()
    columns = with_advantages(batch, batch.columns, AdvantageConfig())
    assert columns.advantages is not None
    assert columns.advantages == pytest.approx(
        np.repeat([0.866024, -0.866024, -0.866024, 0.866024], 3), abs=1e-6
    )
    assert columns.returns is not None
    assert np.array_equal(columns.advantages, columns.returns)


def test_an_estimator_of_the_user_sees_the_batch_under_slimes_names(tmp_path: Path):
    hook = tmp_path / "mine.py"
    hook.write_text(
        "def mine(args, rollout_data):\n"
        "    assert args == 'args' and rollout_data['response_lengths'] == [3, 3, 3, 3]\n"
        "    assert rollout_data['total_lengths'][0] == len(rollout_data['tokens'][0])\n"
        "    pairs = zip(rollout_data['rewards'], rollout_data['log_probs'])\n"
        "    estimates = [reward * part for reward, part in pairs]\n"
        "    rollout_data['advantages'] = rollout_data['returns'] = estimates\n"
    )
    batch = four()
    columns = batch.columns.with_columns(proximal_log_probs=np.full(12, -2.0, np.float32))
    config = AdvantageConfig(
        grpo_std_normalization=False, custom_advantage_function_path=f"{hook}:mine"
    )
    found = with_advantages(batch, columns, config, "args").advantages
    assert found is not None
    assert found[::3].tolist() == [-1, 1, 1, -1]


def test_a_function_of_the_user_changes_the_estimated_batch(tmp_path: Path):
    hook = tmp_path / "mine.py"
    hook.write_text(
        "def mine(args, rollout_id, rollout_data):\n"
        "    assert (args, rollout_id) == ('args', 7)\n"
        "    assert rollout_data['source_names'] == ['unknown'] * 4\n"
        "    for part, mask in zip(rollout_data['advantages'], rollout_data['loss_masks']):\n"
        "        part *= 2\n"
        "        mask[0] = 0\n"
        "def wrong(args, rollout_id, rollout_data):\n"
        "    rollout_data['loss_masks'][0][0] = 2\n"
    )
    batch = four()
    columns = batch.columns.with_columns(proximal_log_probs=np.full(12, -2.0, np.float32))
    plain = with_advantages(batch, columns, AdvantageConfig())
    config = AdvantageConfig(rollout_data_postprocess_path=f"{hook}:mine")
    changed = with_advantages(batch, columns, config, "args", iteration=7)
    assert plain.advantages is not None and changed.advantages is not None
    assert np.allclose(changed.advantages, 2 * plain.advantages)
    assert np.array_equal(changed.returns, plain.returns)  # pyright: ignore[reportArgumentType]
    assert changed.loss_mask.tolist() == [0, 1, 1] * 4
    config = AdvantageConfig(rollout_data_postprocess_path=f"{hook}:wrong")
    with pytest.raises(DataError, match="a loss mask is not 0 or 1"):
        with_advantages(batch, columns, config)
