"""The same batch on one GPU and on two GPUs with NCCL, in every layout (`pytest -m gpu`).

Results agree within bfloat16, and both ranks have the same state. `test_parallel` compares float32
on CPUs.
"""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.system.ports import free_port
from tests.engines.megatron.ranks import score_and_train
from tests.engines.megatron.test_parallel import EXPERTS, LAYOUTS, TRAIN

CASES = [("qwen3", layout) for layout in LAYOUTS] + [("qwen3_moe", layout) for layout in EXPERTS]
ITERATIONS = 2
MEAN_APART, MOST_APART = 0.02, 0.3
"""Of log-probs, in nats: what rounding in another order makes of a model with weights as wide as
these."""


@pytest.fixture(scope="module")
def alone(models):
    train = score_and_train
    return {
        name: train(0, 1, free_port(), models[name], TRAIN, ITERATIONS, "bfloat16")
        for name in ("qwen3", "qwen3_moe")
    }


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_two_gpus_compute_the_same_as_one_gpu(models, alone, two_ranks, family, layout):
    wanted = alone[family]
    train = TRAIN | {**LAYOUTS, **EXPERTS}[layout]
    first, second = two_ranks.run(score_and_train, models[family], train, ITERATIONS, "bfloat16")
    assert np.array_equal(first["scores"], second["scores"])
    assert first["steps"] == second["steps"] and first["digest"] == second["digest"]
    apart = np.abs(first["scores"] - wanted["scores"])
    norms = [[step["grad_norm"] for step in one["steps"]] for one in (first, wanted)]
    print(
        f"{family}, {layout}: log-prob difference {apart.mean():.1e}, at most {apart.max():.1e}; "
        f"gradient norms {norms}"
    )
    assert apart.mean() < MEAN_APART and apart.max() < MOST_APART
    assert norms[0][0] == pytest.approx(norms[1][0], rel=0.03), (
        "before the first step weights are the same"
    )
    assert norms[0] == pytest.approx(norms[1], rel=0.3)
