"""Run Megatron-core on CUDA or on a CPU. Import this module before `megatron` or `mbridge`.

Megatron-core has no device abstraction: its source contains `torch.cuda.current_device()`,
`device="cuda"` and `tensor.cuda()`. Without CUDA, an import hook replaces these literals when the
modules of `megatron.core` and `mbridge` are compiled. torch and all other packages stay unchanged.
With CUDA the source of both packages stays unchanged too. On all devices, `_REPAIRS` patches
modules that do not work without Transformer Engine.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import queue
import sys
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("megatron.core", "mbridge")
CUDA_FOUND = torch.cuda.is_available()
_THIS_SOURCE = Path(__file__).read_bytes()
"""Part of the key of cached code: other rules of re-targeting give other code."""


def device() -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if CUDA_FOUND else torch.device("cpu")


def backend() -> str:
    """Return the backend of process groups."""
    return "nccl" if CUDA_FOUND else "gloo"


def claim_device(rank: int, threads: int) -> None:
    """Select this rank's CUDA device of the visible ones, or set its number of CPU threads."""
    if CUDA_FOUND:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(threads)


def to_device(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device. A CPU target returns the tensor itself."""
    # Through pinned memory, so that the host does not wait for earlier CUDA kernels.
    return (
        tensor.pin_memory().to(target, non_blocking=True)
        if target.type == "cuda"
        else tensor.to(target)
    )


class _Stream:
    """A stream or event on the CPU, where every operation is already complete."""

    def __init__(self, *_args, **_keywords) -> None: ...
    def wait_stream(self, *_args) -> None: ...
    def wait_event(self, *_args) -> None: ...
    def wait(self, *_args) -> None: ...
    def record(self, *_args) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: _Stream) -> float:
        return 0.0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_error) -> None: ...


def _nothing(*_args, **_keywords) -> None: ...


def _zero(*_args, **_keywords) -> int:
    return 0


class _CudaOnCpu:
    """Replacement of `torch.cuda` in re-targeted modules. Other attributes are torch's own."""

    Stream = Event = _Stream
    FloatTensor = torch.FloatTensor
    HalfTensor = torch.HalfTensor
    BFloat16Tensor = torch.BFloat16Tensor
    current_device = staticmethod(lambda: torch.device("cpu"))
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: False)
    set_device = synchronize = empty_cache = staticmethod(_nothing)
    current_stream = default_stream = staticmethod(_Stream)
    stream = staticmethod(lambda *_: contextlib.nullcontext())
    is_current_stream_capturing = staticmethod(lambda: False)
    manual_seed = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda *_, **__: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_, **__: torch.set_rng_state(state))
    memory_allocated = max_memory_allocated = memory_reserved = max_memory_reserved = staticmethod(
        _zero
    )
    nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing)

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)


CUDA = _CudaOnCpu()


