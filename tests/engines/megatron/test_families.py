"""Every family of models against transformers: what is computed, what is trained, what is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpipe.config.train import TrainConfig
from rlpipe.packing import plan
from rlpipe.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.families import FAMILIES, make
from tests.engines.megatron.ranks import engine, make_batch

TEMPERATURE = 0.8
TRAIN = TrainConfig.model_validate(
    {
        "max_tokens_per_gpu": 64,
        "loss": {"eps_clip_high": 0.28, "entropy_coef": 0.01},
        "optimizer": {"lr": 1e-3, "clip_grad": 0.5, "adam_eps": 1e-5},
    }
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_computed_trained_and_written_as_transformers_does(family, tmp_path):
    directory = make(family, tmp_path / "model")
    ours, theirs = engine(directory, TRAIN, 0, 1, free_port()), reference.load(directory)
    try:
        ours.load_hf()
        stored = load_file(f"{directory}/model.safetensors")
        found = {name: tensor.clone() for name, tensor in ours.named_hf_tensors()}
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], stored[name]) for name in stored)

        batch = make_batch()
        scores = ours.score(batch)
        assert np.abs(scores - reference.score(theirs, batch, TEMPERATURE)).max() < 1e-5

        batch = batch.with_columns(proximal_log_probs=scores, reference_log_probs=scores)
        packing = plan(batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=1)
        step = ours.train(batch, packing).steps[0]
        (wanted,) = reference.train(theirs, reference.make_optimizer(theirs, TRAIN), batch, packing, TRAIN, TEMPERATURE)
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert np.abs(ours.score(batch) - reference.score(theirs, batch, TEMPERATURE)).max() < 2e-4
    finally:
        ours.close()
