"""Start the engines and the router of the run's configuration for the parts that need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from rlpipe.config.model import EngineConfig
from rlpipe.engines.sglang.router import Router
from rlpipe.engines.sglang.server import Server
from rlpipe.types import WeightVersion
from tools.bench.bench import Bench

FIRST_WEIGHTS = WeightVersion(branch="bench", version=0, digest="made").stamp()


@dataclass(frozen=True)
class Serving:
    """URLs of a router and its engines, which hold the weights of the model directory."""

    router: str
    engines: tuple[str, ...]


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

    def engine(number: int) -> EngineConfig:
        gpu = {"base_gpu_id": first_gpu + number * size} if bench.on_gpus else {}
        return config.engine.model_copy(
            update={"sglang": {**(more or {}), **config.engine.sglang, **(over or {}), **gpu}}
        )

    with ExitStack() as stack:
        router = Router(config.engine, port=None, log_path=logs / "router.log")
        servers = [
            Server(
                bench.model_dir,
                engine(number),
                config.resources,
                dtype=config.model.dtype,
                port=None,
                log_path=logs / f"engine-{number}.log",
                seed=number,
                weight_version=FIRST_WEIGHTS,
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
