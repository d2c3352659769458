"""Custom functions: slime's signatures work; unusable functions are refused."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlpipe.algorithms import custom
from rlpipe.algorithms.importance import correct
from rlpipe.algorithms.objective import TokenBatch
from rlpipe.algorithms.sequences import Sequences
from rlpipe.config.algorithms import AdvantageConfig, LossConfig
from rlpipe.errors import ConfigError, DataError
from tests.algorithms.weights import token_weights

LENGTHS = np.array([2, 3])
MASKS = [np.array([1.0, 1.0], np.float32), np.array([1.0, 0.0, 1.0], np.float32)]
PROXIMAL = [np.array([-1.0, -2.0], np.float32), np.array([-1.0, -1.0, -3.0], np.float32)]
ROLLOUT = [np.array([-1.5, -1.0], np.float32), np.array([-1.0, -9.0, -4.0], np.float32)]
ARGS = Namespace(tis_clip=2.0, tis_clip_low=0.5)


def slimes_tis(
    args,
    *,
    pg_loss,
    train_log_probs,
    rollout_log_probs,
    loss_masks,
    total_lengths,
    response_lengths,
    **_others,
):
    """Same signature as slime's `vanilla_tis_function`."""
    assert total_lengths == [4, 5]
    assert response_lengths == [2, 3]
    weights = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    clipped = weights.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * clipped, loss_masks, {"tis_mine": weights}


def correction(function, **others):
    arguments = {
        "proximal_log_probs": PROXIMAL,
        "rollout_log_probs": ROLLOUT,
        "masks": MASKS,
        "total_lengths": LENGTHS + 2,
    }
    return custom.custom_correction(function, ARGS, **{**arguments, **others})


def test_a_correction_with_slimes_signature_equals_the_built_in_one():
    result = correction(slimes_tis)
    mask = np.concatenate(MASKS)
    loss = LossConfig(use_tis=True, tis_clip_low=0.5)
    built_in = correct(np.concatenate(PROXIMAL), np.concatenate(ROLLOUT), mask, LENGTHS, loss)
    counted = mask > 0
    assert result.factor[counted] == pytest.approx(built_in.factor[counted], rel=1e-6)
    assert result.kept[counted].tolist() == [1] * 4
    assert result.metrics["tis_mine"][0] == pytest.approx(np.exp(0.5))


@pytest.mark.parametrize(
    ("name", "mode"), [("icepop_function", "icepop"), ("vanilla_tis_function", "clip")]
)
def test_a_user_file_can_wrap_slimes_corrections(tmp_path: Path, name: str, mode: str):
    import_line = f"from slime.backends.megatron_utils.loss import {name}"
    path = hook(
        tmp_path, f"{import_line}\ndef mine(args, **columns):\n    return {name}(args, **columns)\n"
    )
    result = correction(custom.load("custom_tis_function_path", path))
    mask = np.concatenate(MASKS)
    loss = LossConfig.model_validate({"use_tis": True, "tis_clip_low": 0.5, "tis_mode": mode})
    built_in = correct(np.concatenate(PROXIMAL), np.concatenate(ROLLOUT), mask, LENGTHS, loss)
    assert result.factor[mask > 0] == pytest.approx(built_in.factor[mask > 0], rel=1e-6)
    for metric, values in built_in.metrics.items():
        assert result.metrics[metric][mask > 0] == pytest.approx(values[mask > 0], rel=1e-6)


def test_a_correction_can_reject_tokens():
    def reject(args, *, pg_loss, loss_masks, **others):
        return (
            pg_loss,
            [mask * torch.tensor([0.0] + [1.0] * (len(mask) - 1)) for mask in loss_masks],
            {},
        )

    assert correction(reject).kept.tolist() == [0, 1, 0, 0, 1]


def test_a_correction_that_is_not_proportional_to_the_loss_is_refused():
    with pytest.raises(DataError, match="proportional"):
        correction(lambda args, *, pg_loss, **others: (pg_loss.clamp(min=0), None, {}))


def test_a_correction_with_too_few_values_is_refused():
    with pytest.raises(DataError, match="one value per response token"):
        correction(lambda args, *, pg_loss, **others: (pg_loss[:3], None, {}))


