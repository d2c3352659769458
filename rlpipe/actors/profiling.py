"""torch's profiler around the work of a trainer rank, for the iterations and ranks that `observe` names.

Files: `<work_dir>/profile/<what>-<iteration>-rank<rank>.json.gz`, written once each; the same again replaces it. It changes no
result, only the time it takes. Not here: engines, which have a profiler of their own (`/start_profile`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from torch.profiler import profile

from rlpipe.config.run import ObserveConfig

Part = Literal["train_actor", "train_log_probs"]
OVERALL = "train_overall"


@contextlib.contextmanager
def profiled(observe: ObserveConfig, part: Part, *, iteration: int, rank: int, work_dir: str) -> Iterator[None]:
    """Record the block, if it is wanted: shapes, memory, and kernels where there is CUDA. After an error nothing is written."""
    wanted = {part, OVERALL}.intersection(observe.profile_target)
    within = observe.profile_step_start <= iteration < observe.profile_step_end
    if not wanted or not within or rank not in observe.profile_ranks:
        yield
        return
    with profile(record_shapes=True, profile_memory=True) as recorded:
        yield
    folder = Path(work_dir) / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(folder / f"{part}-{iteration:07d}-rank{rank}.json.gz"))
