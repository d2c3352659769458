"""Token weights of an optimizer step (rlpipe.engines.megatron.train.token_weights)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlpipe.batch.columns import BatchColumns
from rlpipe.config.algorithms import LossConfig
from rlpipe.engines.megatron.train.token_weights import step_weights

FAR = [[0.0, 3.0], [0.0], [0.0, -3.0, 0.0]]
"""Log-ratios of proximal to behaviour."""


def three(rollout: list[int] | None = None) -> BatchColumns:
    zeros = [[0.0] * len(row) for row in FAR]
    batch = BatchColumns.from_lists(
        [[1]] * 3,
        [[2, 3], [4], [5, 6, 7]],
        loss_mask=[[1, 1], [1], [1, 1, 0]],
        proximal_log_probs=FAR,
        rollout_log_probs=zeros,
    )
    return batch.with_columns(rollout=None if rollout is None else np.array(rollout))


def everything() -> np.ndarray:
    return np.arange(3)


def test_tokens_of_other_steps_have_weight_zero():
    found = step_weights(three(), np.array([0, 2]), LossConfig())
    assert found.weight.tolist() == pytest.approx([0.25, 0.25, 0, 0.25, 0.25, 0])
    assert found.factor is None
    assert found.metrics == {}


def test_samples_of_one_rollout_share_a_denominator_and_count_once():
    found = step_weights(three([0, 1, 0]), everything(), LossConfig())
    assert found.weight.tolist() == pytest.approx([1 / 8, 1 / 8, 1 / 2, 1 / 8, 1 / 8, 0])


def test_rejected_tokens_shrink_the_gradient_unless_it_is_renormalised():
    shrinking = step_weights(three(), everything(), LossConfig(use_rs=True))
    assert shrinking.weight.tolist() == pytest.approx([1 / 6, 0, 1 / 3, 1 / 6, 0, 0])
    whole = step_weights(three(), everything(), LossConfig(use_rs=True, renormalize_rejected=True))
    assert whole.weight.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0, 0])
    assert whole.metrics["rs_rejectfrac"] == pytest.approx(1 / 3), (
        "of the tokens before any was rejected"
    )


def test_the_mean_weight_and_the_clipped_share_are_logged():
    found = step_weights(three(), everything(), LossConfig(use_tis=True, tis_clip_low=0.5))
    assert found.factor is not None
    assert found.factor.tolist() == pytest.approx([1, 2, 1, 1, 0.5, 1])
    assert found.metrics["tis"] == pytest.approx((1 + np.exp(3) + 2 + 1 + np.exp(-3)) / 6)
    assert found.metrics["tis_clipfrac"] == pytest.approx(1 / 3)


def test_a_step_is_normalised_by_its_own_mean():
    loss = LossConfig(use_tis=True, tis_batch_normalize=True)
    found = step_weights(three(), np.array([0, 1]), loss)
    assert found.factor is not None
    assert found.factor[:3].tolist() == pytest.approx([0.75, 1.5, 0.75])


def test_user_functions_are_called_once_per_step(tmp_path: Path):
    hook = tmp_path / "mine.py"
    hook.write_text(
        "def correct(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks,\n"
        "            total_lengths, response_lengths):\n"
        "    assert response_lengths == [2, 3] and args == 'args'\n"
        "    return pg_loss * 0.5, [mask * (len(mask) > 2) for mask in loss_masks], {}\n\n"
        "def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):\n"
        "    return lambda values: values.sum() / 4\n"
    )
    loss = LossConfig(
        use_tis=True,
        custom_tis_function_path=f"{hook}:correct",
        custom_pg_loss_reducer_function_path=f"{hook}:reducer",
    )
    found = step_weights(three(), np.array([0, 2]), loss, "args")
    assert found.policy_weight is not None
    assert found.factor is not None
    assert found.factor.tolist() == [0.5, 0.5, 0, 0.5, 0.5, 0.5]
    assert found.weight.tolist() == pytest.approx([0, 0, 0, 0.25, 0.25, 0])
    assert found.policy_weight.tolist() == pytest.approx([0, 0, 0, 0.125, 0.125, 0])
