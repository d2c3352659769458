"""Losses of whole sequences, also where ranks share a sequence, against Python loops."""

from __future__ import annotations

import pytest

from rlpipe.batch.packing import plan
from rlpipe.config.algorithms import LossConfig
from rlpipe.config.train import TrainConfig
from rlpipe.system.ports import free_port
from tests.algorithms import loops
from tests.engines.megatron.ranks import engine
from tests.engines.megatron.rollout_jobs import fanned_batch, train_fanned
from tests.parameters import each

GSPO = {
    "surrogate": "gspo",
    "eps_clip": 0.05,
    "use_opsm": True,
    "opsm_delta": 0.001,
    "kl_loss_coef": 0.05,
    "kl_loss_type": "k3",
    "use_unbiased_kl": True,
    "use_tis": True,
    "tis_level": "geometric",
    "tis_clip": 8.0,
    "tis_batch_normalize": True,
    "rs_veto_threshold": 1e-3,
}
CISPO = {
    "surrogate": "cispo",
    "eps_clip": 1.0,
    "eps_clip_high": 0.1,
    "calculate_per_token_loss": True,
    "use_tis": True,
}
TRAIN = {
    "max_tokens_per_gpu": 64,
    "loss": GSPO,
    "optimizer": {"lr": 1e-3, "clip_grad": 0.5, "adam_eps": 1e-5},
}
LAYOUTS = {
    "data": {},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}


@pytest.mark.parametrize(
    "loss", [GSPO, CISPO, {**GSPO, "calculate_per_token_loss": False, "constant_length": 20}]
)
def test_a_step_has_the_loss_of_a_python_loop(models, loss):
    train = TrainConfig.model_validate({**TRAIN, "loss": loss})
    ours = engine(models["qwen3"], train, 0, 1, free_port())
    try:
        ours.load_hf()
        batch, scores = fanned_batch(ours)
        packing = plan(batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=1)
        step = ours.train(batch, packing).steps[0]
    finally:
        ours.close()
    wanted = (batch.rollout_log_probs, batch.reference_log_probs, batch.advantages, batch.loss_mask)
    columns = [scores, batch.proximal_log_probs, *wanted[:3]]
    rows = [
        [part.astype(float).tolist() for part in batch.split(column)]
        for column in columns
        if column is not None
    ]
    mask = [part.tolist() for part in batch.split(batch.loss_mask)]
    assert len(packing.steps[0][0]) > 1, "several micro-batches, or this shows nothing"
    assert step["loss"] == pytest.approx(
        loops.objective(rows, mask, batch.rollouts.tolist(), LossConfig.model_validate(loss)),
        rel=2e-5,
    )
    assert 0 < step["clipfrac"] < 1
    assert "tis" in step
    assert ("opsm_clipfrac" in step) == ("use_opsm" in loss)


@pytest.fixture(scope="module")
def alone(models):
    return train_fanned(0, 1, free_port(), models["qwen3"], TRAIN)


@pytest.mark.integration
@pytest.mark.parametrize("layout", each(LAYOUTS, ["data", "context"]))
def test_two_ranks_compute_the_same_as_one_rank(models, alone, two_ranks, layout):
    first, second = two_ranks.run(
        train_fanned, models["qwen3"], TRAIN | {"parallel": LAYOUTS[layout]}
    )
    assert first["steps"] == second["steps"]
    assert first["digest"] == second["digest"]
    assert len(first["steps"]) == len(alone["steps"]) == 3
    for found, expected in zip(first["steps"], alone["steps"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert 0 < sum(step["opsm_clipfrac"] for step in alone["steps"]) < 3


CUSTOM = """
def mine(args, batch, log_probs, entropy):
    ratio = (log_probs - batch["log_probs"]).exp()
    sequence = batch["sequence_mean"](log_probs - batch["log_probs"]).exp()
    return -ratio * batch["advantages"], {"mean_ratio": ratio, "sequence_ratio": sequence}
"""


@pytest.mark.integration
def test_a_custom_loss_is_equal_in_every_layout(models, two_ranks, tmp_path):
    (tmp_path / "mine.py").write_text(CUSTOM)
    custom = {
        **TRAIN,
        "loss": {"type": "custom", "custom_loss_function_path": f"{tmp_path / 'mine.py'}:mine"},
    }
    clip = {**TRAIN, "loss": {"eps_clip": 0.999999, "eps_clip_high": 1e9}}
    wanted = train_fanned(0, 1, free_port(), models["qwen3"], clip)["steps"]
    for layout in ("pipeline", "context"):
        first, second = two_ranks.run(
            train_fanned, models["qwen3"], custom | {"parallel": LAYOUTS[layout]}
        )
        assert first["steps"] == second["steps"]
        for found, expected in zip(first["steps"], wanted, strict=True):
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
            assert found["mean_ratio"] == pytest.approx(expected["ratio"], rel=1e-5)
            assert found["sequence_ratio"] == pytest.approx(1, abs=0.2)
