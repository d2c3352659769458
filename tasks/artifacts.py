"""Prefect artifacts of a run: configuration, iteration table, machine facts, curves, overview."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from httpx import HTTPStatusError
from prefect.artifacts import (
    acreate_image_artifact,
    acreate_markdown_artifact,
    acreate_table_artifact,
)
from prefect.client.orchestration import get_client

from rlpipe.config.load import dump
from rlpipe.config.run import RunConfig
from rlpipe.types import NodeRef, Stage

STAGE_METRICS = {
    "rollout": {
        "tokens": "perf/rollout_tokens",
        "tokens/s": "perf/rollout_tokens_per_s",
        "cut off": "rollout/truncated_ratio",
        "TFLOP/s": "perf/rollout_tflops",
        "MFU": "perf/rollout_mfu",
        "GPU": "perf/rollout_gpu_utilization",
        "GPU bytes": "perf/rollout_gpu_used_bytes",
        "cache hits": "engine/prefix_cache_hit_rate",
        "KV cache": "engine/kv_cache_usage",
        "running": "engine/running_requests",
        "queued": "engine/queued_requests",
        "accepted": "engine/spec_accept_length",
    },
    "reward": {
        "mean": "rollout/raw_reward",
        "errors": "rollout/reward_error_ratio",
        "prompts solved never": "rollout/pass_rate/0",
        "sometimes": "rollout/pass_rate/between",
        "always": "rollout/pass_rate/100",
    },
    "advantage": {
        "engine - trainer": "rollout/logprob_abs_diff/max",
        "length": "rollout/response_len/mean",
        "p50": "rollout/response_len/p50",
        "p90": "rollout/response_len/p90",
        "p99": "rollout/response_len/p99",
        "max": "rollout/response_len/max",
        "repetition": "rollout/repetition_ratio",
        "TFLOP/s": "perf/scoring_tflops",
        "MFU": "perf/scoring_mfu",
    },
    "train": {
        "loss": "train/loss",
        "grad norm": "train/grad_norm",
        "entropy": "train/entropy",
        "TFLOP/s": "perf/train_tflops",
        "MFU": "perf/train_mfu",
        "GPU": "perf/train_gpu_utilization",
        "GPU bytes": "perf/train_gpu_used_bytes",
    },
    "sync": {"engine - trainer": "sync/logprob_difference", "bytes": "sync/bytes"},
}
"""Stage → label → metric, in the table of an iteration."""
TRAINER_FACTS = ("device", "torch", "cuda", "megatron", "attention", "fused")
ENGINE_FACTS = ("device", "sglang", "attention", "mem_fraction_static")


def artifact_key(run: str, name: str) -> str:
    """Return the key of an artifact of a run. Prefect allows lower case, digits and dashes."""
    return f"{run}-{name}".lower().replace("_", "-").replace(".", "-")


async def configuration_artifact(
    config: RunConfig, recipe: str, overrides: Sequence[str], warnings: Sequence[str] = ()
) -> None:
    """Create the artifact of a resolved configuration; each start of the run adds a version.

    Shows recipe and overrides, then keys without effect (`warnings`), then every key.
    """
    requested = "\n".join(["recipe: " + recipe, *overrides])
    unused = (
        "## Keys without effect\n\n" + "".join(f"- {warning}\n" for warning in warnings) + "\n"
        if warnings
        else ""
    )
    text = f"# {config.run}\n\n```\n{requested}\n```\n\n{unused}```yaml\n{dump(config)}```\n"
    await acreate_markdown_artifact(
        text,
        key=artifact_key(config.run, "configuration"),
        description="the resolved configuration",
    )


async def iteration_artifact(
    run: str, k: int, nodes: dict[str, NodeRef], metrics: dict[str, float], head: str | None = None
) -> None:
    """Create the table of an iteration: node, seconds and figures of each stage.

    `head`: sha256 of the commit. It fixes the whole history below the commit.
    """
    rows = [
        {
            "stage": name,
            "seconds": round(node.outputs.get("seconds", 0.0), 3),
            "reused": node.reused,
            "figures": stage_figures(name, metrics),
            "node": node.digest[:16],
        }
        for name, node in nodes.items()
    ]
    reward = metrics.get("rollout/raw_reward")
    description = f"iteration {k}" + (f", mean reward {reward:.3f}" if reward is not None else "")
    description += f"; commit sha256 {head}" if head is not None else ""
    await acreate_table_artifact(rows, key=artifact_key(run, "iteration"), description=description)


def stage_figures(stage: str, metrics: dict[str, float]) -> str:
    """Return the main metrics of one stage as text."""
    return ", ".join(
        f"{label} {metrics[metric]:.4g}"
        for label, metric in STAGE_METRICS.get(stage, {}).items()
        if metric in metrics
    )


def machines_of(outputs: Mapping[Stage, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the machine facts in the nodes of an iteration: name → fact → value.

    Names are `trainer` and `engines`, or `engines 0`, `engines 1` ... if engines differ.
    """
    trainer = outputs.get(Stage.TRAIN, {}).get("machine")
    engines = outputs.get(Stage.SYNC, {}).get("machines", [])
    names = (
        ["engines"]
        if len(engines) == 1
        else [f"engines {number}" for number in range(len(engines))]
    )
    return ({"trainer": trainer} if trainer else {}) | dict(zip(names, engines, strict=True))


