"""A single optimizer step with its own proximal log-probs, compared with a scored batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.errors import DataError
from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import engine, make_batch, near

LOSSES: dict[str, dict[str, Any]] = {
    "clip": {},
    "gspo": {"surrogate": "gspo", "eps_clip": 0.1},
    "cispo": {"surrogate": "cispo", "eps_clip": 0.5},
    "sequence mask": {"use_opsm": True, "opsm_delta": 0.0},
    "unbiased kl": {"kl_loss_coef": 0.1, "use_unbiased_kl": True},
    "tis": {"use_tis": True, "tis_clip": 1.1},
    "icepop": {"use_tis": True, "tis_mode": "icepop", "tis_clip": 1.3, "tis_clip_low": 0.7},
    "masked": {"use_tis": True, "tis_mode": "mask", "tis_clip": 1.3, "tis_clip_low": 0.7},
    "sequences": {"use_tis": True, "tis_level": "sequence", "tis_clip": 1.2},
    "geometric": {"use_tis": True, "tis_level": "geometric", "tis_clip": 1.05},
    "rejection": {"use_rs": True, "rs_level": "geometric", "rs_upper_bound": 1.05},
    "veto": {"rs_veto_threshold": 0.5, "entropy_coef": 0.01},
    "tokens of the step": {"use_tis": True, "tis_clip": 1.1, "calculate_per_token_loss": True},
    "reducer": {
        "use_tis": True,
        "tis_mode": "mask",
        "tis_clip": 1.3,
        "tis_clip_low": 0.7,
        "custom_pg_loss_reducer_function_path": f"{__file__}:sum_over_forty",
    },
    "bypass": {"use_rollout_logprobs": True},
}


def sum_over_forty(total_lengths, response_lengths, masks, calculate_per_token_loss):
    mask = torch.cat(masks)
    return lambda values: (values * mask).sum() / 40


def start(model_dir: str, **loss: Any):
    train = {"max_tokens_per_gpu": 64, "optimizer": {"lr": 1e-3}, "loss": loss}
    ours = engine(model_dir, TrainConfig.model_validate(train), 0, 1, free_port())
    ours.load_hf()
    return ours


def steps_of(ours, batch, global_batch_size: int | None = None):
    return plan(
        batch.lengths,
        global_batch_size=global_batch_size,
        max_tokens=ours.max_tokens,
        data_parallel=1,
    )


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_with_its_own_log_probs_equals_the_step_of_a_scored_batch(models, name: str):
    results, weights = [], []
    for scored_first in (True, False):
        ours = start(models["qwen3"], **LOSSES[name])
        batch = make_batch()
        scores = ours.score(batch)
        batch = batch.with_columns(
            rollout_log_probs=near(scores, 0.4, 1),
            reference_log_probs=near(scores, 0.3, 2),
            proximal_log_probs=scores if scored_first else None,
        )
        packing = steps_of(ours, batch)
        assert len(packing.steps[0][0]) > 1, "several micro-batches, or this shows nothing"
        results.append(ours.train(batch, packing))
        weights.append({name: tensor.clone() for name, tensor in ours.named_hf_tensors()})
        ours.close()
    before, own = results
    assert before.proximal_log_probs is None
    counted = batch.loss_mask > 0
    assert 0 < counted.sum() < len(counted)
    assert np.abs(own.proximal_log_probs - scores)[counted].max() < 1e-5
    assert not own.proximal_log_probs[~counted].any()
    assert own.steps[0].keys() == before.steps[0].keys()
    for metric, value in before.steps[0].items():
        assert own.steps[0][metric] == pytest.approx(value, rel=1e-5, abs=2e-6), metric
    assert all(
        torch.allclose(tensor, weights[1][name], rtol=1e-6, atol=1e-6)
        for name, tensor in weights[0].items()
    )
    for share in ("tis_clipfrac", "rs_rejectfrac", "rs_vetofrac"):
        assert 0 < own.steps[0].get(share, 0.5) < 1, "the correction does something"


@pytest.mark.parametrize(
    ("loss", "global_batch_size"),
    [
        ({"use_tis": True, "tis_batch_normalize": True}, None),
        ({"use_rs": True, "renormalize_rejected": True}, None),
        ({"use_tis": True}, 12),
        ({}, 12),
    ],
)
def test_a_batch_must_be_scored_where_a_step_alone_does_not_give_the_log_probs(
    models, loss: dict[str, Any], global_batch_size: int | None
):
    ours = start(models["qwen3"], **loss)
    batch = make_batch()
    with pytest.raises(DataError, match="no proximal_log_probs"):
        ours.train(batch, steps_of(ours, batch, global_batch_size))
    ours.close()
