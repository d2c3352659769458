"""Engines on GPUs for the GPU tests, and a benchmark of pushes. Not a test.

    python -m tests.sync.gpu [ipc] [tensor] [fp8] [distributed] [--layers 28] [--repeats 3]

Prints for each method: bytes, seconds and GB/s of the best push, seconds of the first push, seconds
to copy the same bytes on the device, and the largest difference between log-probs of engine and
model. The first push also opens what stays open between pushes. `distributed` needs two GPUs: the
engine is on the second.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlpipe.config.model import EngineConfig, ResourcesConfig
from rlpipe.engines.sglang.admin import Engine
from rlpipe.engines.sglang.server import Server
from rlpipe.sync.fp8 import dequantize_matrix, fp8_directory, quantize
from rlpipe.sync.transports.base import Push
from rlpipe.sync.transports.bucketed import BucketTransport
from rlpipe.sync.transports.distributed import DistributedTransport, use_sglang_nccl_settings
from rlpipe.sync.transports.ipc import IpcTransport
from rlpipe.sync.transports.tensor import TensorTransport
from tests.gpus import prepare, visible_gpus
from tests.sync.setups import transport_setup

METHODS = ("ipc", "tensor", "fp8", "distributed")
BUFFER_BYTES = 512 * 1024**2
START_S = 400.0
SGLANG = {
    "mem_fraction_static": 0.5,
    "max_total_tokens": 65_536,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
}
"""Settings that need few kernels, and little memory: other processes may use the GPU."""
SEQUENCES = [[(17 * i + 131 * j) % 50_000 + 10 for j in range(96)] for i in range(4)]


def make_model(layers: int, seed: int) -> Qwen3ForCausalLM:
    """Return a random model in bf16 on the first GPU. 28 layers give Qwen3-0.6B's shape."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        initializer_range=0.05,
    )
    with torch.device("cuda:0"):
        return Qwen3ForCausalLM(config).bfloat16().eval()


@dataclass
class Bench:
    """A model directory, its engines and transports."""

    layers: int
    folder: Path
    model_dir: Path = field(init=False)

    def __post_init__(self) -> None:
        use_sglang_nccl_settings()
        self.model_dir = self.folder / "model"
        make_model(self.layers, seed=0).save_pretrained(self.model_dir)
        torch.cuda.empty_cache()

    def served_dir(self, method: str) -> str:
        return (
            fp8_directory(str(self.model_dir), self.folder)
            if method == "fp8"
            else str(self.model_dir)
        )

    def engine(self, method: str) -> AbstractContextManager[Server]:
        """Start a server with the first weights, on the second GPU for `distributed`."""
        gpu = visible_gpus()[1 if method == "distributed" else 0]
        return engine_on(gpu, self.served_dir(method), self.folder / f"{method}.log")

    def transport(self, method: str, timeout_s: float = 120.0) -> BucketTransport:
        """Return the transport of a method."""
        setup = transport_setup(
            self.served_dir(method),
            buffer_size_bytes=BUFFER_BYTES,
            timeout_s=timeout_s,
            device=torch.device("cuda:0"),
        )
        if method == "tensor":
            return TensorTransport(setup)
        return DistributedTransport(setup) if method == "distributed" else IpcTransport(setup)


@contextmanager
def engine_on(gpu: str, model_dir: str | Path, log_path: Path) -> Iterator[Server]:
    """Start a server with the directory's weights and wait until it is ready."""
    engine = EngineConfig(sglang=SGLANG)
    resources = ResourcesConfig()
    server = Server(
        model_dir,
        engine,
        resources,
        dtype="bfloat16",
        port=None,
        log_path=log_path,
        seed=1,
        devices=[gpu],
    )
    server.start()
    try:
        server.wait_ready(START_S)
        yield server
    finally:
        server.stop()


def served(method: str, model: Qwen3ForCausalLM) -> Iterable[tuple[str, Tensor]]:
    """Return the model's tensors as engines of this method hold them."""
    tensors = model.state_dict().items()
    return quantize(tensors) if method == "fp8" else tensors


@torch.no_grad()
def round_trip(model: Qwen3ForCausalLM) -> None:
    """Round the weights to those of an FP8 engine."""
    found = dict(quantize(model.state_dict().items()))
    for name, parameter in model.named_parameters():
        if f"{name}_scale_inv" in found:
            parameter.copy_(dequantize_matrix(found[name], found[f"{name}_scale_inv"]))


@torch.no_grad()
def difference(url: str, model: Qwen3ForCausalLM) -> float:
    """Return the largest difference of a log-prob between an engine and a model."""

    async def score() -> list[list[float]]:
        async with Engine(url) as engine:
            return await engine.score(SEQUENCES)

    found = asyncio.run(score())
    largest = 0.0
    for ids, scores in zip(SEQUENCES, found, strict=True):
        tokens = torch.tensor([ids], device="cuda:0")
        log_probs = torch.log_softmax(model(tokens).logits[0, :-1].float(), -1).gather(
            -1, tokens[0, 1:, None]
        )[:, 0]
        largest = max(largest, (log_probs.cpu() - torch.tensor(scores)).abs().max().item())
    return largest


def copy_seconds(size_bytes: int) -> float:
    """Return the seconds of copying this number of bytes on the device."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(bench: Bench, method: str, repeats: int) -> str:
    """Return one line of the table."""
    with bench.engine(method) as server:
        transport = bench.transport(method)
        seconds = []
        report = None
        model = make_model(bench.layers, seed=1)
        for number in range(1 + repeats):
            report = transport.send(
                served(method, model),
                Push(f"b@{number}@x", [server.url], engine_ranks={server.url: [0]}),
            )
            seconds.append(report.seconds)
        assert report is not None
        if method == "fp8":
            round_trip(model)
        largest_difference = difference(server.url, model)
        transport.close()
    gigabytes = report.size_bytes / 1e9
    best = min(seconds[1:])
    copied = copy_seconds(report.size_bytes)
    return (
        f"{method:12}{gigabytes:8.2f}{seconds[0]:10.3f}{best:10.3f}"
        f"{gigabytes / best:10.1f}{copied:10.4f}{largest_difference:10.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "methods", nargs="*", default=["ipc", "tensor", "fp8"], metavar=" | ".join(METHODS)
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory(prefix="pushes-") as folder:
        bench = Bench(arguments.layers, Path(folder))
        print(
            f"{'method':12}{'GB':>8}{'first s':>10}{'push s':>10}"
            f"{'GB/s':>10}{'copy s':>10}{'Δlogp':>10}",
            flush=True,
        )
        for method in arguments.methods:
            print(measure(bench, method, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
