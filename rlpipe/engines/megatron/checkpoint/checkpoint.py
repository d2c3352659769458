"""torch_dist checkpoints in Megatron's format, which any parallel layout can load.

`save` writes, `load` and `load_critic` restore, `load_adam_state` continues another run's Adam.

    <directory>/iter_0000012/…                      weights, optimizer, schedule, random state, the
                                                    critic's as `critic.…`; the architecture's
                                                    arguments; small files of the model's directory
    <directory>/release/…                           converted weights (`conversion`), no iteration
    <directory>/latest_checkpointed_iteration.txt   "12"
    <directory>/critic/iter_0000012/…               a critic that has its own ranks

A critic can be loaded in either form, from its own ranks or from the policy's. A checkpoint is
written under another name and renamed when it is complete. It replaces an older one of the same
iteration.
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
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlpipe.engines.megatron import reproducibility
from rlpipe.errors import ConfigError, TrainerError
from rlpipe.system.megatron_weights import RELEASE

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

from rlpipe.engines.megatron.checkpoint import adapters
from rlpipe.engines.megatron.checkpoint.conversion.hf_files import CARRIED, pack
from rlpipe.engines.megatron.checkpoint.conversion.meta_model import arguments
from rlpipe.engines.megatron.checkpoint.disk_space import DiskSpace, require_disk_space
from rlpipe.engines.megatron.checkpoint.state import (
    SHARDING_TYPE,
    adam_states,
    check_optimizer_kind,
    group_settings,
    in_same_chain,
    inner_optimizers,
    parameter_groups,
    with_plain_values,
)
from rlpipe.engines.megatron.model.build import TrainedModel
from rlpipe.engines.megatron.model.float32_parameters import counted
from rlpipe.engines.megatron.model.lora import initialize
from rlpipe.engines.megatron.model.value_model import RewardModel

_EXTRA_STATE = "_extra_state"
LATEST = "latest_checkpointed_iteration.txt"
CRITIC = "critic"
"""The critic's key in the state, the prefix of its tensors, and a flag in the content metadata.
Also the folder of a critic that has its own ranks."""


def save(
    trained: TrainedModel,
    directory: str | Path,
    iteration: int,
    critic: TrainedModel | None = None,
    *,
    model_dir: str | Path | None = None,
    combine: Callable[[DiskSpace], DiskSpace] = lambda space: space,
) -> Path:
    """Write a checkpoint and return its folder. Collective.

    The checkpoint is complete on disk when the call returns on every rank. `model_dir`: the model's
    Hugging Face directory; its small files are stored too, so that the checkpoint converts back
    without the directory. `combine`: adds the disk space of checkpoints that other ranks write at
    the same time.

    Raises: StoreFull on every rank, before anything is written, if the disk space does not suffice;
    TrainerError if a rank could not write.
    """
    folder = _folder(directory, iteration)
    require_disk_space([trained] if critic is None else [trained, critic], folder, combine)
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
    # A process group cannot be stored.
    stored_metadata = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    stored_metadata |= {CRITIC: critic is not None} | adapters.metadata(trained)
    with _named_failures("written", unfinished):
        state = _state(trained, iteration, metadata, loading=False, critic=critic)
        state["args"] = arguments(trained.bridge)
        dist_checkpointing.save(state, str(unfinished), strategy, content_metadata=stored_metadata)
    if torch.distributed.get_rank() == 0:
        if model_dir is not None:
            pack(model_dir, unfinished / CARRIED)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        # Replace the marker atomically, after the folder has its final name.
        marker = Path(directory) / LATEST
        marker.with_suffix(".new").write_text(str(iteration))
        marker.with_suffix(".new").replace(marker)
    # No rank returns before rank 0 has renamed the folder.
    torch.distributed.barrier()
    return folder


@dataclass(slots=True, frozen=True)
class Loaded:
    """Result of loading a checkpoint."""

    iteration: int
    """The iteration that the checkpoint was saved under."""
    critic: bool
    """True if a critic was requested and loaded."""


def load(
    trained: TrainedModel,
    directory: str | Path,
    *,
    iteration: int | None = None,
    weights_only: bool = False,
    critic: TrainedModel | None = None,
) -> Loaded:
    """Restore the whole state, or with `weights_only` the weights alone. Collective.

    `iteration`: None is the latest (0 for a release, which has weights only). A `critic` that is
    not in the checkpoint stays unchanged. Raises: TrainerError if there is no such checkpoint.
    """
    folder = _latest(directory) if iteration is None else _folder(directory, iteration)
    if folder.name == RELEASE and not weights_only:
        raise TrainerError(
            "a converted checkpoint has no optimizer state",
            where=str(folder),
            do="load its weights only",
        )
    return _load(trained, folder, weights_only=weights_only, critic=critic)


def load_adam_state(trained: TrainedModel, folder: str | Path) -> None:
    """Restore Adam and the schedule from a converted optimizer state (`convert.to_adam_state`).

    Collective. The weights must be loaded already. Raises: ConfigError for another dtype.
    """
    metadata = _metadata(trained)
    request = _model_state(trained, metadata, loading=True, weights_only=False)["optimizer"]
    for shard in nested_values(request):
        if isinstance(shard, ShardedTensor | ShardedTensorFactory):
            # The name of a float32 parameter in Megatron's distributed optimizer.
            shard.key = shard.key.replace(
                "optimizer.state.param.", "optimizer.state.fp32_param.", 1
            )
    state = _read({"optimizer": request}, Path(folder))
    dtype = str(trained.bridge.config.params_dtype)
    if state["weights_dtype"] != dtype:
        raise ConfigError(
            "the optimizer state belongs to weights of another dtype",
            where="model.dtype",
            found=dtype,
            expected=f"{state['weights_dtype']}, as in {folder}",
            do="set model.dtype, or take the weights only: model.source.megatron_optimizer=false "
            "(--no-load-optim)",
        )
    optimizer = with_plain_values(state["optimizer"], request)
    step = int(state["adam_step"])
    for adam in adam_states(optimizer):
        adam["state"]["common_step"] = torch.tensor(float(step))
    for group in parameter_groups(optimizer):
        group["step"] = step
    _restore_optimizer(trained, optimizer)
    trained.scheduler.num_steps = 0
    trained.scheduler.step(increment=int(state["schedule_steps"]))


def load_critic(
    critic: TrainedModel, directory: str | Path, *, weights_only: bool = False
) -> Loaded:
    """Restore a critic that has its own ranks from the latest checkpoint. Collective.

    The policy's part is not read. A critic that is not in the checkpoint stays unchanged. Raises:
    TrainerError if there is no checkpoint.
    """
    folder = _latest(directory)
    if (critic_folder := _critic_folder(folder)) is not None:
        return replace(_load(critic, critic_folder, weights_only=weights_only), critic=True)
    stored_metadata = _content_metadata(folder)
    if not weights_only:
        adapters.check_frozen(critic, stored_metadata, folder)
        reproducibility.seed_again()
    if not stored_metadata.pop(CRITIC, False):
        return Loaded(_iteration_of(folder), critic=False)
    metadata = {**_metadata(critic), **stored_metadata}
    request = {CRITIC: _critic_state(critic, metadata, loading=True, weights_only=weights_only)}
    state = _read(request, folder)
    _restore(critic, state[CRITIC], request[CRITIC], weights_only=weights_only)
    return Loaded(_iteration_of(folder), critic=True)


def load_decoder(critic: TrainedModel, directory: str | Path) -> None:
    """Load the policy's weights of the latest checkpoint into a critic, without the head.

    Collective.
    """
    folder = _latest(directory)
    _content_metadata(folder)
    weights = _without_extra_states(_sharded_weights(critic, _metadata(critic)))
    _load_weights(critic, _read(_without_output_layer(weights), folder), strict=False)
    critic.optimizer.reload_model_params()


def _load(
    trained: TrainedModel,
    folder: Path,
    *,
    weights_only: bool,
    critic: TrainedModel | None = None,
    restores_random_state: bool = True,
) -> Loaded:
    stored_metadata = _content_metadata(folder)
    stored_lora = adapters.stored_lora(stored_metadata)
    first = adapters.are_missing(trained, stored_lora, folder, weights_only=weights_only)
    if not weights_only:
        adapters.check_frozen(trained, stored_metadata, folder)
        check_optimizer_kind(trained, stored_metadata, folder)
    inner_critic = critic if stored_metadata.pop(CRITIC, False) else None
    metadata = {**_metadata(trained), **stored_metadata}
    restores_random_state = restores_random_state and not weights_only
    has_random_state = restores_random_state and reproducibility.has_random_state(folder)
    request = _state(
        trained,
        _iteration_of(folder),
        metadata,
        loading=True,
        weights_only=weights_only,
        critic=inner_critic,
        with_random_state=has_random_state,
    )
    weights = {key: request[key] for key in _chunk_keys(trained)}
    if first:
        request |= adapters.without_adapters(weights)
    # A reward model begins with the weights of a policy, and a head of 0.
    headless = (
        weights_only and isinstance(trained.models[0], RewardModel) and not _has_reward_head(folder)
    )
    if headless:
        request |= _without_output_layer(weights)
    state = _read(request, folder)
    _restore(trained, state, request, weights_only=weights_only, strict=not (first or headless))
    if inner_critic is not None:
        _restore(inner_critic, state[CRITIC], request[CRITIC], weights_only=weights_only)
    if has_random_state:
        reproducibility.restore_random_state(state[reproducibility.RANDOM_STATE_KEY][0])
    elif restores_random_state:
        reproducibility.seed_again()
    critic_folder = None if critic is None or inner_critic is not None else _critic_folder(folder)
    if critic is not None and critic_folder is not None:
        # The critic had its own ranks when it was saved. Here it shares the policy's random state.
        _load(critic, critic_folder, weights_only=weights_only, restores_random_state=False)
    loaded_critic = inner_critic is not None or critic_folder is not None
    return Loaded(int(state["iteration"]), loaded_critic)


def _content_metadata(folder: Path) -> dict[str, Any]:
    """Return the stored layout of a checkpoint.

    Raises: TrainerError if the checkpoint is missing or incomplete.
    """
    if not (folder / ".metadata").exists():
        raise TrainerError(
            "no such checkpoint", where=str(folder), expected="a complete torch_dist checkpoint"
        )
    return dist_checkpointing.load_content_metadata(str(folder)) or {}


def _critic_folder(folder: Path) -> Path | None:
    """Return the folder of a critic that had its own ranks; None if there is none."""
    critic_folder = folder.parent / CRITIC / folder.name
    return critic_folder if (critic_folder / ".metadata").exists() else None


def _read(request: dict[str, Any], folder: Path) -> Any:
    group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(folder)), group
    )
    with _named_failures("read", folder):
        return dist_checkpointing.load(
            request, str(folder), strategy, strict="assume_ok_unexpected"
        )


def _restore(
    trained: TrainedModel,
    state: dict[str, Any],
    request: dict[str, Any],
    *,
    weights_only: bool,
    strict: bool = True,
) -> None:
    _load_weights(trained, state, strict=strict)
    if not strict:
        initialize(trained.models)
    if weights_only:
        trained.optimizer.reload_model_params()
        return
    _restore_optimizer(trained, in_same_chain(state["optimizer"], request["optimizer"]))
    # Megatron's loading adds the stored steps to the current ones.
    trained.scheduler.num_steps = 0
    trained.scheduler.load_state_dict(state["opt_param_scheduler"])


@contextlib.contextmanager
def _named_failures(operation: str, folder: Path) -> Iterator[None]:
    """Convert torch's CheckpointException, which is no Exception, into TrainerError."""
    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise TrainerError(
            f"the checkpoint could not be {operation}", where=str(folder), found=causes
        ) from error


