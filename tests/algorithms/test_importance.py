"""Corrections for tokens that other weights sampled."""

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
    """(factor, kept) of one token whose w is this."""
    config = LossConfig.model_validate({"use_tis": True, **loss})
    found = correct(np.array([math.log(ratio)]), np.zeros(1), np.ones(1), np.ones(1, int), config)
    return float(found.factor[0]), float(found.kept[0])


def corrected(batch: Ragged, loss: LossConfig) -> Correction:
    proximal, behaviour = (Ragged.flat(column) for column in batch.columns)
    return correct(proximal, behaviour, Ragged.flat(batch.mask), batch.lengths, loss)


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
def test_a_weight_within_and_out_of_its_bounds(
    ratio: float, mode: str, expected: tuple[float, float]
):
    assert at_ratio(ratio, tis_mode=mode, tis_clip_low=0.5) == pytest.approx(expected)


def test_levels_by_hand():
    proximal = np.log([2.0, 8.0, 1.0])
    behaviour = np.zeros(3)
    mask = np.array([1.0, 1.0, 0.0])
    weights = {
        level: correct(
            proximal,
            behaviour,
            mask,
            np.array([3]),
            LossConfig(use_tis=True, tis_clip=100.0, tis_level=level),
        ).factor
        for level in ("token", "sequence", "geometric")
    }
    assert weights["token"] == pytest.approx([2, 8, 1])
    assert weights["sequence"] == pytest.approx([16, 16, 16])
    assert weights["geometric"] == pytest.approx([4, 4, 4])


def test_one_token_that_the_trainer_finds_impossible_vetoes_its_sequence_and_no_other():
    proximal = np.array([-1.0, -20.0, -1.0, -1.0])
    found = correct(
        proximal, np.full(4, -1.0), np.ones(4), np.array([2, 2]), LossConfig(rs_veto_threshold=1e-4)
    )
    assert found.kept.tolist() == [0, 0, 1, 1]
    assert found.factor.tolist() == [1, 1, 1, 1]
    assert found.metrics["rs_vetofrac"].tolist() == [1, 1, 0, 0]
    masked = correct(
        proximal,
        np.full(4, -1.0),
        np.array([1.0, 0, 1, 1]),
        np.array([2, 2]),
        LossConfig(rs_veto_threshold=1e-4),
    )
    assert masked.kept.tolist() == [1, 1, 1, 1], "a token that does not count has no veto"


@given(ragged(columns=2), losses)
def test_it_is_what_a_loop_computes(batch: Ragged, loss: LossConfig):
    found = corrected(batch, loss)
    proximal, behaviour = batch.columns
    factors, kept = loops.corrected(proximal, behaviour, batch.mask, loss)
    counted = Ragged.flat(batch.mask) > 0
    assert found.factor[counted] == pytest.approx(Ragged.flat(factors)[counted], rel=1e-6, abs=1e-9)
    assert found.kept[counted].tolist() == Ragged.flat(kept)[counted].tolist()


@given(ragged(columns=1), losses)
def test_on_policy_every_factor_is_exactly_1_and_nothing_is_rejected(
    batch: Ragged, loss: LossConfig
):
    column = Ragged.flat(batch.columns[0])
    found = correct(column, column.copy(), Ragged.flat(batch.mask), batch.lengths, loss)
    assert found.factor.tolist() == [1.0] * len(column)
    assert found.kept.tolist() == [1.0] * len(column)
    assert not any(found.metrics[name].any() for name in found.metrics if name != "tis")


@given(ragged(columns=2), losses, st.randoms())
def test_tokens_that_do_not_count_change_nothing(batch: Ragged, loss: LossConfig, random):
    mask = Ragged.flat(batch.mask)
    proximal = Ragged.flat(batch.columns[0])
    other = np.where(mask > 0, proximal, random.uniform(-30, 0))
    behaviour = Ragged.flat(batch.columns[1])
    before, after = (
        correct(column, behaviour, mask, batch.lengths, loss) for column in (proximal, other)
    )
    assert before.factor.tolist() == after.factor.tolist()
    assert before.kept.tolist() == after.kept.tolist()


@given(ragged(columns=2), losses)
def test_normalised_factors_have_mean_1_over_what_is_kept(batch: Ragged, loss: LossConfig):
    loss = loss.model_copy(
        update={"use_tis": True, "tis_level": "token", "tis_batch_normalize": True}
    )
    found = corrected(batch, loss)
    chosen = (Ragged.flat(batch.mask) > 0) & (found.kept > 0)
    if chosen.any() and found.factor[chosen].any():
        assert found.factor[chosen].mean() == pytest.approx(1)


def test_a_ratio_without_bounds_stays_a_number():
    found = correct(
        np.zeros(1),
        np.full(1, -1e4),
        np.ones(1),
        np.ones(1, int),
        LossConfig(use_tis=True, tis_clip=1e12),
    )
    assert found.factor[0] == pytest.approx(math.exp(LARGEST_LOG_RATIO))
