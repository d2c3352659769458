"""torch's profiler around the work of a trainer rank, and its CUDA memory's history, for the
iterations and ranks of `observe`.

Files: `<work_dir>/profile/<what>-<iteration>-rank<rank>.json.gz` and
`memory-<what>-<iteration>-rank<rank>.pickle`, written once each; the same again replaces it. They
change no result, only the time it takes. Not here: engines, which have a profiler of their own
(`/start_profile`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import profile

from rlpipe.config.observe import ObserveConfig
from rlpipe.errors import ConfigError

Part = Literal["train_actor", "train_log_probs"]
OVERALL = "train_overall"
MEMORY_EVENTS = 100_000
"""Allocations and releases that are kept of a block, the last ones."""


@contextlib.contextmanager
def profiled(
    observe: ObserveConfig, part: Part, *, iteration: int, rank: int, work_dir: str
) -> Iterator[None]:
    """Record the block, if it is wanted: shapes, memory, and kernels where there is CUDA. After an
    error no trace is written."""
    within = (
        observe.profile_step_start <= iteration < observe.profile_step_end
        and rank in observe.profile_ranks
    )
    named = f"{part}-{iteration:07d}-rank{rank}"
    folder = Path(work_dir) / "profile"
    wanted = within and bool({part, OVERALL}.intersection(observe.profile_target))
    with contextlib.ExitStack() as stack:
        if within and observe.record_memory_history and (wanted or not observe.profile_target):
            stack.enter_context(_memory_history(folder / f"memory-{named}.pickle"))
        recorded = (
            stack.enter_context(profile(record_shapes=True, profile_memory=True))
            if wanted
            else None
        )
        yield
    if recorded is not None:
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(folder / f"{named}.json.gz"))


def check(observe: ObserveConfig) -> None:
    """Raises: ConfigError if CUDA memory is to be recorded and this process has none."""
    if observe.record_memory_history and not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA memory to record",
            where="observe.record_memory_history",
            found=f"torch {torch.__version__} on the CPU",
            do="leave it out: observe.profile_target records the CPU's memory",
        )


@contextlib.contextmanager
def _memory_history(file: Path) -> Iterator[None]:
    """Record the block's allocations to a file, whether it ends well or not."""
    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)
