"""Off-policy corrections."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.algorithms.importance import LARGEST_LOG_RATIO, Correction, correct
from rlpipe.config.algorithms import LossConfig
from tests.algorithms import loops
from tests.algorithms.batches import Ragged, ragged

losses = st.builds(
    dict,
    use_tis=st.booleans(),
    tis_clip=st.sampled_from([1.2, 2.0, 30.0]),
    tis_clip_low=st.sampled_from([0.0, 0.5]),
    tis_level=st.sampled_from(["token", "sequence", "geometric"]),
    tis_mode=st.sampled_from(["clip", "truncate", "icepop", "mask"]),
    tis_batch_normalize=st.booleans(),
    use_rs=st.booleans(),
    rs_level=st.sampled_from(["token", "sequence", "geometric"]),
    rs_lower_bound=st.sampled_from([None, 0.1]),
    rs_upper_bound=st.sampled_from([None, 3.0]),
    rs_veto_threshold=st.sampled_from([None, 0.05]),
).map(LossConfig.model_validate)


def at_ratio(ratio: float, **loss) -> tuple[float, float]:
    """Return (factor, kept) of one token with weight w = ratio."""
    config = LossConfig.model_validate({"use_tis": True, **loss})
    correction = correct(
        np.array([math.log(ratio)]), np.zeros(1), np.ones(1), np.ones(1, int), config
    )
    return float(correction.factor[0]), float(correction.kept[0])


def corrected(batch: Ragged, loss: LossConfig) -> Correction:
    proximal, rollout = (Ragged.flat(column) for column in batch.columns)
    return correct(proximal, rollout, Ragged.flat(batch.mask), batch.lengths, loss)


@pytest.mark.parametrize(
    ("ratio", "mode", "expected"),
    [
        (1.5, "clip", (1.5, 1)),
        (3.0, "clip", (2.0, 1)),
        (0.25, "clip", (0.5, 1)),
        (3.0, "truncate", (2.0, 1)),
        (0.25, "truncate", (0.25, 1)),
        (3.0, "icepop", (0.0, 1)),
        (0.25, "icepop", (0.0, 1)),
        (1.5, "icepop", (1.5, 1)),
        (3.0, "mask", (3.0, 0)),
        (1.5, "mask", (1.5, 1)),
    ],
)
def test_weights_inside_and_outside_the_bounds(
    ratio: float, mode: str, expected: tuple[float, float]
):
    assert at_ratio(ratio, tis_mode=mode, tis_clip_low=0.5) == pytest.approx(expected)


def test_levels_of_the_weight_by_hand():
    proximal = np.log([2.0, 8.0, 1.0])
    rollout = np.zeros(3)
    mask = np.array([1.0, 1.0, 0.0])
    weights = {
        level: correct(
            proximal,
            rollout,
            mask,
            np.array([3]),
            LossConfig(use_tis=True, tis_clip=100.0, tis_level=level),
        ).factor
        for level in ("token", "sequence", "geometric")
    }
    assert weights["token"] == pytest.approx([2, 8, 1])
    assert weights["sequence"] == pytest.approx([16, 16, 16])
    assert weights["geometric"] == pytest.approx([4, 4, 4])


def test_a_token_below_the_veto_threshold_rejects_its_sequence_only():
    proximal = np.array([-1.0, -20.0, -1.0, -1.0])
    correction = correct(
        proximal, np.full(4, -1.0), np.ones(4), np.array([2, 2]), LossConfig(rs_veto_threshold=1e-4)
    )
    assert correction.kept.tolist() == [0, 0, 1, 1]
    assert correction.factor.tolist() == [1, 1, 1, 1]
    assert correction.metrics["rs_vetofrac"].tolist() == [1, 1, 0, 0]
    masked = correct(
        proximal,
        np.full(4, -1.0),
        np.array([1.0, 0, 1, 1]),
        np.array([2, 2]),
        LossConfig(rs_veto_threshold=1e-4),
    )
    assert masked.kept.tolist() == [1, 1, 1, 1], "a token with loss mask 0 has no veto"


@given(ragged(columns=2), losses)
def test_corrections_equal_the_reference_loop(batch: Ragged, loss: LossConfig):
    correction = corrected(batch, loss)
    proximal, rollout = batch.columns
    factors, kept = loops.corrected(proximal, rollout, batch.mask, loss)
    counted = Ragged.flat(batch.mask) > 0
    assert correction.factor[counted] == pytest.approx(
        Ragged.flat(factors)[counted], rel=1e-6, abs=1e-9
    )
    assert correction.kept[counted].tolist() == Ragged.flat(kept)[counted].tolist()


@given(ragged(columns=1), losses)
def test_on_policy_every_factor_is_exactly_1_and_no_token_is_rejected(
    batch: Ragged, loss: LossConfig
):
    column = Ragged.flat(batch.columns[0])
    correction = correct(column, column.copy(), Ragged.flat(batch.mask), batch.lengths, loss)
    assert correction.factor.tolist() == [1.0] * len(column)
    assert correction.kept.tolist() == [1.0] * len(column)
    assert not any(correction.metrics[name].any() for name in correction.metrics if name != "tis")


@given(ragged(columns=2), losses, st.randoms())
def test_masked_tokens_do_not_change_the_correction(batch: Ragged, loss: LossConfig, random):
    mask = Ragged.flat(batch.mask)
    proximal = Ragged.flat(batch.columns[0])
    other = np.where(mask > 0, proximal, random.uniform(-30, 0))
    rollout = Ragged.flat(batch.columns[1])
    before, after = (
        correct(column, rollout, mask, batch.lengths, loss) for column in (proximal, other)
    )
    assert before.factor.tolist() == after.factor.tolist()
    assert before.kept.tolist() == after.kept.tolist()


@given(ragged(columns=2), losses)
def test_normalised_factors_have_mean_1_over_kept_tokens(batch: Ragged, loss: LossConfig):
    loss = loss.model_copy(
        update={"use_tis": True, "tis_level": "token", "tis_batch_normalize": True}
    )
    correction = corrected(batch, loss)
    counted = (Ragged.flat(batch.mask) > 0) & (correction.kept > 0)
    if counted.any() and correction.factor[counted].any():
        assert correction.factor[counted].mean() == pytest.approx(1)


def test_a_huge_ratio_stays_finite():
    correction = correct(
        np.zeros(1),
        np.full(1, -1e4),
        np.ones(1),
        np.ones(1, int),
        LossConfig(use_tis=True, tis_clip=1e12),
    )
    assert correction.factor[0] == pytest.approx(math.exp(LARGEST_LOG_RATIO))
