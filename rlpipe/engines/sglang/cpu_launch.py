"""Run an unmodified SGLang server on a machine without CUDA: `python -m
rlpipe.engines.sglang.cpu_launch ARGUMENTS`.

The arguments are SGLang's own. Six gaps are filled, and a start is halved, none of it by editing
SGLang:

1. `SGLANG_USE_CPU_ENGINE=1` selects SGLang's own CPU platform, which falls back to pure PyTorch
   layers without AMX.
2. `sgl_kernel` exists on PyPI for CUDA only. SGLang's CPU path imports a few names of it; all but
   one of them serve speculative decoding and raise here when called.
3. `torchvision` is imported for image processors only, and its PyPI wheel cannot live beside a CPU
   torch: where it is absent, an empty stand-in takes its place, in the server's own processes.
4. The `torch_native` attention backend runs one request at a time; SGLang's hook registry puts
   `cpu_attention` in its place.
5. `/weights_checker` compares weights on a CUDA device; the same registry has it compare them where
   they are.
6. `--enable-return-routed-experts` keeps them in memory that it registers with CUDA; the same
   registry leaves that out.
7. SGLang's processes are forked from the first one, which has imported everything: each would else
   do so again, for 7 s. Where CUDA is, a process may have used it, and its children could not then.

All but the last happens at import, because what SGLang spawns all the same imports this main module
again. Not here: anything for CUDA (see `launch`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types

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


def _assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, locations, _row) -> None:
    """Copy each request's new cache locations into its row of the request-to-token table."""
    position = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[request, start:end] = locations[position : position + end - start].to(
            req_to_token.dtype
        )
        position += end - start


def _absent(name: str):
    def operator(*_arguments, **_keywords):
        raise NotImplementedError(f"sgl_kernel.{name} is not available without CUDA or AMX")

    operator.__name__ = name
    return operator


class _Anything(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Nothing(metaclass=_Anything):
    """Stands for any class, constant or function of an absent package."""

    def __init__(self, *_arguments, **_keywords) -> None:
        raise NotImplementedError("a stand-in for a package that is not installed")


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importable, empty package with every submodule anyone asks for."""

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
        return _Nothing


def _kernel_stand_in() -> types.ModuleType:
    module = types.ModuleType("sgl_kernel")
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__dict__["assign_req_to_token_pool_cpu"] = _assign_req_to_token_pool_cpu
    module.__dict__.update({name: _absent(name) for name in _SPECULATIVE_ONLY})
    return module


def install() -> None:
    """Put the stand-ins in place; must run before sglang is imported. Calling it again changes
    nothing."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.modules.setdefault("sgl_kernel", _kernel_stand_in())
    standing = any(isinstance(finder, _StandIn) for finder in sys.meta_path)
    if not standing and importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_StandIn("torchvision"))


def _weights_where_they_are(_original, weight):
    """One chunk of a weight that is not quantised, to be compared exactly."""
    yield weight.tensor.reshape(-1), None


def _memory_as_it_is(_original, _buffer, _granularity=None) -> None:
    """Memory that no device copies from needs no page-lock."""


def _fork_while_alone(original, arguments):
    """SGLang has just made its settings, the kind of its processes among them, and is about to
    start them. Forking a process of several threads could leave a lock held for good in the child,
    so that one goes on spawning; so does one whose processes start more of them (data parallelism),
    or have to begin on a NUMA node."""
    found = original(arguments)
    if (
        arguments.dp_size == 1
        and arguments.numa_node is None
        and psutil.Process().num_threads() == 1
    ):
        multiprocessing.set_start_method("fork", force=True)
    return found


def hook() -> None:
    """Register what replaces SGLang's own; it takes effect when SGLang loads its plugins, in every
    process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rlpipe.engines.sglang import cpu_attention

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(
        f"{backend}._run_sdpa_forward_decode", cpu_attention.decode, HookType.AROUND
    )
    HookRegistry.register(
        f"{backend}._run_sdpa_forward_extend", cpu_attention.extend, HookType.AROUND
    )
    weights = "sglang.srt.utils.weight_checker_comparator.RawComparable"
    HookRegistry.register(f"{weights}.iter_chunks", _weights_where_they_are, HookType.AROUND)
    host_memory = "sglang.srt.mem_cache.pool_host.common"
    HookRegistry.register(f"{host_memory}._cuda_host_register", _memory_as_it_is, HookType.AROUND)


def hook_start() -> None:
    """The same, of the process that starts the others."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", _fork_while_alone, HookType.AROUND
    )


install()

if __name__ in ("__main__", "__mp_main__"):
    launch.hide_megatron()
    hook()

if __name__ == "__main__":
    hook_start()
    launch.main(sys.argv[1:])
