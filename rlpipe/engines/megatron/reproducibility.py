"""Reproducible training: the determinism switch and the random state of a rank.

`set_deterministic` makes the same batches give the same bits on the same kind of machine and
layout. `seed_all`, `sharded_random_state` and `restore_random_state` handle the random state of
Python, NumPy, torch and Megatron's tensor parallel regions. `facts` returns versions, device and
kernels of the rank for the record.

The switch has these effects:

- all devices: torch's deterministic algorithms (attention backward, scatter, index_add) and
  Megatron's deterministic_mode
- CUDA: ENVIRONMENT (one cuBLAS workspace, deterministic Transformer Engine kernels, NCCL rings) and
  no cuDNN benchmark
- CPU: a fixed number of threads (`resources.threads_per_process`), which MKL may not lower

The order of sums over ranks follows from the layout, which is an input of every train node.
Without the switch, training on one CPU rank measured equal too, but only the switch promises it. On
CPUs the promise covers training and replay. On GPUs it also covers sampling: the engines get
`enable_deterministic_inference` (`engines.sglang.server`).

The random state starts from the run's seed. A checkpoint stores one state for each pipeline stage
and tensor parallel rank. A rank that loads a whole checkpoint restores its own state. If the
checkpoint has none for the rank, the rank seeds again, so that later random numbers depend on the
checkpoint alone:

| change since the checkpoint | random state |
|---|---|
| other tensor or pipeline parallel sizes | seeded again on all ranks |
| critic moves to its own ranks | seeded again there; the policy continues with the shared state |
| critic moves to the policy's ranks | the critic uses the policy's state; its own is not read |
"""

from __future__ import annotations

import importlib.util
import os
import random
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from rlpipe.engines.megatron import platform
from rlpipe.errors import TrainerError

# isort: split
import megatron.core
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

from rlpipe.engines.megatron.model import varlen

# cuBLAS, NCCL and Transformer Engine read these once, at their first use in a process.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
}
RANDOM_STATE_KEY = "rng_state"

_used_nondeterministic_cuda = False
_seed = 0


def set_deterministic(deterministic: bool) -> None:
    """Switch determinism of this process on or off. Call before the rank claims a device.

    Raises: TrainerError if an engine of this process has used CUDA without ENVIRONMENT.
    """
    global _used_nondeterministic_cuda
    if deterministic:
        _set_environment()
    elif platform.CUDA_FOUND:
        _used_nondeterministic_cuda = True
    torch.use_deterministic_algorithms(deterministic)
    settings: Any = torch.utils.deterministic
    # Filling would be an extra pass over memory that is always written before it is read.
    settings.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = False


def _set_environment() -> None:
    missing = {name: value for name, value in ENVIRONMENT.items() if os.environ.get(name) != value}
    # torch.cuda.is_initialized() cannot replace this flag: importing Megatron-core initialises
    # CUDA.
    if missing and _used_nondeterministic_cuda:
        raise TrainerError(
            "this process has already used CUDA without determinism",
            where="deterministic",
            found={name: os.environ.get(name) for name in missing},
            expected=missing,
            do="restart the trainer's processes, or export these variables where Ray is started",
        )
    os.environ.update(missing)


def seed_all(seed: int) -> None:
    """Seed all random generators of this rank. Process groups must be open."""
    global _seed
    _seed = seed
    seed_again()


def seed_again() -> None:
    """Reset all random generators to the state right after `seed_all`."""
    random.seed(_seed)
    np.random.seed(_seed % 2**32)
    torch.manual_seed(_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(_seed)


def sharded_random_state() -> ShardedObject:
    """Return this rank's random state as part of a checkpoint."""
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": _tracker().get_states(),
    }
    if platform.CUDA_FOUND:
        state["cuda_rng_state"] = torch.cuda.get_rng_state()
    return ShardedObject(
        RANDOM_STATE_KEY,
        [state],
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def has_random_state(folder: Path) -> bool:
    """True if the checkpoint stores this rank's random state, under the same parallel sizes."""
    return sharded_random_state().unique_key in load_sharded_metadata(str(folder))


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore a random state that a checkpoint stored."""
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    _tracker().set_states(state["rng_tracker_states"])
    if platform.CUDA_FOUND and "cuda_rng_state" in state:
        torch.cuda.set_rng_state(state["cuda_rng_state"])


def _tracker() -> Any:
    """Return Megatron's random states of tensor parallel regions."""
    return tensor_parallel.get_cuda_rng_tracker()


def facts(dtype: str) -> dict[str, Any]:
    """Return versions, device, attention and kernels of this rank, for the train node's record.

    Two runs of one configuration on two machines can differ in them. `dtype`: of the weights, as
    torch names it.
    """
    on_cuda = platform.CUDA_FOUND
    cuda = cast("Any", torch.cuda)
    # A plain string: unpickling `TorchVersion` would import torch into conductor and driver.
    torch_version = str(torch.__version__)
    packed = on_cuda and dtype in ("bfloat16", "float16")
    return {
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "torch": torch_version,
        "cuda": torch.version.cuda if on_cuda else None,
        "nccl": ".".join(map(str, cuda.nccl.version())) if on_cuda else None,
        "backend": platform.backend(),
        "megatron": megatron.core.__version__,
        "megatron_from": str(Path(megatron.core.__path__[0]).parents[1]),
        "mbridge": _version("mbridge"),
        "transformer_engine": _version("transformer_engine") or _version("transformer-engine"),
        "attention": varlen.backend() if packed else "torch scaled_dot_product_attention",
        "attention_version": _version(varlen.BACKENDS[varlen.backend()][0])
        if packed
        else torch_version,
        "fused": "triton" if on_cuda else "torch",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _version(package: str) -> str | None:
    """Return the version of a package; "there" if it is importable but no distribution."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "there" if importlib.util.find_spec(package.replace("-", "_")) is not None else None
