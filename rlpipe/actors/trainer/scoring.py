"""The advantage stage on a trainer rank: what every model says about the batch.

| column              | model                           | asked for by                             |
|---------------------|---------------------------------|------------------------------------------|
| proximal_log_probs  | the policy before the iteration | `advantage.score_proximal`               |
| routed_experts      | the same, in that pass          | `train.use_routing_replay`               |
|                     | the engine that sampled         | `train.use_rollout_routing_replay`       |
| reference_log_probs | the reference                   | `advantage.reference`                    |
| teacher_log_probs   | the teacher                     | `advantage.use_opd`                      |
|                     | none: samples bring them        | `teacher.opd_type: samples`              |
| values              | the critic before the iteration | `advantage.advantage_estimator: ppo`     |

With the engines' experts the policy's pass replays them too; reference, teacher and critic route
for themselves.

Not here: which samples are in the batch and what the estimator makes of it (`rlpipe.batch.build`).
"""

from __future__ import annotations

import asyncio

import numpy as np

from rlpipe.actors.trainer.spec import TrainerSpec
from rlpipe.algorithms.values import explained_variance
from rlpipe.batch.packing import BatchColumns
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import DeadlineExceeded

SEQUENCES_AT_ONCE = 64
"""Samples of one request to a teacher's server."""


def scored(engine: MegatronEngine, columns: BatchColumns, spec: TrainerSpec) -> BatchColumns:
    """The batch with the columns of all models in the ranks that the run asks. Collective; the same
    on every rank."""
    limit = spec.advantage.log_probs_max_tokens_per_gpu
    teacher = spec.teacher is not None and spec.teacher.opd_type == "megatron"
    proximal = experts = None
    if spec.train.use_rollout_routing_replay:
        experts = engine.routing_of_engines(columns)
        routed = columns.with_columns(routed_experts=experts)
        proximal = (
            engine.score(routed, max_tokens=limit, replay=True)
            if spec.advantage.score_proximal
            else None
        )
    elif spec.train.use_routing_replay:
        proximal, experts = engine.score_and_route(columns, max_tokens=limit)
    elif spec.advantage.score_proximal:
        proximal = engine.score(columns, max_tokens=limit)
    return columns.with_columns(
        proximal_log_probs=proximal,
        routed_experts=experts,
        reference_log_probs=engine.score(columns, model="reference", max_tokens=limit)
        if spec.advantage.reference
        else None,
        teacher_log_probs=engine.score(columns, model="teacher", max_tokens=limit)
        if teacher
        else columns.teacher_log_probs,
        values=engine.values(columns, max_tokens=limit) if spec.critic is not None else None,
    )


def with_server_s_scores(columns: BatchColumns, spec: TrainerSpec) -> BatchColumns:
    """The batch with the log-probs of a teacher that is a server, if the run has one. Not
    collective: one rank asks.

    Raises: EngineError, also if the server answers with other than one number per token;
    DeadlineExceeded.
    """
    teacher = spec.teacher
    if teacher is None or teacher.opd_type != "sglang":
        return columns
    assert teacher.url is not None
    sequences = [row.tolist() for row in np.split(columns.tokens, columns.offsets[1:-1])]
    scores = asyncio.run(_asked(teacher.url, sequences, teacher.timeout_s))
    parts = [row[prompt - 1 :] for row, prompt in zip(scores, columns.prompt_lengths, strict=True)]
    found = np.concatenate([np.asarray(part, np.float32) for part in parts])
    return columns.with_columns(teacher_log_probs=found)


async def _asked(url: str, sequences: list[list[int]], timeout_s: float) -> list[list[float]]:
    scores: list[list[float]] = []
    try:
        async with asyncio.timeout(timeout_s), Engine(url, deadline_s=timeout_s) as server:
            for start in range(0, len(sequences), SEQUENCES_AT_ONCE):
                scores += await server.score(sequences[start : start + SEQUENCES_AT_ONCE])
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):
            raise
        raise DeadlineExceeded(
            "the teacher did not score the batch in time",
            where=f"teacher.url={url}",
            found=f"{len(scores)} of {len(sequences)} samples",
            expected=f"all within {timeout_s:g} s (teacher.timeout_s)",
        ) from error
    return scores


def critic_metrics(columns: BatchColumns) -> dict[str, float]:
    """Means of values and returns over tokens that count, and how much of the returns the critic
    explains; empty without one."""
    if columns.values is None or columns.returns is None:
        return {}
    counted = columns.loss_mask > 0
    return {
        "rollout/values": float(columns.values[counted].mean()) if counted.any() else 0.0,
        "rollout/returns": float(columns.returns[counted].mean()) if counted.any() else 0.0,
        "rollout/explained_variance": explained_variance(
            columns.values, columns.returns, columns.loss_mask
        ),
    }
