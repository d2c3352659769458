"""A temporary trainer without engines, outside any run.

It replays a branch for an audit (`replay`), and rebuilds the weights that another branch starts
from (`tasks.fork`).
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray

from rlpipe.actors.ray.local_ray import claim_gpus, connect
from rlpipe.actors.ray.placement import Placement
from rlpipe.actors.trainer.group import STATUS, TrainerGroup
from rlpipe.actors.trainer.rank_class import rank_actor
from rlpipe.actors.trainer.trainer_spec import TrainerSpec
from rlpipe.config.run import RunConfig
from rlpipe.model_dir import model_directory
from rlpipe.store.objects.files import Files


@contextlib.asynccontextmanager
async def standalone_trainer(
    config: RunConfig, files: Files, *, home: Path, name: str, options: dict[str, Any] | None = None
) -> AsyncIterator[TrainerGroup]:
    """Yield the trainer ranks of a run's configuration, set up; kill them at the end of the block.

    `name`: of the Ray namespace. `options`: further Ray options of the ranks. Raises: ResourceError
    if the cluster has no room; errors of the set-up.
    """
    connect(config.resources, home, namespace=f"rlpipe-{name}")
    await claim_gpus(config.resources, owner=f"{name}, of run {config.run}", engines=False)
    model_dir = await asyncio.to_thread(model_directory, config.model, home, seed=config.seed)
    # without a cluster name: the groups end with this process
    placement = Placement(None, config.resources)
    await asyncio.to_thread(lambda: placement.reserve(engines=0))
    make: Any = ray.remote
    with tempfile.TemporaryDirectory(
        prefix=".trainer-", dir=home, ignore_cleanup_errors=True
    ) as work_dir:

        def start(rank: int) -> Any:
            actor_class, arguments = rank_actor(rank, config.resources, str(Path.cwd()))
            ray_options = {**placement.trainer(rank), **(options or {})}
            remote = make(concurrency_groups={STATUS: 1})(actor_class)
            return remote.options(**ray_options).remote(*arguments)

        spec = TrainerSpec.of(
            config, model_dir=model_dir, store_root=files.root, work_dir=Path(work_dir)
        )
        group: TrainerGroup | None = None
        try:
            group = TrainerGroup.of(start, config.resources)
            await group.setup(spec)
            yield group
        finally:
            if group is not None:
                group.kill()
            placement.remove()