class _Retarget(ast.NodeTransformer):
    """Replace `torch.cuda`, `x.cuda(...)` and "cuda" by their CPU versions; no pinned memory."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name("__rlpipe_cuda__", node.ctx), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        moves = (
            node.func if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda" else None
        )
        self.generic_visit(node)
        if moves is not None:
            return ast.copy_location(
                ast.Call(
                    ast.copy_location(ast.Attribute(moves.value, "cpu", ast.Load()), node), [], []
                ),
                node,
            )
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant):
                keyword.value.value = False
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if (
            isinstance(node.value, str)
            and node.value.startswith("torch.cuda.")
            and node.value.endswith("Tensor")
        ):
            return ast.copy_location(
                ast.Constant("torch." + node.value.removeprefix("torch.cuda.")), node
            )
        return node


def _retargeted(source: bytes, path: str) -> types.CodeType:
    tree = _Retarget().visit(ast.parse(source, path))
    inject = ast.parse(f"from {__name__} import CUDA as __rlpipe_cuda__").body
    tree.body[_header(tree) : _header(tree)] = inject
    return compile(ast.fix_missing_locations(tree), path, "exec")


def _header(tree: ast.Module) -> int:
    """Return the number of leading statements: docstring and `from __future__` imports."""
    for position, node in enumerate(tree.body):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            return position
    return len(tree.body)


def _cached(source: bytes, path: str) -> types.CodeType:
    """Return the code of `_retargeted` from a file of its own in `__pycache__`.

    Compiling the modules that the trainer imports takes 4 s of CPU time. Like pytest's rewritten
    modules, the code has another file name than the module's own bytecode.
    """
    file = Path(importlib.util.cache_from_source(path)).with_suffix(".rlpipe-cpu.pyc")
    key = importlib.util.MAGIC_NUMBER + hashlib.sha256(_THIS_SOURCE + source).digest()
    # A damaged or foreign file is written again.
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
        stored = file.read_bytes()
        if stored.startswith(key):
            return marshal.loads(stored[len(key) :])
    code = _retargeted(source, path)
    if not sys.dont_write_bytecode:
        # An installation may be read-only. Ranks that start at once each rename a complete file.
        with contextlib.suppress(OSError):
            draft = file.with_suffix(f".{os.getpid()}.draft")
            draft.write_bytes(key + marshal.dumps(code))
            draft.replace(file)
    return code


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles re-targeted source and applies the module's repair."""

    def get_code(self, fullname: str) -> types.CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if CUDA_FOUND or b"cuda" not in source:
            return super().get_code(fullname)
        return _cached(source, path)

    def exec_module(self, module: types.ModuleType) -> None:
        # Both packages warn at import about missing optional packages and about their own names.
        # Users cannot change that.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().exec_module(module)
        if repair := _REPAIRS.get(module.__name__):
            repair(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if (
            not fullname.startswith(tuple(f"{package}." for package in PACKAGES))
            and fullname not in PACKAGES
        ):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _disable_jit(module) -> None:
    if not CUDA_FOUND:
        # Compiling Megatron's three-line functions costs more than it saves.
        module.jit_fuser = lambda function: function


def _use_cpu_random_state(module) -> None:
    if not CUDA_FOUND:
        module._get_cuda_rng_state = CUDA.get_rng_state
        module._set_cuda_rng_state = CUDA.set_rng_state


def _repair_moe(module) -> None:
    # 0.16.1 reads `te_general_gemm` without importing it.
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None
    if not CUDA_FOUND:
        # Megatron's function converts only CUDA tensors to NumPy.
        module.maybe_move_tensor_to_cpu = _to_numpy


def _to_numpy(tensor, as_numpy: bool = False, **_unused) -> object:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _repair_latent_attention(module) -> None:
    if not isinstance(module.TELinear, type):
        module.TELinear = type("NoTELinear", (), {})
        module.HAVE_TE = False


def _repair_distributed_optimizer(module) -> None:
    if module.HAVE_APEX_OR_TE:
        return

    # With torch's Adam, Megatron's function requires a saved `step` per parameter, but Megatron
    # does not save it.

    def set_states(self, model_param, tensors) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        targets = {"param": main, **self.optimizer.state[main]}
        with torch.no_grad():
            for key in (targets.keys() & tensors.keys()) - {"step"}:
                targets[key].copy_(tensors[key])

    module.DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _use_foreach_gradient_norm(module) -> None:
    """Compute the gradient norm without one device synchronisation per parameter.

    Megatron does that without Transformer Engine and apex.
    """
    if not hasattr(module, "local_multi_tensor_l2_norm"):
        return

    untyped_torch: Any = torch

    def norm(_size, _flag, lists, _per_tensor) -> tuple[torch.Tensor, None]:
        norms = torch.stack(untyped_torch._foreach_norm(lists[0]))
        return torch.linalg.vector_norm(norms).reshape(1), None

    def scale(_size, _flag, lists, factor: float) -> None:
        assert lists[0] is lists[1]
        untyped_torch._foreach_mul_(lists[1], factor)

    module.l2_norm_impl = norm
    module.multi_tensor_scale_impl = scale


def _use_indexed_packed_rotation(module) -> None:
    """Rotate packed segments without device synchronisation.

    Megatron reads the length of each segment from the device in every layer, and slices the angles
    segment by segment.
    """

    def rotate(
        t,
        cu_seqlens,
        freqs,
        rotary_interleaved=False,
        multi_latent_attention=False,
        mscale=1.0,
        *,
        cp_group,
    ):
        size = cp_group.size()
        rank = cp_group.rank()
        starts = cu_seqlens // size
        index = torch.arange(len(t), device=t.device)
        segment = torch.searchsorted(starts, index, right=True) - 1
        within = index - starts[segment]
        half = (starts[segment + 1] - starts[segment]) // 2
        if size > 1:
            within = torch.where(
                within < half, rank * half + within, (2 * size - 2 - rank) * half + within
            )
        rotated = module._apply_rotary_pos_emb_bshd(
            t.unsqueeze(1),
            freqs.index_select(0, within),
            rotary_interleaved=rotary_interleaved,
            multi_latent_attention=multi_latent_attention,
            mscale=mscale,
        )
        return rotated.squeeze(1)

    module._apply_rotary_pos_emb_thd = rotate


def _fuse_weight_gradients(module) -> None:
    from rlpipe.engines.megatron.model.linear import with_fused_gradients

    name = "linear_with_grad_accumulation_and_async_allreduce"
    setattr(module, name, with_fused_gradients(getattr(module, name)))


def _write_checkpoints_by_threads(module) -> None:
    """Write checkpoints by threads instead of processes.

    Megatron forks a process that has many threads. It collects results through a spawned manager,
    which imports the main module again and outlives a rank that is killed.
    """
    results: queue.Queue = queue.Queue()
    write_bucket = module.FileSystemWriterAsync.write_preloaded_data

    def write(transforms, use_msc, _rank, buckets, _results) -> None:
        done = queue.Queue()
        tokens = queue.Queue()
        with ThreadPoolExecutor(len(buckets)) as pool:
            for i, bucket in enumerate(buckets):
                tokens.put(i)
                pool.submit(
                    write_bucket, transforms, i, bucket, done, tokens, True, use_msc=use_msc
                )
        written = dict(done.get_nowait() for _ in buckets)
        errors = [result for result in written.values() if isinstance(result, Exception)]
        results.put(errors[0] if errors else written)

    module._get_write_results_queue = lambda: results
    module.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write)


_REPAIRS: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.jit": _disable_jit,
    "megatron.core.tensor_parallel.layers": _fuse_weight_gradients,
    "megatron.core.tensor_parallel.random": _use_cpu_random_state,
    "megatron.core.transformer.moe.moe_utils": _repair_moe,
    "megatron.core.transformer.multi_latent_attention": _repair_latent_attention,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _write_checkpoints_by_threads,
    "megatron.core.models.common.embeddings.rope_utils": _use_indexed_packed_rotation,
    "megatron.core.optimizer.clip_grads": _use_foreach_gradient_norm,
    "megatron.core.optimizer.distrib_optimizer": _repair_distributed_optimizer,
}


def _install() -> None:
    imported = [name for name in sys.modules if name.startswith(PACKAGES)]
    if imported:
        raise ImportError(f"{__name__} must be imported before {imported[0]}")
    sys.meta_path.insert(0, _Finder())
    warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)


_install()
