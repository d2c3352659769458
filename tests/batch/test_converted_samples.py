"""The user's conversion of samples to training data (rlpipe.batch.estimate)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlpipe.batch.estimate import with_advantages
from rlpipe.config.algorithms import AdvantageConfig
from rlpipe.errors import DataError
from tests.batch.test_build import four

CONVERT = """
def convert(args, samples):  # as slime's own conversion of samples
    raw = [sample.get_reward_value(args) for sample in samples]
    masks = [list(sample.loss_mask or [1] * sample.response_length) for sample in samples]
    masks[0][-1] = 0
    samples[0].reward = 9.0  # of a copy: the stored sample keeps its reward
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [2 * value - 1 for value in raw],
        "raw_reward": raw,
        "truncated": [0] * len(samples),
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [f"rollout {number}" for number in range(len(samples))],
        "loss_masks": masks,
        "rollout_mask_sums": [sum(mask) for mask in masks],
        "rollout_log_probs": [[-0.5] * sample.response_length for sample in samples],
        "teacher_log_probs": None,
    }
def reordered(args, samples):
    return convert(args, samples[::-1])
def joined(args, samples):
    return {**convert(args, samples), "rollout_ids": [0] * len(samples)}
def unknown(args, samples):
    return {**convert(args, samples), "multimodal_train_inputs": [0] * len(samples)}
def incomplete(args, samples):
    return {"rewards": [0.0] * len(samples)}
def short(args, samples):
    return {**convert(args, samples), "rewards": [1.0]}
"""


def test_a_conversion_of_samples_decides_rewards_masks_and_log_probs(tmp_path: Path):
    (tmp_path / "mine.py").write_text(CONVERT)
    batch = four()
    columns = batch.columns.with_columns(proximal_log_probs=np.full(12, -2.0, np.float32))
    config = AdvantageConfig(
        rewards_normalization=False,
        grpo_std_normalization=False,
        custom_convert_samples_to_train_data_path=f"{tmp_path}/mine.py:convert",
    )
    args = SimpleNamespace(reward_key=None)
    found = with_advantages(batch, columns, config, args)
    assert found.advantages is not None and found.rollout_log_probs is not None
    assert found.loss_mask.tolist() == [1, 1, 0] + [1] * 9
    assert found.advantages[3::3].tolist() == (2 * batch.rewards - 1)[1:].tolist()
    assert found.rollout_log_probs.tolist() == [-0.5] * 12
    assert found.teacher_log_probs is None
    assert batch.samples[0].reward == batch.rewards[0] != 9.0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("reordered", "must not change their tokens"),
        ("joined", "must not change their rollout_ids"),
        ("unknown", "returns these entries"),
        ("incomplete", "returns these entries"),
        ("short", "one finite reward per sample"),
    ],
)
def test_a_conversion_that_does_not_fit_the_stored_samples_is_refused(
    tmp_path: Path, name: str, error: str
):
    (tmp_path / "mine.py").write_text(CONVERT)
    batch = four()
    columns = batch.columns.with_columns(proximal_log_probs=np.full(12, -2.0, np.float32))
    path = f"{tmp_path}/mine.py:{name}"
    config = AdvantageConfig(custom_convert_samples_to_train_data_path=path)
    with pytest.raises(DataError, match=error):
        with_advantages(batch, columns, config, SimpleNamespace(reward_key=None))
