"""`Server`: one SGLang server as a child process, with arguments from the configuration.

A server is an engine, or one node's part of an engine that spans nodes. Without CUDA it is SGLang's
CPU engine, started by `cpu_launch`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import httpx
import psutil

from rlpipe.config.arguments.check import check_sglang
from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.config.train import LoraConfig
from rlpipe.engines.sglang import adapters
from rlpipe.engines.sglang.process import LOOPBACK, ServerProcess, flags
from rlpipe.errors import ConfigError
from rlpipe.system import leftovers
from rlpipe.system.model_files import check_sizes, text_model
from rlpipe.system.rendezvous import gloo_settings

_CPU_CACHE_BYTES = 1024**3
_CPU_CACHE_TOKENS = 65536

CPU_BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
"""CPUs of each rank of the CPU engine. By default each rank takes a NUMA node, and the server ends
if the machine has fewer nodes."""

LONGEST_SOCKET_FOLDER = 107 - len("/torch-shm-dir-XXXXXX/manager.sock.12345")
"""A Unix socket path has at most 107 bytes; those of torch are the longest in TMPDIR."""

Device = Literal["cpu", "cuda"]

FAST_EXIT = {
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "false",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "false",
}
"""Without these a server that lost a child process collects stacks for 65 s before it ends."""
UNUSED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"
"""Model modules that a server does not import. By default it imports all of its 240."""
CHOOSE_A_MODEL = ("json_model_override_args", "model_impl", "speculative_algorithm")
"""Arguments with which SGLang may need another architecture than that of config.json."""
NO_BLAS_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy starts BLAS threads when it is imported. torch has its own threads, and a server with
threads cannot fork (`cpu_launch`)."""
COMPILE = "TORCHDYNAMO_DISABLE"
"""Variable that disables torch.compile, also in functions that SGLang always compiles, such as the
routing of GLM-4.5. On CPUs the first request waited for the C++ compiler: over 60 s on a busy
machine, where health checks ended the engine, instead of 0.8 s."""
TEMPLATE = "engine"
"""Name of the template process of servers on CPUs (`system.template`)."""
NO_IMAGE_CACHE = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
"""SGLang 0.5.21 keeps features of images when its caches are flushed. After a push they would be
those of the weights before."""
SLEEP_ENVIRONMENT = {
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}
"""Captures CUDA graphs in memory that can be released, and makes `/health` sample no token. The
router calls `/health` before it admits an engine. A server without its cache would crash, and a
paused one would not answer."""
COLOCATED_MEMORY_FRACTION = {True: 0.8, False: 0.4}
"""Default `mem_fraction_static` on GPUs that the trainer uses too. True: both sides sleep while the
other works."""
SLEEP_ARGUMENTS = {"enable_memory_saver": True, "cuda_graph_backend_prefill": "disabled"}
"""With CUDA graphs of prefill, SGLang's default, a server with the memory saver does not start."""
SGLANG_GRAPH_BATCH = 256
"""Largest batch with a CUDA graph of decoding, by default, on one large GPU. Larger batches launch
kernel by kernel. With 512 requests at once a 0.6B model sampled 24k to 25k tokens/s that way, and
39k to 43k with graphs for 512 (H200)."""
LARGE_GPU_MIB = 60 * 1024
"""SGLang captures graphs for smaller batches on GPUs with less memory than this."""
MIN_HEAD_DIM = 64
"""Smallest head size of FlashAttention and FlashInfer. Triton's attention takes any."""
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|Not enough (GPU )?memory", re.IGNORECASE
)
"""In the log of a server whose GPU is too small for weights, cache or CUDA graphs."""
MORE_MEMORY = (
    "the GPU is too small for these settings: reduce engine.sglang.context_length; use more GPUs "
    "for an engine (resources.rollout_num_gpus_per_engine); change engine.sglang."
    "mem_fraction_static (larger: more cache; smaller: more room for activations and other "
    "programs on the GPU)"
)
_ALWAYS = {
    "skip_server_warmup": True,
    "log_level_http": "warning",
    "incremental_streaming_output": True,
}

PRIORITIES = {
    "enable_priority_scheduling": True,
    "disable_priority_preemption": True,
    "default_priority_value": 0,
}
"""Lets `Engine.score` pass the requests that wait for their prefill. After a push into a busy
engine these are all that were in flight, which for 512 of a 4B model are seconds on an H200."""
PRIORITY_POLICIES = ("fcfs", "lof")
"""Values of `schedule_policy` with which SGLang knows priorities. The first is its default."""


class Part(NamedTuple):
    """Position of a server in an engine that spans nodes."""

    node: int
    """Node 0 answers all requests. The others follow it, and answer health checks only."""
    nodes: int
    meeting: str
    """`host:port` on node 0 where the servers connect; a new one for each start of the engine."""

    def arguments(self) -> dict[str, object]:
        """Return SGLang's arguments for this position."""
        return {"nnodes": self.nodes, "node_rank": self.node, "dist_init_addr": self.meeting}


