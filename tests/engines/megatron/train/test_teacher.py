"""A teacher of another architecture in the trainer's ranks scores like transformers."""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.errors import DataError, TrainerError
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.ranks import engine, make_batch

TRAIN = TrainConfig.model_validate({"max_tokens_per_gpu": 64, "optimizer": {"lr": 1e-3}})


def test_a_teacher_scores_like_transformers_and_does_not_change_training(models):
    batch = make_batch()
    digests = []
    expected = reference.score(reference.load(models["llama"]), batch, 0.8)
    for teacher in (None, models["llama"]):
        ours = engine(models["qwen3"], TRAIN, 0, 1, free_port(), teacher_dir=teacher)
        ours.load_hf()
        if teacher is None:
            with pytest.raises(TrainerError, match="no teacher"):
                ours.score(batch, model="teacher")
        else:
            assert np.abs(ours.score(batch, model="teacher") - expected).max() < 1e-5
            strange = batch.select([0])
            strange.tokens[-1] = 96
            with pytest.raises(DataError, match="outside the teacher's vocabulary"):
                ours.score(strange, model="teacher")
        packing = plan(batch.lengths, global_batch_size=None, max_tokens=64, data_parallel=1)
        digests.append(ours.train(batch, packing).state_digest)
        ours.close()
    assert digests[0] == digests[1]
