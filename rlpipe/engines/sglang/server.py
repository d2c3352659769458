"""`Server`: one SGLang server as a child process, with the arguments that follow from our
configuration.

It is an engine, or the part of one on one of its nodes. Without CUDA it is SGLang's CPU engine
behind `cpu_launch`. Not here: talking to it (`admin`), finding it (`router`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import httpx

from rlpipe.config.arguments.check import check_sglang
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.engines.sglang.process import LOOPBACK, ServerProcess, flags
from rlpipe.errors import ConfigError
from rlpipe.model_dir import check_sizes
from rlpipe.system.rendezvous import gloo_settings

_CPU_CACHE_BYTES = 1024**3
_CPU_CACHE_TOKENS = 65536

BOUND = "SGLANG_CPU_OMP_THREADS_BIND"
"""The CPU engine's own choice is a NUMA node for each rank of the engine; it ends where there are
fewer."""

Device = Literal["cpu", "cuda"]


DIE_AT_ONCE = {
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
}
"""A server that lost a process of its own would else stand still for 65 s, collecting stacks,
before it ends and is replaced."""


NO_BLAS_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's, which would begin when it is imported: torch has its own, and a server that has threads
does not fork."""
SLEEPS = {
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}
"""CUDA graphs are captured in memory that can be given up, too; and `/health`, which the router
asks of an engine that it is to admit, samples no token then: without its cache the server would
end, and paused it would not answer."""
SHARED = {True: 0.8, False: 0.4}
"""`mem_fraction_static` on GPUs that the trainer is on too, if none is given: both make room for
the other, or not both."""
WITH_MEMORY_SAVER = {"enable_memory_saver": True, "cuda_graph_backend_prefill": "disabled"}
"""Only graphs of decoding can be: with those of prefill, of which there are any by default, the
server does not start."""
SGLANG_S_GRAPHS = 256
"""Largest batch that SGLang has a CUDA graph of decoding for, on one large GPU. A larger one is
launched kernel by kernel: asked 512 requests at once, a 0.6B model sampled 24-25k tokens/s so, and
39-43k with graphs for as many (H200)."""
LARGE_GPU_MIB = 60 * 1024
"""From here on SGLang has that many; on smaller ones it has fewer, for their memory's sake."""
LEAST_HEAD_DIM = 64
"""Of what FlashAttention and FlashInfer are built for; Triton's attention takes any."""


class Part(NamedTuple):
    """Which of an engine's servers it is, if the engine spans nodes."""

    node: int
    """0 answers all requests; the others do what it tells them, and say only that they are
    there."""
    nodes: int
    meeting: str
    """`host:port` of node 0, where the servers find each other; another for each start of the
    engine."""

    def arguments(self) -> dict[str, object]:
        """SGLang's."""
        return {"nnodes": self.nodes, "node_rank": self.node, "dist_init_addr": self.meeting}


class Server(ServerProcess):
    """One SGLang server. `start()`, `wait_ready(deadline_s)`, `stop()`, `alive`, `url`."""

    def __init__(
        self,
        model_path: str | Path,
        config: EngineConfig,
        resources: ResourcesConfig,
        *,
        dtype: str,
        port: int | None,
        log_path: str | Path,
        seed: int,
        weight_version: str | None = None,
        trust_remote_code: bool = False,
        deterministic: bool = False,
        reads_text: bool = False,
        names_experts: bool = False,
        device: Device | None = None,
        devices: Sequence[str] | None = None,
        part: Part | None = None,
    ) -> None:
        """`port` None picks a free one. `weight_version` is the stamp of the directory's weights,
        until the first push.

        `deterministic`: on CUDA, sample by each request's seed whatever else is in its batch. The
        CPU engine cannot. `reads_text`: it has the tokenizer, for what needs one: stop texts, least
        lengths. `names_experts`: it can say which experts it routed tokens to (a mixture of
        experts; it keeps them for all cached tokens, 4 bytes × layers × experts a token in CPU
        memory). `device` None is CUDA if torch sees any. `devices`: its GPUs as
        CUDA_VISIBLE_DEVICES names them, None those we see. `part`: of an engine that spans nodes;
        None: it is all of it. Raises: ConfigError for an argument in `engine.sglang` that cannot be
        taken.
        """
        self.device: Device = device or _device()
        module = f"rlpipe.engines.sglang.{'cpu_launch' if self.device == 'cpu' else 'launch'}"
        super().__init__("SGLang server", module, config.host or LOOPBACK, port, log_path)
        self.name = f"SGLang server {self.url}"
        self.threads = resources.threads_per_process
        self._sleeps = resources.engines_sleep
        self._ranks = resources.rollout_num_gpus_per_engine
        self._devices = devices
        self._part = part
        self._arguments = {
            "model_path": model_path,
            "host": self.host,
            "port": self.port,
            "dtype": dtype,
            "tp_size": resources.rollout_num_gpus_per_engine,
            **(part.arguments() if part else {}),
            "random_seed": seed,
            "trust_remote_code": trust_remote_code,
            "weight_version": weight_version,
            "skip_tokenizer_init": not reads_text,
        }
        if names_experts:
            self._arguments["enable_return_routed_experts"] = True
        check_sglang(config.sglang)
        defaults = (
            _cpu_defaults(Path(model_path))
            if self.device == "cpu"
            else _gpu_defaults(
                Path(model_path), resources, config, dtype, deterministic=deterministic
            )
        )
        ours = {
            "skip_server_warmup": True,
            "log_level_http": "warning",
            "incremental_streaming_output": True,
        }
        self._arguments |= {**ours, **defaults, **config.sglang}

    def arguments(self) -> list[str]:
        return flags("sglang", self._arguments)

    def environment(self) -> dict[str, str]:
        threads = (
            {"OMP_NUM_THREADS": str(self.threads), **NO_BLAS_THREADS}
            if self.device == "cpu"
            else {}
        )
        if self.device == "cpu" and self._ranks > 1 and BOUND not in os.environ:
            threads[BOUND] = _cpus(
                self._ranks // (self._part.nodes if self._part else 1), self.threads
            )
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(self._devices)} if self._devices else {}
        met_at = self._part.meeting.rpartition(":")[0] if self._part else self.host
        return {
            **DIE_AT_ONCE,
            **gloo_settings(met_at),
            **threads,
            **devices,
            **(SLEEPS if self._sleeps else {}),
        }

    def wait_ready(self, deadline_s: float) -> None:
        """As the base, then freezes the server's long-lived objects: a cache flush takes 1 ms then,
        0.3 s else."""
        super().wait_ready(deadline_s)
        httpx.post(f"{self.url}/freeze_gc", timeout=30.0)