class Server(ServerProcess):
    """One SGLang server. See `ServerProcess` for its life."""

    _temporary_folder: Path | None = None

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
        lora: LoraConfig | None = None,
        device: Device | None = None,
        devices: Sequence[str] | None = None,
        part: Part | None = None,
    ) -> None:
        """Prepare a server without starting it.

        `weight_version`: stamp of the directory's weights, until the first push.
        `deterministic`: sample by each request's seed, independent of the batch. CUDA only.
        `reads_text`: load the tokenizer, for stop texts and minimum lengths.
        `names_experts`: report the experts of each token in a mixture of experts. Costs 4 bytes ×
        layers × experts for each cached token in CPU memory.
        `lora`: settings of adapters that pushes replace (`adapters`); None: pushes replace weights.
        `port`: None picks a free one. `device`: None is CUDA if torch sees a GPU.
        `devices`: GPUs as in CUDA_VISIBLE_DEVICES; None for those of this process.
        `part`: position in an engine that spans nodes; None for a whole engine.
        Raises: ConfigError for an argument in `engine.sglang` that is not allowed.
        """
        self.device: Device = device or local_device()
        module = f"rlpipe.engines.sglang.{'cpu_launch' if self.device == 'cpu' else 'launch'}"
        super().__init__("SGLang server", module, config.host or LOOPBACK, port, log_path)
        self.name = f"SGLang server {self.url}"
        self._resources = resources
        self._devices = devices
        self._part = part
        check_sglang(config.sglang)
        on_cpu = self.device == "cpu"
        path = Path(model_path)
        defaults = _cpu_defaults(path) if on_cpu else _gpu_defaults(path, resources, config, dtype)
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
            **_features(lora, names_experts, deterministic, on_cpu=on_cpu),
            **(_ALWAYS | _priorities(config)),
            **defaults,
            **config.sglang,
        }

    def arguments(self) -> list[str]:
        return flags("sglang", self._arguments)

    def advice(self, log: str) -> str:
        """Return what to do about a server that ended while starting, from the end of its log."""
        return (
            f"{MORE_MEMORY}; read {self.log_path}"
            if OUT_OF_MEMORY.search(log)
            else super().advice(log)
        )

    @property
    def template(self) -> str | None:
        # Packages of the template have read `COMPILE`.
        compiles = bool(self._arguments.get("enable_torch_compile"))
        return TEMPLATE if self.device == "cpu" and not compiles else None

    def environment(self) -> dict[str, str]:
        variables = {**FAST_EXIT, **NO_IMAGE_CACHE}
        if self._temporary_folder is not None:
            variables["TMPDIR"] = str(self._temporary_folder)
        meeting_host = self._part.meeting.rpartition(":")[0] if self._part else self.host
        variables |= gloo_settings(meeting_host)
        if self.device == "cpu":
            threads = self._resources.threads_per_process
            variables |= {"OMP_NUM_THREADS": str(threads), **NO_BLAS_THREADS}
            if COMPILE not in os.environ and not self._arguments.get("enable_torch_compile"):
                variables[COMPILE] = "1"
            if UNUSED_MODELS not in os.environ and not self._arguments.keys() & {*CHOOSE_A_MODEL}:
                variables[UNUSED_MODELS] = ",".join(unused_models(self._arguments["model_path"]))
            num_ranks = self._resources.rollout_num_gpus_per_engine
            if num_ranks > 1 and CPU_BINDING not in os.environ:
                ranks_here = num_ranks // (self._part.nodes if self._part else 1)
                variables[CPU_BINDING] = _cpu_binding(ranks_here, threads)
        if self._devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices)
        if self._resources.engines_sleep:
            variables |= SLEEP_ENVIRONMENT
        return variables

    def start(self) -> None:
        """Start the process; see `ServerProcess.start`. Its sockets are in a folder of its own."""
        folder = Path(tempfile.mkdtemp(prefix="sglang-"))
        if len(str(folder)) > LONGEST_SOCKET_FOLDER:
            folder.rmdir()
        else:
            self._temporary_folder = folder
        super().start()
        if self._temporary_folder is not None and self.pid is not None:
            leftovers.record(self.pid, self._temporary_folder)

    def stop(self) -> None:
        """Kill the process group; see `ServerProcess.stop`."""
        super().stop()
        leftovers.sweep()

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until the server answers; see `ServerProcess.wait_ready`."""
        super().wait_ready(deadline_s)
        with suppress(psutil.Error):
            server = psutil.Process(self.pid)
            processes = [server, *server.children(recursive=True)]
            leftovers.record_shared_memory([process.pid for process in processes])
        # Excludes long-lived objects from garbage collection. A cache flush then takes 1 ms instead
        # of 0.3 s.
        httpx.post(f"{self.url}/freeze_gc", timeout=30.0)


def local_device() -> Device:
    """Return the device of this machine.

    Raises: ConfigError if the machine has a GPU and SGLang is installed without GPU support.
    """
    # torch of a CPU environment finds no GPU, and importing it takes 2 s.
    if metadata.version("torch").endswith("+cpu"):
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    if importlib.util.find_spec("sgl_kernel") is None:
        raise ConfigError(
            "SGLang cannot use this machine's GPUs",
            where=sys.prefix,
            found="an environment for CPUs: no package sgl_kernel",
            do="RLPIPE_EXTRAS=gpu,dev make setup; or, to sample and train on CPUs: "
            "CUDA_VISIBLE_DEVICES=",
        )
    return "cuda"


def unused_models(model_path: str | Path) -> list[str]:
    """Return the model modules of SGLang that do not name the architectures of a directory.

    The others define the architectures, or models that contain them. [] if no module names them:
    SGLang's own error then lists all architectures. The import of all models took 0.7 CPU seconds
    of a start, that of the needed ones takes 0.1.
    """
    package = importlib.util.find_spec("sglang")
    architectures = json.loads((Path(model_path) / "config.json").read_text()).get("architectures")
    if package is None or not package.submodule_search_locations or not architectures:
        return []
    modules = list(Path(package.submodule_search_locations[0]).glob("srt/models/*.py"))
    used = [
        module for module in modules if any(name in module.read_text() for name in architectures)
    ]
    # SGLang falls back to transformers' own model.
    unused = {module.stem for module in modules} - {module.stem for module in used}
    return sorted(unused - {"transformers"}) if used else []


def _cpu_binding(ranks: int, threads: int) -> str:
    """Return the CPUs of each rank on this machine in the format of `CPU_BINDING`."""
    cpus = sorted(os.sched_getaffinity(0))
    by_rank = (
        [cpus[(rank * threads + n) % len(cpus)] for n in range(threads)] for rank in range(ranks)
    )
    return "|".join(",".join(map(str, rank_cpus)) for rank_cpus in by_rank)


def _features(
    lora: LoraConfig | None, names_experts: bool, deterministic: bool, *, on_cpu: bool
) -> dict[str, object]:
    """Return the arguments of features that a run may need. Arguments: as `Server`."""
    return {
        **({"enable_return_routed_experts": True} if names_experts else {}),
        **(adapters.server_arguments(lora, on_cpu=on_cpu) if lora else {}),
        **({"enable_deterministic_inference": True} if deterministic and not on_cpu else {}),
    }


def _priorities(config: EngineConfig) -> dict[str, object]:
    policy = config.sglang.get("schedule_policy", PRIORITY_POLICIES[0])
    return dict(PRIORITIES) if policy in PRIORITY_POLICIES else {}


def _gpu_defaults(
    model_path: Path,
    resources: ResourcesConfig,
    config: EngineConfig,
    dtype: str,
) -> dict[str, object]:
    """Return the arguments of a server on GPUs. Raises: ConfigError for float32."""
    # SGLang's CUDA kernels (norms, activations) do not compute in float32.
    if dtype == "float32":
        raise ConfigError(
            "engines on GPUs sample in 16 bit",
            where="model.dtype",
            found=dtype,
            expected="bfloat16",
            do="model.dtype=bfloat16; or, to sample and train on CPUs: CUDA_VISIBLE_DEVICES=",
        )
    arguments = _decode_graphs(config)
    if _has_small_heads(model_path):
        arguments["attention_backend"] = "triton"
    if resources.shares_gpus:
        both_sleep = resources.engines_sleep and resources.trainer_sleeps
        arguments["mem_fraction_static"] = COLOCATED_MEMORY_FRACTION[both_sleep]
    if resources.engines_sleep:
        arguments |= SLEEP_ARGUMENTS
    return arguments


def _has_small_heads(model_path: Path) -> bool:
    """True if the head size is below `MIN_HEAD_DIM`. False if the directory does not give it."""
    try:
        model = text_model(json.loads((model_path / "config.json").read_text()))
        size = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        return size < MIN_HEAD_DIM and not model.get("kv_lora_rank")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError):
        return False


def _decode_graphs(config: EngineConfig) -> dict[str, object]:
    """Return arguments for CUDA graphs of as many requests as an engine gets at once.

    Returns {} for SGLang's default, also on a GPU with little memory.
    """
    concurrency = config.server_concurrency
    if (
        concurrency <= SGLANG_GRAPH_BATCH
        or "speculative_algorithm" in config.sglang
        or (smallest_gpu_mib() or 0) < LARGE_GPU_MIB
    ):
        return {}
    return {"cuda_graph_max_bs_decode": concurrency}


def smallest_gpu_mib() -> int | None:
    """Return the memory of this machine's smallest GPU in MiB; None without nvidia-smi."""
    # torch would create a CUDA context, which takes GPU memory.
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
        return min(map(int, output.split()), default=None)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _cpu_defaults(model_path: Path) -> dict[str, object]:
    """Return the arguments of the CPU engine. Raises: ConfigError for an unusable config.json."""
    try:
        model = text_model(json.loads((model_path / "config.json").read_text()))
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
        # At most 1 GiB. SGLang's default is a share of all memory.
        cache_tokens = _CPU_CACHE_BYTES // (2 * 4 * model["num_hidden_layers"] * heads * size)
    except (LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        where = f"{model_path}/config.json"
        raise ConfigError(
            "config.json has no usable model sizes",
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