def _folder(directory: str | Path, iteration: int) -> Path:
    return Path(directory).absolute() / f"iter_{iteration:07d}"


def _iteration_of(folder: Path) -> int:
    """Return the iteration of a checkpoint's folder; 0 for a release."""
    return 0 if folder.name == RELEASE else int(folder.name.removeprefix("iter_"))


def _latest(directory: str | Path) -> Path:
    marker = Path(directory) / LATEST
    if not marker.exists():
        raise TrainerError(
            "no checkpoint in this directory", where=str(directory), expected=f"a file {LATEST}"
        )
    latest = marker.read_text().strip()
    return (
        Path(directory).absolute() / RELEASE
        if latest == RELEASE
        else _folder(directory, int(latest))
    )


def _metadata(trained: TrainedModel) -> dict[str, Any]:
    # The layout of the stored tensors. Loading uses the values of the checkpoint's content
    # metadata.
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if trained.chunks[0].ddp_config.use_distributed_optimizer:
        metadata |= {
            SHARDING_TYPE: "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
    return metadata


def _state(
    trained: TrainedModel,
    iteration: int,
    metadata,
    *,
    loading: bool,
    weights_only: bool = False,
    critic: TrainedModel | None = None,
    with_random_state: bool = True,
) -> dict[str, Any]:
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": iteration}
    state |= _model_state(trained, metadata, loading=loading, weights_only=weights_only)
    if critic is not None:
        state[CRITIC] = _critic_state(critic, metadata, loading=loading, weights_only=weights_only)
    if with_random_state:
        state[reproducibility.RANDOM_STATE_KEY] = reproducibility.sharded_random_state()
    return state


def _critic_state(
    critic: TrainedModel, metadata, *, loading: bool, weights_only: bool
) -> dict[str, Any]:
    state = _model_state(critic, metadata, loading=loading, weights_only=weights_only)
    add_prefix_for_sharding(state, f"{CRITIC}.")
    return state


def _model_state(
    trained: TrainedModel, metadata, *, loading: bool, weights_only: bool
) -> dict[str, Any]:
    weights = _sharded_weights(trained, metadata)
    state: dict[str, Any] = _without_extra_states(weights) if loading else {**weights}
    if not weights_only:
        named = adapters.state_metadata(trained, metadata)
        with counted(trained.optimizer):
            state["optimizer"] = trained.optimizer.sharded_state_dict(
                weights if named is metadata else _sharded_weights(trained, named),
                is_loading=loading,
                metadata=metadata,
            )
            adapters.complete(trained, state["optimizer"])
        state["opt_param_scheduler"] = trained.scheduler.state_dict()
    return state


def _chunk_keys(trained: TrainedModel) -> list[str]:
    """Return Megatron-LM's key of each chunk in a checkpoint's state."""
    number = len(trained.chunks)
    return ["model"] if number == 1 else [f"model{chunk}" for chunk in range(number)]


def _sharded_weights(trained: TrainedModel, metadata) -> dict[str, Any]:
    """Return the weights of each chunk. The names of tensors do not depend on the layout."""
    return {
        key: model.sharded_state_dict(metadata=metadata)
        for key, model in zip(_chunk_keys(trained), trained.models, strict=True)
    }


def _without_output_layer(weights: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {name: shard for name, shard in shards.items() if not name.startswith("output_layer.")}
        for key, shards in weights.items()
    }


def _has_reward_head(folder: Path) -> bool:
    """True if the output layer of a checkpoint has one row."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    head = stored.get("output_layer.weight")
    return isinstance(head, TensorStorageMetadata) and head.size[0] == 1


def _without_extra_states(weights: dict[str, Any]) -> dict[str, Any]:
    """Leave out the entries of Transformer Engine's FP8 scales, which other layers do not store."""
    return {
        key: {name: shard for name, shard in shards.items() if not name.endswith(_EXTRA_STATE)}
        for key, shards in weights.items()
    }


def _load_weights(trained: TrainedModel, state: dict[str, Any], *, strict: bool) -> None:
    for key, model in zip(_chunk_keys(trained), trained.models, strict=True):
        own: dict[str, Any] = model.state_dict()
        extra = {name: value for name, value in own.items() if name.endswith(_EXTRA_STATE)}
        model.load_state_dict({**extra, **state[key]}, strict=strict)


def _restore_optimizer(trained: TrainedModel, state: dict[str, Any]) -> None:
    settings = [group_settings(part.optimizer) for part in inner_optimizers(trained.optimizer)]
    for saved in adam_states(state):
        # Megatron does not save the step count of torch's Adam while it is 0.
        saved["state"].setdefault("common_step", torch.zeros(()))
    with torch.no_grad(), counted(trained.optimizer):
        adapters.restore_lists(trained, state)
        trained.optimizer.load_state_dict(state)
    for part, kept in zip(inner_optimizers(trained.optimizer), settings, strict=True):
        for group, own in zip(part.optimizer.param_groups, kept, strict=True):
            # Megatron loads the learning rate, betas and eps of the checkpoint. The configuration
            # decides them.
            group.update(own)
        if isinstance(part.optimizer, torch.optim.Adam):
            for parameter, values in part.optimizer.state.items():
                # Megatron may load one step tensor for all parameters, and then every parameter
                # would increment it.
                values["step"] = values["step"].detach().to(parameter.device, copy=True)
