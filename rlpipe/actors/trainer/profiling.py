"""Measure and profile trainer ranks: seconds, GPU use, torch's profiler, history of CUDA memory.

The `observe` section selects iterations, ranks and parts of the work. Files are
`<work_dir>/profile/<part>-<iteration>-rank<rank>.json.gz` and
`memory-<part>-<iteration>-rank<rank>.pickle`; a repeated iteration replaces them. Profiling changes
no result, only the time. Engines have their own profiler (`/start_profile`).

Entry points: `profiled`, `check_profiling`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import profile

from rlpipe.config.observe import ObserveConfig
from rlpipe.errors import ConfigError
from rlpipe.system.gpus import GpuReader, GpuReading, GpuWatch

ProfiledPart = Literal["train_actor", "train_log_probs"]
OVERALL = "train_overall"
MEMORY_EVENTS = 100_000
"""Allocations and releases kept per block; older ones are lost."""


@dataclass(slots=True)
class Work:
    """Seconds of a block, and readings of the first rank's GPU meanwhile."""

    seconds: float = 0.0
    readings: list[GpuReading] = field(default_factory=list)


@contextlib.contextmanager
def profiled(
    observe: ObserveConfig, part: ProfiledPart, *, iteration: int, rank: int, work_dir: str
) -> Iterator[Work]:
    """Record the block if `observe` selects it: shapes, memory, and kernels on CUDA.

    Yields the work of the block, which is complete at its end. After an error no trace is written.
    """
    selected = (
        observe.profile_step_start <= iteration < observe.profile_step_end
        and rank in observe.profile_ranks
    )
    name = f"{part}-{iteration:07d}-rank{rank}"
    folder = Path(work_dir) / "profile"
    traced = selected and bool({part, OVERALL}.intersection(observe.profile_target))
    with contextlib.ExitStack() as stack:
        # Without a target, the memory of every part is recorded.
        if selected and observe.record_memory_history and (traced or not observe.profile_target):
            stack.enter_context(_memory_history(folder / f"memory-{name}.pickle"))
        trace = None
        if traced:
            trace = stack.enter_context(profile(record_shapes=True, profile_memory=True))
        # The metrics are those of the first rank.
        watch = stack.enter_context(GpuWatch(_own_gpu())) if rank == 0 else None
        work = Work()
        start_s = time.perf_counter()
        yield work
        work.seconds = time.perf_counter() - start_s
    if watch is not None:
        work.readings += watch.readings
    if trace is not None:
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"{name}.json.gz"))


@lru_cache
def _own_gpu() -> GpuReader:
    """Return the reader of this rank's GPU; on a CPU it reads nothing."""
    if not torch.cuda.is_available():
        return GpuReader([])
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return GpuReader([f"GPU-{uuid}"])


def check_profiling(observe: ObserveConfig) -> None:
    """Raises: ConfigError if CUDA memory is to be recorded and this process has no CUDA."""
    if observe.record_memory_history and not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA memory to record",
            where="observe.record_memory_history",
            found=f"torch {torch.__version__} on the CPU",
            do="remove the setting: observe.profile_target records the CPU's memory",
        )


@contextlib.contextmanager
def _memory_history(file: Path) -> Iterator[None]:
    """Record the block's allocations to a file, also if the block raises."""
    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)