def machines_line(machines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the main facts of trainer and engines in one line."""
    parts = []
    for name, machine in machines.items():
        facts = TRAINER_FACTS if name == "trainer" else ENGINE_FACTS
        values = [f"{fact} {machine[fact]}" for fact in facts if machine.get(fact) is not None]
        parts.append(f"{name}: {', '.join(values)}")
    return "; ".join(parts)


async def machine_artifact(run: str, machines: Mapping[str, Mapping[str, Any]]) -> None:
    """Create the table of devices, versions and kernels that a run uses."""
    rows = [
        {"of": name, "what": fact, "value": str(value)}
        for name, machine in machines.items()
        for fact, value in machine.items()
    ]
    await acreate_table_artifact(
        rows,
        key=artifact_key(run, "machine"),
        description="devices, versions and kernels of this run",
    )


class UpdatedArtifact:
    """An artifact that this process creates once and then updates.

    Prefect keeps every created artifact forever, so a new one for each report would pile up.
    """

    def __init__(self) -> None:
        self._id: UUID | None = None

    async def update(self, data: str, create: Callable[[str], Awaitable[UUID]]) -> None:
        """Write `data` into the artifact. Create the artifact if it is missing or was deleted."""
        if self._id is None or not await _write(self._id, data):
            self._id = await create(data)


async def _write(artifact: UUID, data: str) -> bool:
    """Overwrite an artifact. Return False if the artifact does not exist."""
    async with get_client() as client:
        try:
            # Not `update_artifact`: that also stores the whole data in an event.
            await client.request(
                "PATCH", "/artifacts/{id}", path_params={"id": artifact}, json={"data": data}
            )
        except HTTPStatusError as error:
            if error.response.status_code != 404:
                raise
            return False
    return True


async def curve_artifact(artifact: UpdatedArtifact, run: str, picture: Path) -> None:
    """Update the image of the curves. The artifact contains the picture itself."""
    data = base64.b64encode(await asyncio.to_thread(picture.read_bytes)).decode()
    key = artifact_key(run, "curve")
    await artifact.update(
        f"data:image/png;base64,{data}",
        lambda url: acreate_image_artifact(
            url, key=key, description=f"reward and accuracy of {run}"
        ),
    )


async def overview_artifact(artifact: UpdatedArtifact, run: str, page: str) -> None:
    """Update the overview page: learning progress, health, time per stage."""
    key = artifact_key(run, "overview")
    await artifact.update(
        page,
        lambda markdown: acreate_markdown_artifact(
            markdown, key=key, description=f"{run} at a glance"
        ),
    )