def _device() -> Device:
    """Raises: ConfigError where there is a GPU, and SGLang without what it needs for one."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    if importlib.util.find_spec("sgl_kernel") is None:
        raise ConfigError(
            "SGLang cannot use this machine's GPUs",
            where=sys.prefix,
            found="an environment for CPUs: no package sgl_kernel",
            do="RLPIPE_EXTRAS=gpu,dev make setup; or, to sample and train on CPUs: CUDA_VISIBLE_DEVICES=",
        )
    return "cuda"


def _cpus(ranks: int, threads: int) -> str:
    """The CPUs of each rank on this machine, as `BOUND` takes them."""
    ours = sorted(os.sched_getaffinity(0))
    of_ranks = (
        [ours[(rank * threads + n) % len(ours)] for n in range(threads)] for rank in range(ranks)
    )
    return "|".join(",".join(map(str, one)) for one in of_ranks)


def _gpu_defaults(
    model_path: Path,
    resources: ResourcesConfig,
    config: EngineConfig,
    dtype: str,
    *,
    deterministic: bool,
) -> dict[str, object]:
    """Raises: ConfigError for float32, which SGLang's CUDA kernels (norms, activations) do not
    compute."""
    if dtype == "float32":
        raise ConfigError(
            "engines on GPUs sample in 16 bit",
            where="model.dtype",
            found=dtype,
            expected="bfloat16",
            do="model.dtype=bfloat16; or, to sample and train on CPUs: CUDA_VISIBLE_DEVICES=",
        )
    return {
        **_decode_graphs(config),
        **({"enable_deterministic_inference": True} if deterministic else {}),
        **({"attention_backend": "triton"} if _small_heads(model_path) else {}),
        **(
            {"mem_fraction_static": SHARED[resources.engines_sleep and resources.trainer_sleeps]}
            if resources.colocate
            else {}
        ),
        **(WITH_MEMORY_SAVER if resources.engines_sleep else {}),
    }


def _small_heads(model_path: Path) -> bool:
    """False of a directory that does not say, which is left to SGLang."""
    try:
        model = json.loads((model_path / "config.json").read_text())
        size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        return size < LEAST_HEAD_DIM and not model.get("kv_lora_rank")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError):
        return False


def _decode_graphs(config: EngineConfig) -> dict[str, object]:
    """Graphs for as many requests as the engine is sent at once, where there is room; else as
    SGLang has it."""
    many = config.server_concurrency
    if (
        many <= SGLANG_S_GRAPHS
        or "speculative_algorithm" in config.sglang
        or (_gpu_mib() or 0) < LARGE_GPU_MIB
    ):
        return {}
    return {"cuda_graph_max_bs_decode": many}


def _gpu_mib() -> int | None:
    """Memory of this machine's smallest GPU, asked without a CUDA context; None where nvidia-smi
    does not say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    ask = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(map(int, said.split()), default=None)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _cpu_defaults(model_path: Path) -> dict[str, object]:
    """What the CPU engine needs, and a cache of at most 1 GiB or 65536 tokens (SGLang would take a
    share of all memory)."""
    try:
        model = json.loads((model_path / "config.json").read_text())
        check_sizes(model, f"{model_path}/config.json")
    except FileNotFoundError as error:
        raise ConfigError(
            "not a Hugging Face model directory",
            where="model.source",
            found=f"no config.json in {model_path}",
        ) from error
    try:
        heads = model.get("num_key_value_heads") or model["num_attention_heads"]
        size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        cache_tokens = _CPU_CACHE_BYTES // (2 * 4 * model["num_hidden_layers"] * heads * size)
    except (LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        where = f"{model_path}/config.json"
        raise ConfigError(
            "not the sizes of a model",
            where=where,
            found=repr(error),
            expected="whole numbers above 0",
        ) from error
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,
        "max_total_tokens": min(_CPU_CACHE_TOKENS, cache_tokens),
    }
