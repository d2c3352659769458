"""Start the engines and the router of the run's configuration for the parts that need them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import Server
from rlpipe.types import WeightVersion
from tools.bench.bench import Bench

FIRST_WEIGHTS = WeightVersion(branch="bench", version=0, digest="made").stamp()

GPU_DEFAULTS = {"mem_fraction_static": 0.5}
"""Engines leave memory for the other side of a comparison on the same GPU."""


@dataclass(frozen=True)
class Serving:
    """URLs of a router and its engines, which hold the weights of the model directory."""

    router: str
    engines: tuple[str, ...]


def visible_gpus() -> list[str]:
    """Return the GPUs of this process by the names that CUDA_VISIBLE_DEVICES has for them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",") if listed else [str(n) for n in range(torch.cuda.device_count())]


@contextmanager
def serving(
    bench: Bench,
    say,
    *,
    more: Mapping[str, Any] | None = None,
    over: Mapping[str, Any] | None = None,
    first_gpu: int = 0,
) -> Iterator[Serving]:
    """Start `resources.num_engines` engines behind a router, and stop them afterwards.

    On GPUs the engines use consecutive devices from `first_gpu` on. `more`: SGLang arguments for
    which the configuration has no value; `over`: arguments that replace the configuration's.

    Raises: EngineUnavailable with the end of a log, DeadlineExceeded.
    """
    config = bench.config
    logs = bench.home / "logs"
    size = config.resources.rollout_num_gpus_per_engine

    defaults = {**(GPU_DEFAULTS if bench.on_gpus else {}), **(more or {})}
    engine = config.engine.model_copy(
        update={"sglang": {**defaults, **config.engine.sglang, **(over or {})}}
    )

    def devices(number: int) -> list[str] | None:
        start = first_gpu + number * size
        return visible_gpus()[start : start + size] if bench.on_gpus else None

    with ExitStack() as stack:
        router = Router(config.engine, port=None, log_path=logs / "router.log")
        servers = [
            Server(
                bench.model_dir,
                engine,
                config.resources,
                dtype=config.model.dtype,
                port=None,
                log_path=logs / f"engine-{number}.log",
                seed=number,
                weight_version=FIRST_WEIGHTS,
                devices=devices(number),
            )
            for number in range(config.resources.num_engines)
        ]
        for process in (router, *servers):
            stack.callback(process.stop)
            process.start()
        for process in (router, *servers):
            process.wait_ready(config.resources.start_timeout_s)
        for server in servers:
            router.add(server.url)
        say(f"{len(servers)} engines are up, logs in {logs}")
        yield Serving(router.url, tuple(server.url for server in servers))