def dr_grpo(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """Same signature as slime's `get_pg_loss_reducer`; divides by a constant length."""

    def reduce(values):
        parts = zip(values.split(response_lengths), loss_masks, strict=True)
        return sum(
            (part * mask).sum() / (1.0 if calculate_per_token_loss else 100.0)
            for part, mask in parts
        )

    return reduce


@pytest.mark.parametrize("per_token", [False, True])
def test_a_reducer_with_slimes_signature_becomes_a_weight_per_token(per_token: bool):
    result = custom.reducer_weights(
        dr_grpo, masks=MASKS, total_lengths=LENGTHS, per_token=per_token, num_rollouts=2
    )
    constant = None if per_token else 100
    expected = token_weights(
        np.concatenate(MASKS), LENGTHS, per_token=per_token, constant_length=constant
    )
    assert result == pytest.approx(expected)


def test_a_reducer_that_is_not_linear_is_refused():
    def square(*_):
        return lambda values: (values + 1).square().sum()

    with pytest.raises(DataError, match="linear"):
        custom.reducer_weights(
            square, masks=MASKS, total_lengths=LENGTHS, per_token=False, num_rollouts=2
        )


def test_an_advantage_function_can_set_lists_of_tensors():
    def mine(args, rollout_data):
        rollout_data["advantages"] = [mask * 2.0 for mask in rollout_data["loss_masks"]]
        rollout_data["returns"] = [mask * 3.0 for mask in rollout_data["loss_masks"]]

    data = {"loss_masks": [torch.from_numpy(mask) for mask in MASKS]}
    result = custom.custom_estimates(mine, ARGS, data, LENGTHS)
    assert result.advantages.tolist() == [2, 2, 2, 0, 2]
    assert result.returns.tolist() == [3, 3, 3, 0, 3]
    with pytest.raises(DataError, match="advantages"):
        custom.custom_estimates(lambda args, data: None, ARGS, {}, LENGTHS)
    with pytest.raises(DataError, match="2 parts with 5 values"):
        custom.custom_estimates(
            lambda a, d: d.update(advantages=[torch.zeros(3), torch.zeros(2)]), ARGS, {}, LENGTHS
        )


def tokens() -> TokenBatch:
    sequences = Sequences(torch.tensor([0, 0, 1]), torch.tensor([2.0, 1.0]))
    columns = {"advantages": torch.tensor([1.0, 2.0, 3.0])}
    return TokenBatch(
        torch.tensor([-1.0, -2.0, -3.0]), torch.ones(3), torch.ones(3), sequences, columns=columns
    )


def test_a_custom_loss_gets_columns_and_sequence_means():
    def mine(args, batch, log_probs, entropy):
        return -batch["advantages"] * batch["sequence_mean"](log_probs) - entropy, {
            "mean": batch["sequence_mean"](log_probs)
        }

    loss, metrics = custom.custom_loss(mine, ARGS, tokens())
    assert loss.tolist() == [0.5, 2, 8]
    assert metrics["mean"].tolist() == [-1.5, -1.5, -3]
    with pytest.raises(DataError, match="return unreduced values"):
        custom.custom_loss(
            lambda args, batch, log_probs, entropy: (log_probs.sum(), {}), ARGS, tokens()
        )


def test_a_custom_loss_gets_logits_unless_it_has_a_log_probs_parameter():
    assert custom.takes_logits(lambda args, batch, logits, sum_of_sample_mean: None)
    assert custom.takes_logits(lambda args, batch, output, reduce: None)
    assert not custom.takes_logits(lambda args, batch, log_probs, entropy: None)


def hook(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(text)
    return f"{path}:mine"


UNCALLABLE = [
    ("custom_loss_function_path", "def mine(args): ...", "cannot be called"),
    ("custom_tis_function_path", "def mine(args, *, pg_loss): ...", "cannot be called"),
    ("custom_advantage_function_path", "def mine(): ...", "cannot be called"),
    ("custom_pg_loss_reducer_function_path", "def mine(masks): ...", "cannot be called"),
]


@pytest.mark.parametrize(("key", "text", "words"), UNCALLABLE)
def test_a_function_that_cannot_be_called_is_refused_before_a_run_starts(
    tmp_path: Path, key: str, text: str, words: str
):
    path = hook(tmp_path, text)
    others = (
        {"use_tis": True} if "tis" in key else {"type": "custom"} if "custom_loss" in key else {}
    )
    of_advantage = key in AdvantageConfig.model_fields
    advantage = AdvantageConfig.model_validate({key: path} if of_advantage else {})
    loss = LossConfig.model_validate({} if of_advantage else {key: path, **others})
    with pytest.raises(ConfigError, match=words) as caught:
        custom.check(advantage, loss)
    assert "args" in str(caught.value.expected) or "total_lengths" in str(caught.value.expected)
