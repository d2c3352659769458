"""Command lines, ports, and servers that die (rlpipe.engines.sglang.process and server)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.engines.sglang.process import flags
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import (
    COMPILE,
    CPU_BINDING,
    UNUSED_MODELS,
    Device,
    Part,
    Server,
    unused_models,
)
from rlpipe.errors import ConfigError, DeadlineExceeded, EngineUnavailable, ResourceError
from rlpipe.system import ports
from rlpipe.system.rendezvous import GLOO
from tests.live_engine import START_S, make_model, make_server

CHILD = """
import sys, time
from pathlib import Path
from rlpipe.config.model import EngineConfig
from rlpipe.engines.sglang.router import Router
from tests.live_engine import make_server
folder = Path(sys.argv[1])
server = make_server(folder / "model", folder / "server.log")
processes = [server, Router(EngineConfig(), port=None, log_path=folder / "router.log")]
for process in processes:
    process.start()
print(*[process.process.pid for process in processes], processes[1].port, flush=True)
time.sleep(600)
"""


def _server(model_dir: Path, log_path: Path, **sglang: object) -> Server:
    config = EngineConfig(sglang=sglang)
    return Server(
        model_dir,
        config,
        ResourcesConfig(),
        dtype="float32",
        port=None,
        log_path=log_path,
        seed=1,
        device="cpu",
    )


def test_arguments_keep_the_names_of_sglang():
    table = {
        "mem_fraction_static": 0.8,
        "enable-metrics": True,
        "disable_radix_cache": False,
        "lora_paths": ["a", "b"],
        "x": None,
    }
    assert flags("sglang", table) == [
        "--mem-fraction-static",
        "0.8",
        "--enable-metrics",
        "--lora-paths",
        "a",
        "b",
    ]


def test_owned_arguments_are_refused_with_the_key_to_use(tmp_path):
    with pytest.raises(
        ConfigError, match=r"(?s)engine.sglang.tp_size.*resources.rollout_num_gpus_per_engine"
    ):
        _server(tmp_path, tmp_path / "log", tp_size=2)
    with pytest.raises(
        ConfigError, match=r"(?s)engine.router.worker_urls.*rlpipe registers the engines"
    ):
        Router(
            EngineConfig(router={"worker_urls": ["http://x"]}), port=None, log_path=tmp_path / "log"
        )


def test_a_configured_argument_replaces_the_default(tmp_path):
    make_model(tmp_path / "model", seed=0)
    line = _server(tmp_path / "model", tmp_path / "log", max_total_tokens=100).arguments()
    assert (
        line.count("--max-total-tokens") == 1
        and line[line.index("--max-total-tokens") + 1] == "100"
    )


@pytest.mark.parametrize(
    ("policy", "knows"), [(None, True), ("fcfs", True), ("lof", True), ("lpm", False)]
)
def test_checks_pass_waiting_requests_where_the_schedule_policy_knows_priorities(
    tmp_path, policy, knows
):
    make_model(tmp_path / "model", seed=0)
    table = {} if policy is None else {"schedule_policy": policy}
    line = _server(tmp_path / "model", tmp_path / "log", **table).arguments()
    assert ("--enable-priority-scheduling" in line) == knows


@pytest.mark.parametrize(
    ("resources", "saves"),
    [({"colocate": True}, True), ({"colocate": True, "offload_rollout": False}, False)],
)
def test_a_colocated_engine_can_release_memory_and_keeps_the_order_of_its_gpus(
    tmp_path, resources: dict[str, bool], saves: bool
):
    server = Server(
        tmp_path,
        EngineConfig(),
        ResourcesConfig.model_validate(resources),
        dtype="bfloat16",
        port=None,
        log_path=tmp_path / "log",
        seed=1,
        device="cuda",
        devices=("3", "2"),
    )
    assert ("--enable-memory-saver" in server.arguments()) == saves
    line = server.arguments()
    assert line[line.index("--mem-fraction-static") + 1] == ("0.8" if saves else "0.4")
    environment = server.environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == "3,2"
    assert environment.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == ("true" if saves else None)


def test_servers_of_an_engine_on_several_nodes_get_their_node_rank_and_cpus(tmp_path, monkeypatch):
    make_model(tmp_path / "model", seed=0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 7})
    monkeypatch.delenv(GLOO, raising=False)

    def server_of(part: Part | None) -> Server:
        resources = ResourcesConfig(
            rollout_num_gpus=4, rollout_num_gpus_per_engine=4, num_gpus_per_node=2
        )
        common = {"dtype": "float32", "port": None, "log_path": tmp_path / "log", "seed": 1}
        return Server(
            tmp_path / "model", EngineConfig(), resources, device="cpu", part=part, **common
        )

    server = server_of(Part(1, 2, "10.0.0.1:20000"))
    line = " ".join(server.arguments())
    assert "--tp-size 4 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:20000" in line
    assert server.environment()[CPU_BINDING] == "4|5"
    assert GLOO not in server.environment(), "the others are on other machines"
    assert (
        server_of(Part(1, 2, "127.0.0.1:20000")).environment()[GLOO]
        == server_of(None).environment()[GLOO]
        == "lo"
    )
    assert server_of(None).environment()[CPU_BINDING] == "4|5|7|4"
    assert "--nnodes" not in server_of(None).arguments()
    monkeypatch.setenv(CPU_BINDING, "0-3|4-7")
    assert CPU_BINDING not in server.environment(), "the user's setting stays"


@pytest.mark.parametrize(
    ("device", "deterministic", "expected"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_engines_on_gpus_sample_by_seed_in_a_deterministic_run(
    tmp_path, device: Device, deterministic: bool, expected: bool
):
    make_model(tmp_path / "model", seed=0)
    server = Server(
        tmp_path / "model",
        EngineConfig(),
        ResourcesConfig(),
        dtype="float32" if device == "cpu" else "bfloat16",
        port=None,
        log_path=tmp_path / "log",
        seed=1,
        device=device,
        deterministic=deterministic,
    )
    assert ("--enable-deterministic-inference" in server.arguments()) is expected


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a Hugging Face model directory"):
        _server(tmp_path, tmp_path / "log")


def test_an_environment_for_cpus_is_refused_on_a_machine_with_a_gpu(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    """Without its kernels SGLang's server would end with an ImportError deep in a log."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cu130")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = {"dtype": "float32", "port": None, "log_path": tmp_path / "log", "seed": 1}
    with pytest.raises(
        ConfigError,
        match=r"cannot use this machine(.|\n)*no package sgl_kernel(.|\n)*RLPIPE_EXTRAS=gpu,dev",
    ):
        Server(tmp_path, EngineConfig(), ResourcesConfig(), **arguments)


