"""Run environments of the package `verifiers`, in an interpreter that has this package.

A program that rlpipe starts as `PYTHON verifiers_worker.py`. It imports nothing of rlpipe. Requests
and answers are lines of JSON on standard input and output; it ends with its standard input.

    {"id": 0, "open": BLOCK, "serve": true}           {"id": 0, "opened": {"source", "version"}}
    {"id": 1, "tasks": [skip, size]}                  {"id": 1, "tasks": [TASK, ...]}
    {"id": 2, "run": {task, base_url, model}}         {"id": 2, "episode": {...}}
    {"id": 2, "cancel": true}                         (the answer of the run)

BLOCK is verifiers' `env` block, TASK the JSON of a `TaskData`. Without `serve` no episode can run,
and no server of the environment starts. A failed request has the answer
{"id", "error": text, "line": "file:line" or null, "missing": name of a missing module or null}.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

API_KEY_VARIABLE = "RLPIPE_GATEWAY_KEY"


class Worker:
    """One environment, and its episodes in progress."""

    def __init__(self, answers: Any, max_concurrent: int) -> None:
        self._answers = answers
        self._running: dict[int, asyncio.Task[None]] = {}
        self._resources = contextlib.AsyncExitStack()
        self._free = asyncio.Semaphore(max_concurrent)
        self._source = ""

    async def serve(self, requests: asyncio.StreamReader) -> None:
        """Answer requests until their end, in order; episodes run at the same time."""
        while line := await requests.readline():
            request = json.loads(line)
            number = request["id"]
            if request.get("cancel"):
                if number in self._running:
                    self._running[number].cancel()
                continue
            if "run" not in request:
                await self._answer(request)
                continue
            task = asyncio.create_task(self._answer(request))
            self._running[number] = task
            task.add_done_callback(lambda _, number=number: self._running.pop(number, None))

    async def close(self) -> None:
        """End all episodes and the environment's servers."""
        for task in self._running.values():
            task.cancel()
        await self._resources.aclose()

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            answer = await self._result(request)
        except asyncio.CancelledError:
            answer = {"error": "cancelled", "line": None, "missing": None}
        except Exception as error:  # noqa: BLE001 - the environment's code may raise anything
            frames = traceback.extract_tb(error.__traceback__)
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            answer = {
                "error": f"{type(error).__name__}: {error}",
                "line": f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None,
                "missing": missing,
            }
        self._answers.write((json.dumps({"id": request["id"], **answer}) + "\n").encode())
        self._answers.flush()

    async def _result(self, request: dict[str, Any]) -> dict[str, Any]:
        if "open" in request:
            return {"opened": await self._open(request["open"], request.get("serve", False))}
        if "tasks" in request:
            skip, size = request["tasks"]
            tasks = itertools.islice(self._env.taskset, skip, skip + size)
            return {"tasks": [_dumped(task.data) for task in tasks]}
        async with self._free:
            return {"episode": await self._run(**request["run"])}

    async def _open(self, block: dict[str, Any], serve: bool) -> dict[str, str]:
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self._env = loaders.load_environment(loaders.resolve_env_config(block))
        taskset = type(self._env.taskset)
        self._source = _digest(sys.modules[taskset.__module__])
        if serve:
            await self._resources.enter_async_context(self._env.serving())
        return {"source": self._source, "version": version("verifiers")}

    async def _run(self, task: dict[str, Any], base_url: str, model: str) -> dict[str, Any]:
        clients = importlib.import_module("verifiers.v1.clients")
        client = clients.EvalClientConfig(base_url=base_url, api_key_var=API_KEY_VARIABLE)
        kind = type(self._env.taskset).task_type()
        data = kind.data_type().model_validate(task)
        (slot,) = self._env.slots(kind(data, self._env.config.taskset.task))
        episode = await self._env.run_slot(slot, clients.ModelContext(model=model, client=client))
        return {"source": self._source, **_summary(episode)}


def _summary(episode: Any) -> dict[str, Any]:
    """Return rewards, metrics and errors of an episode, over its traces."""
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    errors = [*episode.errors]
    for trace in episode.traces:
        errors += trace.errors
        for name, reward in trace.rewards.items():
            if reward is not None:
                rewards[name] = rewards.get(name, 0.0) + reward.value
        for name, value in trace.metrics.items():
            if value is not None:
                metrics[name] = metrics.get(name, 0.0) + value
    return {
        "ok": episode.ok,
        "rewards": rewards,
        "metrics": metrics,
        "turns": sum(len(trace.calls) for trace in episode.traces),
        "stop": next((trace.stop_condition for trace in reversed(episode.traces)), None),
        "errors": [_error_text(error) for error in errors],
    }


def _dumped(data: Any) -> dict[str, Any]:
    return data.model_dump(mode="json", exclude_defaults=True)


def _error_text(error: Any) -> str:
    # The first part is the environment's exception. verifiers raises it again as another one.
    first = (error.traceback or "").partition("\n\n")[0]
    frames = [line.strip() for line in first.splitlines() if line.strip().startswith("File ")]
    where = f" ({frames[-1]})" if frames else ""
    return f"{error.type}: {error.message}{where}"


def _digest(module: Any) -> str:
    """Return the sha256 of the source of a module, or of all modules of its package."""
    name = module.__name__.partition(".")[0]
    package = sys.modules[name] if name != "verifiers" else module
    root = Path(str(package.__file__)).parent
    is_package = hasattr(package, "__path__")
    files = sorted(root.rglob("*.py")) if is_package else [Path(str(package.__file__))]
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


async def main() -> None:
    """Serve standard input; whatever else prints, prints to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.setdefault(API_KEY_VARIABLE, "none")
    reader = asyncio.StreamReader(limit=2**30)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
    worker = Worker(answers, int(sys.argv[1]))
    try:
        await worker.serve(reader)
    finally:
        await worker.close()


if __name__ == "__main__":
    asyncio.run(main())
