"""torch_dist checkpoints in Megatron's layout, which any parallel layout can read again.

    <directory>/iter_0000012/…                      weights, optimizer, schedule, random state; those of a critic as `critic.…`;
                                                    the architecture's arguments, the small files of
                                                    the model's directory
    <directory>/release/…                           weights that no training made (`conversion`), in place of iterations
    <directory>/latest_checkpointed_iteration.txt   "12"
    <directory>/critic/iter_0000012/…               a critic that has ranks of its own, which write it

What was written in one of the two ways can be read in the other. A checkpoint is written under
another name and renamed when it is complete; what stood there before is replaced. Not here:
uploading, and which checkpoint counts (the store).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from rlpipe.engines.megatron import randomness
from rlpipe.errors import StoreFull, TrainerError

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.transformer.module import param_is_not_shared

from rlpipe.engines.megatron.checkpoint.conversion.hf_files import CARRIED, pack
from rlpipe.engines.megatron.checkpoint.conversion.places import RELEASE
from rlpipe.engines.megatron.checkpoint.conversion.skeleton import arguments
from rlpipe.engines.megatron.checkpoint.state import inner_optimizers
from rlpipe.engines.megatron.model.build import Trained

LATEST = "latest_checkpointed_iteration.txt"
CRITIC = "critic"
"""Key of a critic's part in the state, prefix of its tensors' names, and in the description whether
there is one; also the folder of a critic that has ranks of its own."""
SPARE, SPARE_BYTES = 1.1, 16 * 1024**2
"""Room to have beside the state itself."""


@dataclass(slots=True, frozen=True)
class Room:
    """What a checkpoint needs on the local disk, and what is free there."""

    needed_bytes: int
    free_bytes: int

    def beside(self, other: Room) -> Room:
        """For two that are written at once: as if both went to the disk that has less."""
        return Room(self.needed_bytes + other.needed_bytes, min(self.free_bytes, other.free_bytes))


def save(
    trained: Trained,
    directory: str | Path,
    iteration: int,
    critic: Trained | None = None,
    *,
    model_dir: str | Path | None = None,
    together: Callable[[Room], Room] = lambda room: room,
) -> Path:
    """Write one checkpoint and return its folder. Collective; complete on disk when it returns on
    every rank.

    `model_dir`: the model's Hugging Face directory, whose small files go with it, so that it can be
    turned back without it. `together`: what this one and all that are written at the same time
    need, of what this one needs. Raises: StoreFull, on every rank and before anything is written,
    if one has no room; TrainerError if a rank could not write.
    """
    folder = _folder(directory, iteration)
    require_room([trained] if critic is None else [trained, critic], folder, together)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    torch.distributed.barrier()
    metadata = _metadata(trained)
    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"), group, True
    )
    described = {name: value for name, value in metadata.items() if name != "dp_cp_group"} | {
        CRITIC: critic is not None
    }
    with _named_failures("written", unfinished):
        state = _state(trained, iteration, metadata, loading=False, critic=critic)
        state["args"] = arguments(trained.bridge)
        dist_checkpointing.save(state, str(unfinished), strategy, content_metadata=described)
    if torch.distributed.get_rank() == 0:
        if model_dir is not None:
            pack(model_dir, unfinished / CARRIED)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        marker = Path(directory) / LATEST
        marker.with_suffix(".new").write_text(str(iteration))
        marker.with_suffix(".new").replace(marker)
    torch.distributed.barrier()
    return folder


def require_room(
    models: list[Trained], folder: Path, together: Callable[[Room], Room] = lambda room: room
) -> None:
    """Is there room for a checkpoint of these models? Collective; `together` as of `save`. Raises:
    StoreFull, on every rank."""
    _require(together(_room(models, folder)), folder)


def _room(models: list[Trained], folder: Path) -> Room:
    """Of all ranks together, on the disk that has least. Collective."""
    existing = next(parent for parent in folder.parents if parent.exists())
    mine = sum(map(_share_bytes, models)), shutil.disk_usage(existing).free
    found: list[tuple[float, int]] = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    shares, free = zip(*found, strict=True)
    return Room(int(SPARE * sum(shares)) + SPARE_BYTES, min(free))


def _share_bytes(trained: Trained) -> float:
    """This rank's share of what is saved: of what n ranks have alike, an n-th of it."""
    alike = {
        False: parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        True: parallel_state.get_expert_data_parallel_world_size(),
    }
    sharded = trained.ddp.ddp_config.use_distributed_optimizer
    model = set(trained.model.parameters())
    found = sum(
        one.nbytes / alike[not getattr(one, "allreduce", True)]
        for one in model
        if param_is_not_shared(one)
    )
    for part in inner_optimizers(trained.optimizer):
        for group in part.optimizer.param_groups:
            for one in filter(param_is_not_shared, group["params"]):
                moments = sum(
                    value.nbytes
                    for value in part.optimizer.state[one].values()
                    if torch.is_tensor(value)
                )
                main = 0 if one in model else one.nbytes
                found += (main + moments) / (1 if sharded else alike[group["is_expert_parallel"]])
    return found