@pytest.fixture
def on_gpu(tmp_path) -> Callable[..., list[str]]:
    """Return the command line of a server on a GPU with these engine and model settings."""

    def line(
        dtype: str = "bfloat16", sglang: dict[str, object] | None = None, **model: object
    ) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(model))
        engine = EngineConfig(sglang=sglang or {})
        common = {"dtype": dtype, "port": None, "log_path": tmp_path / "log", "seed": 1}
        return Server(tmp_path, engine, ResourcesConfig(), device="cuda", **common).arguments()

    return line


def test_a_model_in_32_bit_is_refused_on_gpus(on_gpu: Callable[..., list[str]]):
    with pytest.raises(ConfigError, match=r"model.dtype(.|\n)*float32(.|\n)*model.dtype=bfloat16"):
        on_gpu("float32")


@pytest.mark.parametrize(
    ("model", "small"),
    [
        ({"hidden_size": 128, "num_attention_heads": 4}, True),
        ({"hidden_size": 1024, "num_attention_heads": 16}, False),
        ({"hidden_size": 1024, "num_attention_heads": 32, "head_dim": 128}, False),
        ({"hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512}, False),
        ({"text_config": {}}, False),
    ],
)
def test_a_model_with_small_heads_uses_triton_attention(
    on_gpu: Callable[..., list[str]], model: dict[str, int], small: bool
):
    line = on_gpu(**model)
    assert ("--attention-backend" in line) is small
    assert not small or line[line.index("--attention-backend") + 1] == "triton"
    chosen = on_gpu(sglang={"attention_backend": "fa3"}, **model)
    assert chosen[chosen.index("--attention-backend") + 1] == "fa3"


@pytest.mark.parametrize(
    ("output", "sglang", "graphs"),
    [
        ("143771\n143771\n", {}, "512"),
        ("143771\n143771\n", {"cuda_graph_max_bs_decode": 64}, "64"),
        ("143771\n", {"speculative_algorithm": "EAGLE"}, None),
        ("143771\n24564\n", {}, None),
        ("No devices were found\n", {}, None),
        ("", {}, None),
    ],
)
def test_a_large_gpu_captures_graphs_for_all_concurrent_requests(
    on_gpu: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    sglang: dict[str, object],
    graphs: str | None,
):
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '{output}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    line = on_gpu(sglang=sglang)
    assert (
        line[line.index("--cuda-graph-max-bs-decode") + 1]
        if "--cuda-graph-max-bs-decode" in line
        else None
    ) == graphs


def test_a_free_port_can_include_the_following_ports(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setattr(ports, "RANGE", range(taken - 100, taken))
        assert ports.free_port(following=3) < taken - 3
        with pytest.raises(ResourceError, match="no port is free"):
            ports.free_port(following=100)


@pytest.mark.integration
def test_a_taken_port_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ResourceError, match=f"127.0.0.1:{port}") as caught:
            Router(EngineConfig(), port=port, log_path=tmp_path / "log").start()
        # No key chooses the port, so another start is the advice.
        assert "repeat the command" in str(caught.value.do)


@pytest.mark.integration
def test_the_error_of_a_server_that_dies_while_starting_shows_its_log(tmp_path):
    router = Router(
        EngineConfig(router={"prometheus_port": -1}), port=None, log_path=tmp_path / "log"
    )
    router.start()
    with pytest.raises(EngineUnavailable, match=r"(?s)ended while starting.*OverflowError"):
        router.wait_ready(60)
    assert not router.alive


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    ],
)
def test_the_error_of_an_engine_on_a_too_small_gpu_names_the_settings(tmp_path, line: str):
    make_model(tmp_path / "model", seed=0)
    server = _server(tmp_path / "model", tmp_path / "log")
    (tmp_path / "log").write_text(f"{line}\n")
    server.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    server.process.wait()
    with pytest.raises(EngineUnavailable) as caught:
        server.wait_ready(1)
    assert line in str(caught.value.found)
    for part in ("engine.sglang.mem_fraction_static", "context_length", str(tmp_path / "log")):
        assert part in str(caught.value.do)


