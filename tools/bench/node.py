"""`node`: everything that all GPUs of a node do together, in one go.

    layouts     the part of that name, with a dense model and with experts
    colocated   whole iterations: a rank on every GPU, engines of two GPUs on the same ones
    separate    whole iterations: half of the GPUs for ranks, half for engines; sampling ahead by
                one iteration, batches of the groups that finish first
    push        bytes of all weights / seconds of the sync stage of these runs

Every table is printed as soon as its part is done, and a part that fails does not end the others.
The dense models are Qwen3-4B's shape, and Qwen3-8B's for whole iterations on 8 GPUs; the experts
are six layers of Qwen3-30B-A3B. Kills on all GPUs: `make chaos ARGS="--ranks 4 --engines 2"`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlpipe.errors import ResourceError, RlpipeError
from tools.bench import iterations, layouts
from tools.bench.bench import Bench, open_bench
from tools.bench.measures import Row, table

ENGINE_GPUS = 2
LARGE_NODE = 8
"""GPUs from which on whole iterations are those of an 8B model."""


def shapes(*, on_gpus: bool, gpus: int) -> tuple[str, str, str]:
    """Return the dense model, the one with experts, and the one of whole iterations."""
    if not on_gpus:
        return "tiny", "tiny-moe", "tiny"
    return "4b", "moe", "8b" if gpus >= LARGE_NODE else "4b"


def colocated(gpus: int) -> list[str]:
    """Return overrides: ranks and engines on all GPUs."""
    return [
        f"resources.actor_num_gpus_per_node={gpus}",
        "resources.colocate=true",
        *_engines(gpus),
    ]


def separate(gpus: int) -> list[str]:
    """Return overrides: ranks on half of the GPUs, engines on the rest, one iteration ahead."""
    return [
        f"resources.actor_num_gpus_per_node={gpus // 2}",
        "resources.colocate=false",
        "async_buffer_size=1",
        "rollout.selection=first_finished",
        *_engines(gpus // 2),
    ]


def _engines(gpus: int) -> list[str]:
    per_engine = min(ENGINE_GPUS, gpus) if torch.cuda.is_available() else 1
    return [
        f"resources.rollout_num_gpus={gpus}",
        f"resources.rollout_num_gpus_per_engine={per_engine}",
        "train.use_distributed_optimizer=true",
    ]


def measure(
    home: Path, overrides: Sequence[str], *, seconds: float, gpus: int | None = None
) -> list[Row]:
    """Return the rows of all parts that did not fail.

    `overrides` hold for all parts; `seconds` is the measuring time of each run. `gpus`: None is all
    of this machine.

    Raises: ConfigError; ResourceError for fewer than two GPUs.
    """
    on_gpus = torch.cuda.is_available()
    gpus = gpus or (torch.cuda.device_count() if on_gpus else layouts.CPU_RANKS)
    if gpus < ENGINE_GPUS:
        raise ResourceError(
            "too few GPUs for a node", where="bench node", found=gpus, expected="2 or more"
        )
    dense, experts, whole = shapes(on_gpus=on_gpus, gpus=gpus)

    def opened(name: str, more: Sequence[str] = ()) -> Bench:
        return open_bench(home, name, [*more, *overrides], seconds=seconds, repeats=1)

    def whole_iterations(name: str, more: Sequence[str]) -> list[Row]:
        bench = opened(whole, more)
        return of_run(bench, name, iterations.measure(bench))

    parts: dict[str, Callable[[], list[Row]]] = {
        f"layouts {dense}": lambda: layouts.measure(opened(dense), show=show),
        f"layouts {experts}": lambda: layouts.measure(opened(experts), show=show),
        f"colocated {whole}": lambda: whole_iterations("colocated", colocated(gpus)),
        f"separate {whole}": lambda: whole_iterations("separate", separate(gpus)),
    }
    rows: list[Row] = []
    for name, part in parts.items():
        try:
            found = part()
        except RlpipeError as error:
            print(f"bench node: {name} failed: {error.kind}: {error}", file=sys.stderr, flush=True)
            found = [Row("node", name, "", (), note=f"failed: {error.kind}")]
        if not name.startswith("layouts"):
            show(found)
        rows += found
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print rows as a table at once."""
    print(table(rows), file=sys.stderr, flush=True)


def of_run(bench: Bench, name: str, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a run under its name, with samples/s and the rate of its pushes."""
    found = [replace(row, part=name) for row in rows]
    rollout = bench.config.rollout
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    by_name = {row.what: row.ours for row in rows}
    found.append(
        Row(name, "samples", "/s", tuple(samples / spent for spent in by_name["iteration"]))
    )
    if pushes := by_name.get("sync"):
        size = (
            2 * bench.shape.parameters if torch.cuda.is_available() else 4 * bench.shape.parameters
        )
        rates = tuple(size / 1e9 / spent for spent in pushes)
        found.append(
            Row(name, "push", "GB/s", rates, note=f"{size / 1e9:.3g} GB, whole sync stage")
        )
    return found
