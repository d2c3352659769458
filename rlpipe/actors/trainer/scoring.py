"""Score the batch of the advantage stage with every configured model.

| column              | model                           | configured by                            |
|---------------------|---------------------------------|------------------------------------------|
| proximal_log_probs  | the policy before the iteration | `advantage.score_proximal`, or where one |
|                     |                                 | optimizer step does not compute them     |
| routed_experts      | the same, in that pass          | `train.use_routing_replay`               |
|                     | the engine that sampled         | `train.use_rollout_routing_replay`       |
| reference_log_probs | the reference                   | `advantage.reference`                    |
| teacher_log_probs   | the teacher                     | `advantage.use_opd`                      |
|                     | none: samples contain them      | `teacher.opd_type: samples`              |
| values              | the critic before the iteration | `advantage.advantage_estimator: ppo`     |

With the engines' experts, the policy's pass replays their routing too. Reference, teacher and
critic compute their own routing.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from rlpipe.actors.trainer.profiling import Work
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.algorithms.values import explained_variance
from rlpipe.batch.build import ChosenRows, fix_batch
from rlpipe.batch.columns import BatchColumns, BatchSizes
from rlpipe.batch.files import read_rewards
from rlpipe.batch.rows import RolloutRows
from rlpipe.data.image_reader import StoredPixels, load_image_reader
from rlpipe.engines.megatron import platform
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.engines.sglang.admin import Engine
from rlpipe.errors import DeadlineExceeded
from rlpipe.observe.flops import ModelFlops, model_flops, speed_metrics
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.system.gpus import gpu_metrics
from rlpipe.types import Stage

SEQUENCES_AT_ONCE = 64
"""Samples per request to a teacher's server."""
NO_LOGITS = np.zeros(0, np.int64)
"""Response lengths of a model whose output layer is not used."""


def choose_rows(
    files: Files,
    spec: TrainerSpec,
    *,
    version: int,
    rollout: str,
    reward: str,
    max_staleness: int = 0,
    mask_stale: bool = False,
) -> ChosenRows:
    """Return the rows of the batch, without their tokens. Reads all shards of the rollout.

    `rollout`, `reward`: digests of the nodes. Other arguments and errors: as `fix_batch`.
    """
    nodes = Nodes(files)
    rollout_node = nodes.get(Stage.ROLLOUT, rollout)
    routed = spec.train.use_rollout_routing_replay
    return fix_batch(
        RolloutRows.of_node(files, rollout_node, routed=routed),
        read_rewards(files, nodes.get(Stage.REWARD, reward)),
        accepted=rollout_node.outputs["accepted"],
        scored=spec.advantage.advantage_estimator != "none",
        version=version,
        max_staleness=max_staleness,
        mask_stale=mask_stale,
        routed=routed,
        own_teacher=spec.teacher is not None and spec.teacher.opd_type == "samples",
    )


def score_batch(
    engine: MegatronEngine, columns: BatchColumns, spec: TrainerSpec, *, proximal: bool
) -> dict[str, np.ndarray | None]:
    """Return the columns of all models that the trainer ranks hold, by name.

    `columns`: at least the samples that this rank scores. `proximal`: with the policy's log-probs.
    Collective. The columns are of the whole batch and equal on every rank, but for experts that
    the engines chose: those are of `columns`.
    """
    limit = spec.advantage.log_probs_max_tokens_per_gpu
    scores = None
    experts = None
    reference = None
    if spec.train.use_rollout_routing_replay:
        experts = engine.routing_of_engines(columns)
        if proximal:
            routed = columns.with_columns(routed_experts=experts)
            scores = engine.score(routed, max_tokens=limit, replay=True)
    elif spec.train.use_routing_replay:
        scores, experts = engine.score_and_route(columns, max_tokens=limit)
    elif proximal and spec.advantage.reference:
        scores, reference = engine.score_with_reference(columns, max_tokens=limit)
    elif proximal:
        scores = engine.score(columns, max_tokens=limit)
    if spec.advantage.reference and reference is None:
        reference = engine.score(columns, model="reference", max_tokens=limit)
    teacher = columns.teacher_log_probs
    if spec.teacher is not None and spec.teacher.opd_type == "megatron":
        teacher = engine.score(columns, model="teacher", max_tokens=limit)
    values = engine.values(columns, max_tokens=limit) if spec.critic is not None else None
    return {
        "proximal_log_probs": scores,
        "routed_experts": experts,
        "reference_log_probs": reference,
        "teacher_log_probs": teacher,
        "values": values,
    }


def scoring_metrics(
    spec: TrainerSpec, sizes: BatchSizes, work: Work, *, proximal: bool
) -> dict[str, float]:
    """Return TFLOP/s, MFU and GPU use of `score_batch`; {} if no model scored.

    `sizes`: of the whole batch. `proximal`: as `score_batch`.
    """
    policy = int(proximal or _routes_itself(spec)) + int(spec.advantage.reference)
    passes = [model_flops(spec.model_dir)] * policy
    if spec.teacher is not None and spec.teacher.opd_type == "megatron":
        passes.append(model_flops(str(spec.teacher.opd_teacher_load)))
    known = [model for model in passes if model is not None]
    flops = sum(model.forward(sizes.lengths, sizes.response_lengths) for model in known)
    if spec.critic is not None and not spec.critic_ranks:
        critic = critic_flops(spec)
        passes.append(critic)
        flops += critic.forward(sizes.lengths, NO_LOGITS) if critic is not None else 0.0
    if not passes or None in passes:
        return {}
    speed = speed_metrics(
        "scoring",
        flops,
        work.seconds,
        devices=spec.world_size,
        gpu=gpu_name(),
        fp8=trains_fp8(spec),
    )
    return speed | gpu_metrics("scoring", work.readings)


