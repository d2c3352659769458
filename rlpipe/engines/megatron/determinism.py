"""The determinism switch: the same batches, on the same kind of machine in the same layout, give
the same bits.

| where  | what is done                                                                                          |
|--------|-------------------------------------------------------------------------------------------------------|
| both   | torch's deterministic algorithms (attention backward, scatter, index_add), Megatron's deterministic_mode |
| CUDA   | ENVIRONMENT: one cuBLAS workspace, no nondeterministic Transformer Engine kernels, NCCL rings; no cuDNN benchmark |
| CPU    | a fixed number of threads (`resources.threads_per_process`), which MKL may not lower by itself        |

cuBLAS, NCCL and Transformer Engine read their variables once, at their first use in a process. So
they are set here before its first engine is built; a process that has had one on CUDA without them
cannot become deterministic and has to be started again. (That CUDA is initialised says nothing:
importing Megatron-core does that.) Where gradients are summed over ranks their order follows from
the layout, which is an input of every train node.

Without the switch training on one rank of a CPU comes out the same too, as measured; only with it
that is a promise. Not here: sampling. On GPUs the engines get `enable_deterministic_inference`
(`engines.sglang.server`); on CPUs the promise is about training and replay only.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from rlpipe.engines.megatron import platform
from rlpipe.errors import TrainerError

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "MKL_DYNAMIC": "FALSE",
    "OMP_DYNAMIC": "FALSE",
}
"""Read by libraries when they start."""

_had_another_engine = False
"""Has this process had an engine on CUDA that was not deterministic?"""


def switch(deterministic: bool) -> None:
    """Make this process's training deterministic, or fast again. Before its rank takes a device.

    Raises: TrainerError if an engine has used CUDA without ENVIRONMENT.
    """
    global _had_another_engine
    if deterministic:
        _prepare()
    elif platform.CUDA_FOUND:
        _had_another_engine = True
    torch.use_deterministic_algorithms(deterministic)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = (
        False  # a pass over memory that nothing reads before it is written
    )
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = False


def _prepare() -> None:
    missing = {name: value for name, value in ENVIRONMENT.items() if os.environ.get(name) != value}
    if missing and _had_another_engine:
        raise TrainerError(
            "this process has used CUDA in a way that cannot be repeated bit for bit",
            where="deterministic",
            found={name: os.environ.get(name) for name in missing},
            expected=missing,
            do="start the trainer's processes again, or export these variables where Ray is started",
        )
    os.environ.update(missing)