@pytest.mark.integration
def test_the_error_of_a_server_that_is_not_ready_in_time_names_the_server(tmp_path):
    router = Router(EngineConfig(), port=None, log_path=tmp_path / "log")
    router.start()
    assert router.pid is not None
    os.kill(router.pid, signal.SIGSTOP)  # it may be ready as soon as this process asks
    with pytest.raises(
        DeadlineExceeded,
        match=f"(?s)sglang-router {router.url}: the server is not ready.*within 0 s",
    ):
        router.wait_ready(0)
    router.stop()
    router.stop()
    assert not router.alive


@pytest.mark.integration
def test_a_server_that_loses_a_child_process_ends_at_once(tmp_path):
    make_model(tmp_path / "model", seed=0)
    server = make_server(tmp_path / "model", tmp_path / "log")
    server.start()
    try:
        server.wait_ready(START_S)
        assert server.process is not None
        processes = psutil.Process(server.process.pid).children(recursive=True)
        next(
            process for process in processes if "detokenizer" in " ".join(process.cmdline())
        ).kill()
        assert server.process.wait(20) is not None
    finally:
        server.stop()


@pytest.mark.long
@pytest.mark.integration
def test_all_processes_end_when_the_parent_is_killed(tmp_path, repository):
    make_model(tmp_path / "model", seed=0)
    parent = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=repository,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    *pids, port = map(int, parent.stdout.readline().split())
    leaders = [psutil.Process(pid) for pid in pids]
    everyone: list[psutil.Process] = []
    try:
        end_s = time.monotonic() + 120
        while len(leaders[0].children(recursive=True)) < 3 or not _listens(port):
            assert time.monotonic() < end_s and leaders[0].is_running()
            time.sleep(0.2)
        everyone = [
            process for leader in leaders for process in (leader, *leader.children(recursive=True))
        ]
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        end_s = time.monotonic() + 10
        while left := _running(everyone):
            assert time.monotonic() < end_s, left
            time.sleep(0.05)
    finally:
        parent.kill()
        for process in _running(everyone or leaders):
            process.kill()


