"""Simulated SGLang servers: the endpoints that a run calls, without a model.

    python -m tools.bench.simulated_server --engines 32 --model-dir DIR --median 64

One process serves all engines, each on a port of its own, and prints their URLs as a JSON line.
It ends with its parent, or when its standard input ends. Lengths of responses are log-normal and
follow from the prompt and the number of the sample. Tokens take time as in `SimulatedEngine`.

Entry points: `SimulatedServer`, `served`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from tools.bench.simulated_engine import SimulatedEngine

TAIL = 8
"""99th percentile and longest response, in medians."""
SIGMA = math.log(TAIL) / 2.326
LOG_PROB = -1.0
"""Log-prob of every token, of simulated engines and trainer ranks."""
TOKEN = 7
START_TIMEOUT_S = 120.0


class SimulatedServer(SimulatedEngine):
    """One engine. `model_dir`: its configuration is the server's. `push_s`: seconds of a push."""

    def __init__(
        self, model_dir: str, *, median: int, speed: float, knee: float, push_s: float
    ) -> None:
        super().__init__(self._unused_length, speed=speed, knee=knee)
        self.model_dir = model_dir
        self.median = median
        self.push_s = push_s
        self.stamp = "default"
        self._config = json.loads((Path(model_dir) / "config.json").read_text())
        self._resumed = asyncio.Event()
        self._resumed.set()

    @staticmethod
    def _unused_length(first: int, index: int) -> int:
        raise AssertionError("lengths follow from whole prompts")

    def length_of(self, prompt: list[int], index: int) -> int:
        """Return the length of a response. The same draw has it in every run."""
        normal = random.Random(f"{prompt}/{index}").gauss(0.0, SIGMA)
        return max(1, min(TAIL * self.median, round(self.median * math.exp(normal))))

    def application(self) -> web.Application:
        """Return the endpoints of SGLang, and of `push_routes`, that a run calls."""
        app = super().application()
        get, post = app.router.add_get, app.router.add_post
        get("/model_info", self._model_info)
        get("/server_info", self._server_info)
        get("/v1/loads", self._loads)
        get("/get_weight_version", self._weight_version)
        get("/health", self._accept)
        get("/health_generate", self._accept)
        post("/rlpipe/open_update", self._open)
        post("/rlpipe/close_update", self._close)
        post("/update_weights_from_tensor", self._update)
        return app

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        sampling = body["sampling_params"]
        prompts = body["input_ids"]
        if sampling["max_new_tokens"] == 0:
            return _answer([_scores(prompt) for prompt in prompts])
        await self._resumed.wait()
        is_list = isinstance(prompts[0], list)
        seen: dict[tuple[int, ...], int] = {}
        rows = []
        for prompt in prompts if is_list else [prompts]:
            key = tuple(prompt)
            index = seen[key] = seen.get(key, -1) + 1
            length = min(self.length_of(prompt, index), sampling["max_new_tokens"])
            rows.append(self._sample(prompt[0], 0, length))
        answers = await asyncio.gather(*rows)
        return _answer(answers if is_list else answers[0])

    def _spans(self, start: float, tokens: int) -> list[dict[str, Any]]:
        # A push waits for no request here: synchronous runs have none in flight.
        return [{"version": self.stamp, "start": 0, "end": tokens}]

    async def _model_info(self, _: web.Request) -> web.Response:
        return _answer(
            {
                "model_path": self.model_dir,
                "architectures": self._config["architectures"],
                "weight_version": self.stamp,
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        dtype = self._config.get("dtype") or self._config["torch_dtype"]
        return _answer(
            {"version": "simulated", "dtype": dtype, "tp_size": 1, "dp_size": 1, "pp_size": 1}
        )

    async def _loads(self, _: web.Request) -> web.Response:
        load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0}
        return _answer({"loads": [load]})

    async def _weight_version(self, _: web.Request) -> web.Response:
        return _answer({"weight_version": self.stamp})

    async def _accept(self, _: web.Request) -> web.Response:
        return _answer({})

    async def _open(self, request: web.Request) -> web.Response:
        self._resumed.clear()
        return _answer({"begun": True, "seconds": {}})

    async def _update(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.push_s)
        self.stamp = orjson.loads(await request.read())["weight_version"]
        return _answer({"success": True})

    async def _close(self, request: web.Request) -> web.Response:
        self._resumed.set()
        return _answer({"weight_version": self.stamp, "seconds": {}})


def _scores(prompt: list[int]) -> dict[str, Any]:
    known = [[LOG_PROB, token] for token in prompt[1:]]
    return {"meta_info": {"input_token_logprobs": [[None, prompt[0]], *known]}}


def _answer(content: Any) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")


@contextmanager
def served(engines: int, model_dir: Path, *, per_process: int, **settings: float) -> Iterator[Any]:
    """Start this many engines in processes of their own; yield their URLs and the processes.

    `settings`: options of the command, by name. Raises: RuntimeError if a process does not start.
    """
    processes = []
    urls: list[str] = []
    try:
        for first in range(0, engines, per_process):
            command = [sys.executable, "-m", "tools.bench.simulated_server"]
            options = {"engines": min(per_process, engines - first), "model-dir": model_dir}
            for name, value in {**options, **settings}.items():
                command += [f"--{name.replace('_', '-')}", str(value)]
            processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{process.args} ended, exit status {process.wait()}")
            urls += json.loads(line)
        yield urls, processes
    finally:
        for process in processes:
            process.terminate()
            process.wait(START_TIMEOUT_S)


async def serve(arguments: argparse.Namespace) -> None:
    """Serve the engines until standard input ends."""
    # The router first asks each engine for HTTP/2, which aiohttp reports with a stack.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(arguments.engines):
            server = SimulatedServer(
                arguments.model_dir,
                median=arguments.median,
                speed=arguments.speed,
                knee=arguments.knee,
                push_s=arguments.push_s,
            )
            urls.append(await stack.enter_async_context(server.serving()))
        print(json.dumps(urls), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> int:
    """Serve. Exit codes: 0 done."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.simulated_server", description=__doc__
    )
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--median", type=int, default=64, help="median length in tokens")
    parser.add_argument("--speed", type=float, default=2000.0, help="tokens/s of one request")
    parser.add_argument("--knee", type=float, default=256.0, help="requests that halve the speed")
    parser.add_argument("--push-s", type=float, default=0.0, help="seconds of a push")
    asyncio.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