def _require(room: Room, folder: Path) -> None:
    """A disk that fills up half-way is a torch error that does not say so, on one rank, while the
    others wait for it."""
    if room.free_bytes < room.needed_bytes:
        raise StoreFull(
            "no room for a checkpoint on the local disk",
            where=str(folder),
            found=f"{room.free_bytes / 1024**2:,.0f} MiB free",
            expected=f"{room.needed_bytes / 1024**2:,.0f} MiB",
            do="make room and start the same command again, or keep fewer with checkpoint.keep_local",
        )


@dataclass(slots=True, frozen=True)
class Loaded:
    """What was restored."""

    iteration: int
    """The one that the checkpoint was saved under."""
    critic: bool
    """Whether a critic was in it, and asked for."""


def load(
    trained: Trained,
    directory: str | Path,
    *,
    iteration: int | None = None,
    weights_only: bool = False,
    critic: Trained | None = None,
) -> Loaded:
    """Restore all that was saved, or (weights_only) just the weights, keeping the optimizer's own
    state. Collective.

    `iteration` None: the latest (0 for a release, which has weights only). Raises: TrainerError if
    there is no such checkpoint. A `critic` that is not in it stays. (The schedule is put back to 0
    first: Megatron's loading adds to where it stands.)
    """
    folder = _latest(directory) if iteration is None else _folder(directory, iteration)
    if folder.name == RELEASE and not weights_only:
        raise TrainerError(
            "a converted checkpoint has no optimizer state",
            where=str(folder),
            do="load its weights only",
        )
    return _load(trained, folder, weights_only=weights_only, critic=critic)


def load_critic(critic: Trained, directory: str | Path, *, weights_only: bool = False) -> Loaded:
    """As `load`, of the latest, of a critic that has ranks of its own: the policy's part is not
    read. Collective.

    Raises: TrainerError if there is no checkpoint at all. A critic that is not in it stays.
    """
    folder = _latest(directory)
    if (beside := _beside(folder)) is not None:
        return replace(_load(critic, beside, weights_only=weights_only), critic=True)
    described = _described(folder)
    if not weights_only:
        randomness.begin_again()
    if not described.pop(CRITIC, False):
        return Loaded(_number(folder), critic=False)
    metadata = {**_metadata(critic), **described}
    found = _read(
        {CRITIC: _part_of_critic(critic, metadata, loading=True, weights_only=weights_only)}, folder
    )
    _take(critic, found[CRITIC], weights_only=weights_only)
    return Loaded(_number(folder), critic=True)


def load_decoder(critic: Trained, directory: str | Path) -> None:
    """Give a critic the policy's weights of the latest checkpoint, all but those of the head.
    Collective."""
    folder = _latest(directory)
    _described(folder)
    shards = critic.model.sharded_state_dict(metadata=_metadata(critic))
    found = _read(
        {
            "model": {
                name: shard
                for name, shard in shards.items()
                if not name.startswith("output_layer.")
            }
        },
        folder,
    )
    critic.model.load_state_dict(found["model"], strict=False)
    critic.optimizer.reload_model_params()


def _load(
    trained: Trained,
    folder: Path,
    *,
    weights_only: bool,
    critic: Trained | None = None,
    draws: bool = True,
) -> Loaded:
    """`draws`: take the random state too, with all else (`randomness`)."""
    described = _described(folder)
    within = critic if described.pop(CRITIC, False) else None
    metadata = {**_metadata(trained), **described}
    kept = draws and not weights_only and randomness.is_kept(folder)
    asked = _state(
        trained,
        _number(folder),
        metadata,
        loading=True,
        weights_only=weights_only,
        critic=within,
        draws=kept,
    )
    found = _read(asked, folder)
    _take(trained, found, weights_only=weights_only)
    if within is not None:
        _take(within, found[CRITIC], weights_only=weights_only)
    if kept:
        randomness.take(found[randomness.KEY][0])
    elif draws and not weights_only:
        randomness.begin_again()
    beside = _beside(folder) if critic is not None and within is None else None
    if critic is not None and beside is not None:
        _load(critic, beside, weights_only=weights_only, draws=False)
    return Loaded(int(found["iteration"]), within is not None or beside is not None)