def critic_flops(spec: TrainerSpec) -> ModelFlops | None:
    """Return the FLOPs of the critic, whose value head does not count."""
    assert spec.critic is not None, "a run without a critic"
    return model_flops(spec.critic.hf_checkpoint or spec.model_dir)


def gpu_name() -> str | None:
    """Return the name of this rank's GPU; None on a CPU."""
    return torch.cuda.get_device_name() if platform.CUDA_FOUND else None


def trains_fp8(spec: TrainerSpec) -> bool:
    """True if Megatron multiplies in FP8."""
    return bool(spec.train.megatron.get("fp8"))


def _routes_itself(spec: TrainerSpec) -> bool:
    return spec.train.use_routing_replay and not spec.train.use_rollout_routing_replay


def never_scores(spec: TrainerSpec) -> bool:
    """True if `score_batch` needs no pass of any model, whatever the batch is."""
    train = spec.train
    one_step = train.num_steps_per_rollout == 1 or (
        train.num_steps_per_rollout is None and train.global_batch_size is None
    )
    passes = (
        spec.score_proximal or (spec.score_proximal is None and not one_step),
        train.use_routing_replay or train.use_rollout_routing_replay,
        spec.advantage.reference,
        spec.teacher is not None and spec.teacher.opd_type == "megatron",
        spec.critic is not None,
    )
    return not any(passes)


def with_pixels(columns: BatchColumns, files: Files, spec: TrainerSpec) -> BatchColumns:
    """Return a batch that reads the pixels of its images from the store, when they are used."""
    if columns.images is None:
        return columns
    pixels = _stored_pixels(files.root, spec.model_dir)
    pixels.add([image for row in columns.images.references() for image in row])
    return columns.with_columns(images=replace(columns.images, pixels=pixels))


def without_sampled_placeholders(columns: BatchColumns, spec: TrainerSpec) -> BatchColumns:
    """Return samples whose responses end before a placeholder that the policy sampled.

    SGLang 0.5.21 ends if a sequence has more placeholders than its images have tokens.
    """
    if columns.images is None:
        return columns
    reader = load_image_reader(spec.model_dir)
    assert reader is not None, "images for a model of text"
    return columns.cut_before(reader.image_token)


@lru_cache(maxsize=1)
def _stored_pixels(store: str, model_dir: str) -> StoredPixels:
    """Return the pixels of this process. Scoring and training share what is in its cache."""
    reader = load_image_reader(model_dir)
    assert reader is not None, "images for a model of text"
    return StoredPixels(Files(store), reader)


def with_teacher_server_scores(columns: BatchColumns, spec: TrainerSpec) -> BatchColumns:
    """Return the batch with log-probs of the teacher's server, if the run has one.

    Not collective: one rank sends the requests. Raises: EngineError, also if the server does not
    return one number per token; DeadlineExceeded.
    """
    teacher = spec.teacher
    if teacher is None or teacher.opd_type != "sglang":
        return columns
    assert teacher.url is not None
    sequences = [row.tolist() for row in np.split(columns.tokens, columns.offsets[1:-1])]
    scores = asyncio.run(_request_scores(teacher.url, sequences, teacher.timeout_s))
    # The score at position i is of token i + 1, so the response begins at prompt - 1.
    responses = [
        row[prompt - 1 :] for row, prompt in zip(scores, columns.prompt_lengths, strict=True)
    ]
    log_probs = np.concatenate([np.asarray(row, np.float32) for row in responses])
    return columns.with_columns(teacher_log_probs=log_probs)


async def _request_scores(
    url: str, sequences: list[list[int]], timeout_s: float
) -> list[list[float]]:
    scores: list[list[float]] = []
    try:
        async with asyncio.timeout(timeout_s), Engine(url, deadline_s=timeout_s) as server:
            for start in range(0, len(sequences), SEQUENCES_AT_ONCE):
                scores += await server.score(sequences[start : start + SEQUENCES_AT_ONCE])
    except TimeoutError as error:
        if isinstance(error, DeadlineExceeded):
            raise
        raise DeadlineExceeded(
            "the teacher's server did not score the batch in time",
            where=f"teacher.url={url}",
            found=f"{len(scores)} of {len(sequences)} samples",
            expected=f"all within {timeout_s:g} s (teacher.timeout_s)",
        ) from error
    return scores


def critic_metrics(columns: BatchColumns) -> dict[str, float]:
    """Return metrics of values and returns over unmasked tokens; {} without a critic."""
    if columns.values is None or columns.returns is None:
        return {}
    unmasked = columns.loss_mask > 0
    return {
        "rollout/values": float(columns.values[unmasked].mean()) if unmasked.any() else 0.0,
        "rollout/returns": float(columns.returns[unmasked].mean()) if unmasked.any() else 0.0,
        "rollout/explained_variance": explained_variance(
            columns.values, columns.returns, columns.loss_mask
        ),
    }
