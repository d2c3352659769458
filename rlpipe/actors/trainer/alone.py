"""A trainer of its own for a moment: without engines, under no run's name, gone at the end of the
block.

For what is done to a branch from outside: training it again to see that it is what it says, or
rebuilding weights that another branch starts from. Not here: the trainer of a run (`cluster`).
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray

from rlpipe.actors.ray.local_ray import connect, have_gpus
from rlpipe.actors.ray.placement import Placement
from rlpipe.actors.trainer.group import STATUS, TrainerGroup
from rlpipe.actors.trainer.spec import TrainerSpec
from rlpipe.config.run import RunConfig
from rlpipe.model_dir import model_directory
from rlpipe.store.objects.files import Files


@contextlib.asynccontextmanager
async def lone_trainer(
    config: RunConfig, files: Files, *, home: Path, name: str, options: dict[str, Any] | None = None
) -> AsyncIterator[TrainerGroup]:
    """The ranks that a run's configuration asks for, set up for it. `name`: of its namespace.
    `options`: more for Ray.

    Raises: ResourceError if the cluster has no room for them; whatever keeps a rank from coming up.
    """
    from rlpipe.actors.trainer.ranks import (
        RankActor,
    )  # Megatron takes seconds, which a flow that restores nothing need not wait

    connect(config.resources, home, namespace=f"rlpipe-{name}")
    await have_gpus(config.resources, who=f"{name}, of run {config.run}", engines=False)
    model_dir = await asyncio.to_thread(model_directory, config.model, home, seed=config.seed)
    placement = Placement(None, config.resources)
    await asyncio.to_thread(lambda: placement.claim(engines=False))
    make: Any = ray.remote
    with tempfile.TemporaryDirectory(
        prefix=".trainer-", dir=home, ignore_cleanup_errors=True
    ) as work_dir:

        def start(rank: int) -> Any:
            placed = {**placement.trainer(rank), **(options or {})}
            actor = RankActor.of(rank, config.resources, str(Path.cwd()))
            return (
                make(concurrency_groups={STATUS: 1})(actor.kind)
                .options(**placed)
                .remote(*actor.arguments)
            )

        group: TrainerGroup | None = None
        try:
            group = TrainerGroup.of(start, config.resources)
            await group.setup(
                TrainerSpec.of(
                    config, model_dir=model_dir, store_root=files.root, work_dir=Path(work_dir)
                )
            )
            yield group
        finally:
            if group is not None:
                group.kill()
            placement.remove()