def _described(folder: Path) -> dict[str, Any]:
    """How a checkpoint was written. Raises: TrainerError if it is not there or not complete."""
    if not (folder / ".metadata").exists():
        raise TrainerError(
            "no such checkpoint", where=str(folder), expected="a complete torch_dist checkpoint"
        )
    return dist_checkpointing.load_content_metadata(str(folder)) or {}


def _beside(folder: Path) -> Path | None:
    """The part of a critic that has ranks of its own, of this checkpoint; None if it has none."""
    found = folder.parent / CRITIC / folder.name
    return found if (found / ".metadata").exists() else None


def _read(state: dict[str, Any], folder: Path) -> Any:
    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(folder)), group
    )
    with _named_failures("read", folder):
        return dist_checkpointing.load(state, str(folder), strategy, strict="assume_ok_unexpected")


def _take(trained: Trained, found: dict[str, Any], *, weights_only: bool) -> None:
    trained.model.load_state_dict(found["model"], strict=True)
    if weights_only:
        trained.optimizer.reload_model_params()
        return
    _restore_optimizer(trained, found["optimizer"])
    trained.scheduler.num_steps = 0
    trained.scheduler.load_state_dict(found["opt_param_scheduler"])


@contextlib.contextmanager
def _named_failures(what: str, folder: Path) -> Iterator[None]:
    """torch's CheckpointException is no Exception, and hides what happened in a table by rank."""
    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise TrainerError(
            f"the checkpoint could not be {what}", where=str(folder), found=causes
        ) from error


def _folder(directory: str | Path, iteration: int) -> Path:
    return Path(directory).absolute() / f"iter_{iteration:07d}"


def _number(folder: Path) -> int:
    """The iteration of a checkpoint's folder; 0 of a release."""
    return 0 if folder.name == RELEASE else int(folder.name.removeprefix("iter_"))


def _latest(directory: str | Path) -> Path:
    marker = Path(directory) / LATEST
    if not marker.exists():
        raise TrainerError("no checkpoint here", where=str(directory), expected=f"a file {LATEST}")
    latest = marker.read_text().strip()
    return (
        Path(directory).absolute() / RELEASE
        if latest == RELEASE
        else _folder(directory, int(latest))
    )


def _metadata(trained: Trained) -> dict[str, Any]:
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if trained.ddp.ddp_config.use_distributed_optimizer:
        metadata |= {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
    return metadata


def _state(
    trained: Trained,
    iteration: int,
    metadata,
    *,
    loading: bool,
    weights_only: bool = False,
    critic: Trained | None = None,
    draws: bool = True,
) -> dict[str, Any]:
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": iteration}
    state |= _of_model(trained, metadata, loading=loading, weights_only=weights_only)
    if critic is not None:
        state[CRITIC] = _part_of_critic(
            critic, metadata, loading=loading, weights_only=weights_only
        )
    if draws:
        state[randomness.KEY] = randomness.sharded()
    return state


def _part_of_critic(
    critic: Trained, metadata, *, loading: bool, weights_only: bool
) -> dict[str, Any]:
    state = _of_model(critic, metadata, loading=loading, weights_only=weights_only)
    add_prefix_for_sharding(state, f"{CRITIC}.")
    return state


def _of_model(trained: Trained, metadata, *, loading: bool, weights_only: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"model": trained.model.sharded_state_dict(metadata=metadata)}
    if not weights_only:
        state["optimizer"] = trained.optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=metadata
        )
        state["opt_param_scheduler"] = trained.scheduler.state_dict()
    return state


def _restore_optimizer(trained: Trained, state: dict[str, Any]) -> None:
    """Megatron saves no step count of torch's Adam while it is 0, and may load one step tensor
    shared by all parameters, to which each of them would add. It also loads the learning rate,
    betas and eps that the checkpoint was saved with, though the configuration decides them."""
    settings = [_settings(part.optimizer) for part in inner_optimizers(trained.optimizer)]
    for saved in _adam_states(state):
        saved["state"].setdefault("common_step", torch.zeros(()))
    with torch.no_grad():
        trained.optimizer.load_state_dict(state)
    for part, kept in zip(inner_optimizers(trained.optimizer), settings, strict=True):
        for group, own in zip(part.optimizer.param_groups, kept, strict=True):
            group.update(own)
        if isinstance(part.optimizer, torch.optim.Adam):
            for parameter, values in part.optimizer.state.items():
                values["step"] = values["step"].detach().to(parameter.device, copy=True)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What is set of each parameter group, beside its parameters and how far it is."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]


def _adam_states(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The state dicts of torch optimizers inside Megatron's, which may be chained."""
    if "param_groups" in state and "state" in state:
        yield state
        return
    for part in state.values():
        if isinstance(part, dict):
            yield from _adam_states(part)
