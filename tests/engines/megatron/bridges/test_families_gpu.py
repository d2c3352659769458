"""Families of models on one GPU in bfloat16: trainer, transformers and SGLang.

python -m pytest -m gpu -s tests/engines/megatron/bridges/test_families_gpu.py

Models are random, with few layers, and heads and latents as large as those of the published models:
SGLang has kernels for these sizes only.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpipe.batch.columns import BatchColumns
from rlpipe.batch.packing import plan
from rlpipe.config.train import TrainConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.sync.transports.base import Push
from rlpipe.sync.transports.ipc import IpcTransport
from rlpipe.system.ports import free_port
from tests.engines.megatron import reference
from tests.engines.megatron.families import make
from tests.engines.megatron.ranks import engine
from tests.gpus import visible_gpus
from tests.sync.gpu import engine_on
from tests.sync.setups import transport_setup

pytestmark = pytest.mark.gpu

VOCABULARY = 512
MEAN_APART = 0.03
"""Bound on the mean difference of log-probs in nats. Rounding makes single ones differ more: in a
mixture of experts it changes the experts of a token."""
MOST_TOKENS = 2048
TRAIN = TrainConfig.model_validate(
    {
        "max_tokens_per_gpu": MOST_TOKENS,
        "optimizer": {"lr": 1e-3, "clip_grad": 1.0},
    }
)
_DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
_EXPERTS = {"moe_intermediate_size": 128}
_LATENT = {
    **_DENSE,
    **_EXPERTS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 128,
}
_GATED_DELTA = {
    **_DENSE,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SIZES: dict[str, dict[str, Any]] = {
    "qwen2": _DENSE | {"head_dim": 64},
    "mixtral": _DENSE | {"head_dim": 64},
    "minimax_m2": {
        **_DENSE,
        "intermediate_size": 256,
        "rotary_dim": 64,
    },
    "qwen3_next": {**_GATED_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 128},
    "qwen3.5": _GATED_DELTA,
    "gpt_oss": {
        **_DENSE,
        "head_dim": 64,
        "intermediate_size": 256,
        "sliding_window": 32,
        "swiglu_limit": 7.0,
    },
    "deepseek_v3": {**_LATENT, "n_routed_experts": 16},
    "glm4.5": {**_DENSE, **_EXPERTS},
    "glm5": {
        **_LATENT,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "q_lora_rank": 512,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
    },
}
"""Sizes on GPUs, by the name in `families`. A MiMo is a qwen2 here.

SGLang reads no head_dim of a Mixtral, and takes the limit of gpt-oss from config.json only.
"""


def sequences() -> list[list[int]]:
    """Return samples of 6 to 600 tokens."""
    random = np.random.default_rng(0)
    lengths = [6, 40, 133, 600, 64, 257, 90, 31]
    return [random.integers(2, VOCABULARY, length).tolist() for length in lengths]


def samples() -> BatchColumns:
    """Return the samples with prompts of one token and random advantages."""
    batch = BatchColumns.from_lists(
        [ids[:1] for ids in sequences()],
        [ids[1:] for ids in sequences()],
        loss_mask=[[1] * (len(ids) - 1) for ids in sequences()],
    )
    advantages = np.random.default_rng(1).normal(0, 1, len(batch))
    return batch.with_columns(
        rollout_log_probs=np.zeros(batch.num_response_tokens, np.float32),
        advantages=np.repeat(advantages, batch.response_lengths).astype(np.float32),
    )


def report(what: str, family: str, found: np.ndarray, expected: np.ndarray) -> float:
    """Print and return the mean difference of log-probs."""
    apart = np.abs(found - expected)
    print(f"{family}: {what}: mean {apart.mean():.1e}, at most {apart.max():.1e}")
    return float(apart.mean())


def served_scores(url: str) -> np.ndarray:
    """Return the engine's log-probs of all tokens but the first of each sample."""

    async def score() -> list[list[float]]:
        async with Engine(url) as server:
            return await server.score(sequences())

    return np.concatenate(asyncio.run(score())).astype(np.float32)


@pytest.mark.parametrize("family", SIZES)
def test_a_family_scores_like_transformers_trains_and_is_served(family, tmp_path: Path):
    directory = make(
        family, tmp_path / "model", changes=SIZES[family], dtype=torch.bfloat16, spread=0.05
    )
    ours = engine(directory, TRAIN, 0, 1, free_port(), dtype="bfloat16")
    try:
        ours.load_hf()
        batch = samples()
        first = ours.score(batch, temperature=1.0)
        expected = reference.score(reference.load(directory), batch, 1.0)
        assert report("trainer and transformers", family, first, expected) < MEAN_APART

        packing = plan(
            batch.lengths, global_batch_size=None, max_tokens=MOST_TOKENS, data_parallel=1
        )
        step = ours.train(batch.with_columns(proximal_log_probs=ours.score(batch)), packing)
        assert math.isfinite(step.steps[0]["loss"]) and 0 < step.steps[0]["grad_norm"] < math.inf
        trained = ours.score(batch, temperature=1.0)
        assert report("before and after a step", family, trained, first) > MEAN_APART

        transport = IpcTransport(transport_setup(directory, device=torch.device("cuda:0")))
        with engine_on(visible_gpus()[0], directory, tmp_path / "engine.log") as server:
            found = served_scores(server.url)
            assert report("engine and trainer", family, found, first) < MEAN_APART
            push = Push("b@1@x", [server.url], engine_ranks={server.url: [0]})
            transport.send(ours.named_hf_tensors(), push)
            found = served_scores(server.url)
            assert report("engine and trainer after a push", family, found, trained) < MEAN_APART
            transport.close()
    finally:
        ours.close()