def _running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("threads", "settings", "kind"),
    [
        (0, {}, "fork"),
        (1, {}, "spawn"),
        (0, {"dp_size": 2}, "spawn"),
        (0, {"numa_node": [0]}, "spawn"),
    ],
)
def test_a_server_without_cuda_forks_its_processes_if_that_is_safe(
    threads: int, settings: dict[str, object], kind: str
):
    starts = f"""
import multiprocessing, threading
from types import SimpleNamespace
from rlpipe.engines.sglang.cpu_launch import _fork_single_threaded
for _ in range({threads}):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
arguments = SimpleNamespace(**{{"dp_size": 1, "numa_node": None, **{settings}}})
spawn = lambda _: multiprocessing.set_start_method("spawn", force=True) or 7
assert _fork_single_threaded(spawn, arguments) == 7
print(multiprocessing.get_start_method())
"""
    done = subprocess.run(
        [sys.executable, "-c", starts], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == kind


def test_a_server_on_cpus_imports_the_modules_of_its_model_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_model(tmp_path / "model", seed=0)

    def variables(**sglang: object) -> dict[str, str]:
        return _server(tmp_path / "model", tmp_path / "log", **sglang).environment()

    unused = variables()[UNUSED_MODELS].split(",")
    assert len(unused) > 200
    assert {"llama", "deepseek_v2"} < set(unused)
    assert not {"qwen3", "transformers"} & set(unused)
    assert UNUSED_MODELS not in variables(model_impl="transformers")
    monkeypatch.setenv(UNUSED_MODELS, "llama")
    assert UNUSED_MODELS not in variables(), "the user's setting stays"


def test_a_server_on_cpus_compiles_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_model(tmp_path / "model", seed=0)

    def variables(**sglang: object) -> dict[str, str]:
        return _server(tmp_path / "model", tmp_path / "log", **sglang).environment()

    assert variables()[COMPILE] == "1"
    assert COMPILE not in variables(enable_torch_compile=True)
    monkeypatch.setenv(COMPILE, "0")
    assert COMPILE not in variables(), "the user's setting stays"


@pytest.mark.parametrize("architectures", [[], None, ["OfNoModule"]])
def test_a_server_of_an_architecture_that_no_module_names_imports_all(
    architectures: list[str] | None, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    assert unused_models(tmp_path) == []


def test_a_server_does_not_import_megatron():
    script = (
        "import sys; from rlpipe.engines.sglang import cpu_launch, launch; launch.hide_megatron();"
        "from sglang.srt.debug_utils.dumper import dumper;"
        "print([name for name in sys.modules if name.startswith('megatron.')])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr[-2000:]


def test_a_server_keeps_no_features_of_images(tmp_path: Path):
    make_model(tmp_path / "model", seed=0)
    server = _server(tmp_path / "model", tmp_path / "log")
    assert server.environment()["SGLANG_VLM_CACHE_SIZE_MB"] == "0", "a push would not empty it"
