"""Run an unmodified SGLang server on a machine without CUDA.

    python -m rlpipe.engines.sglang.cpu_launch ARGUMENTS

The arguments are SGLang's own. This module fills eight gaps of SGLang's CPU support and halves the
start-up time:

1. `SGLANG_USE_CPU_ENGINE=1` selects SGLang's own CPU platform. Without AMX it uses PyTorch layers.
2. `sgl_kernel` is on PyPI for CUDA only. SGLang's CPU path imports a few of its names. All but one
   serve speculative decoding, and raise here when called.
3. SGLang imports `torchvision` for image processors. Its PyPI wheel does not work with a CPU torch,
   so an empty stand-in replaces a missing one, in the server's processes only.
4. The `torch_native` attention backend runs one request at a time. SGLang's hook registry replaces
   it by `cpu_attention`.
5. `/weights_checker` compares weights on a CUDA device. A hook compares them on the CPU.
6. `--enable-return-routed-experts` registers its memory with CUDA. A hook skips that.
7. Adapters (`--enable-lora`) page-lock a few numbers of each batch. A hook skips that.
8. The processor of images of Qwen-VL imports models that need operators of `sgl_kernel`. Operators
   of these names are defined, without a kernel.
9. SGLang's processes are forked from the first one, which has imported everything. A spawned
   process repeats the imports, for 7 s. With CUDA a fork is not possible: a child cannot use CUDA
   if its parent has.

All but the last happen at import: processes that SGLang spawns import this main module again.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types
from typing import Any

import psutil

from rlpipe.engines.sglang import launch

_SPECULATIVE_ONLY = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


_IMPORTED_OPERATORS = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
_libraries: list[Any] = []
"""Operators exist as long as their library."""


def _assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, locations, _row) -> None:
    """Copy each request's new cache locations into its row of the request-to-token table."""
    position = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[request, start:end] = locations[position : position + end - start].to(
            req_to_token.dtype
        )
        position += end - start


def _missing_operator(name: str):
    def operator(*_arguments, **_keywords):
        raise NotImplementedError(f"sgl_kernel.{name} is not available without CUDA or AMX")

    operator.__name__ = name
    return operator


class _AnyAttribute(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _MissingName(metaclass=_AnyAttribute):
    """Stand-in for any class, constant or function of a missing package."""

    def __init__(self, *_arguments, **_keywords) -> None:
        raise NotImplementedError("a stand-in for a package that is not installed")


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An empty package that has every submodule."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        module.__dict__.update(__version__="0.0.0", __getattr__=self._attribute)

    @staticmethod
    def _attribute(name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingName


def _kernel_stand_in() -> types.ModuleType:
    module = types.ModuleType("sgl_kernel")
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__dict__["assign_req_to_token_pool_cpu"] = _assign_req_to_token_pool_cpu
    module.__dict__.update({name: _missing_operator(name) for name in _SPECULATIVE_ONLY})
    return module


def install() -> None:
    """Install the stand-ins. Call it before importing sglang. Calling it twice is allowed."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.modules.setdefault("sgl_kernel", _kernel_stand_in())
    is_installed = any(isinstance(finder, _StandIn) for finder in sys.meta_path)
    if not is_installed and importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_StandIn("torchvision"))


def _whole_weight(_original, weight):
    """Yield an unquantized weight as one chunk, for an exact comparison on the CPU."""
    yield weight.tensor.reshape(-1), None


def _skip_page_lock(_original, _buffer, _granularity=None) -> None:
    """Do not page-lock memory: no device copies from it."""


def _pageable(function):
    def create(*values, pin_memory=False, **settings):
        return function(*values, **settings)

    return create


def _lora_without_page_lock(original, *arguments, **keywords):
    """Make torch create tensors without page-locked memory in this process.

    Runs around the constructor of SGLang's manager of adapters. Its layers and kernels (`srt/lora`)
    page-lock their offsets by these functions, which raise without an accelerator.
    """
    import torch

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _pageable(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda self, *_device: self)  # noqa: B010
    return original(*arguments, **keywords)


def _fork_single_threaded(original, arguments):
    """Make SGLang fork its processes if that is safe.

    Runs around the function that sets the start method, right before SGLang starts its processes.
    """
    settings = original(arguments)
    # A fork of a process with threads can leave a lock held for ever in the child. Processes that
    # start others (data parallelism) or begin on a NUMA node must be spawned.
    if (
        arguments.dp_size == 1
        and arguments.numa_node is None
        and psutil.Process().num_threads() == 1
    ):
        multiprocessing.set_start_method("fork", force=True)
    return settings


def _define_operators() -> None:
    """Define operators that SGLang's modules read at import. A call of one raises."""
    import torch

    missing = [name for name in _IMPORTED_OPERATORS if not hasattr(torch.ops.sgl_kernel, name)]
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in missing:
        library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
    _libraries.append(library)


def hook() -> None:
    """Register the hooks of every process. They take effect when SGLang loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rlpipe.engines.sglang import cpu_attention

    _define_operators()
    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(
        f"{backend}._run_sdpa_forward_decode", cpu_attention.decode, HookType.AROUND
    )
    HookRegistry.register(
        f"{backend}._run_sdpa_forward_extend", cpu_attention.extend, HookType.AROUND
    )
    weights = "sglang.srt.utils.weight_checker_comparator.RawComparable"
    HookRegistry.register(f"{weights}.iter_chunks", _whole_weight, HookType.AROUND)
    host_memory = "sglang.srt.mem_cache.pool_host.common"
    HookRegistry.register(f"{host_memory}._cuda_host_register", _skip_page_lock, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.lora.lora_manager.LoRAManager.__init__",
        _lora_without_page_lock,
        HookType.AROUND,
    )


def hook_start() -> None:
    """Register the hook of the process that starts the others."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", _fork_single_threaded, HookType.AROUND
    )


def _hook_all() -> None:
    hook()
    hook_start()


def load() -> None:
    """Import everything that a server needs, for a template process (`system.template`)."""
    import setproctitle

    from rlpipe.engines.sglang.server import COMPILE, FAST_EXIT

    # The first call must be in the template: it finds the place of the command line, which SGLang
    # changes in each of its processes.
    setproctitle.setproctitle("rlpipe template: engine")

    os.environ.update(FAST_EXIT)
    os.environ.setdefault(COMPILE, "1")
    launch.hide_megatron()
    launch.load(_hook_all)


def main(argv: list[str]) -> None:
    """Serve until killed, as `launch.main`."""
    launch.main(argv, prepare=_hook_all)


install()

if __name__ in ("__main__", "__mp_main__"):
    launch.hide_megatron()

if __name__ == "__mp_main__":
    hook()

if __name__ == "__main__":
    main(sys.argv[1:])
