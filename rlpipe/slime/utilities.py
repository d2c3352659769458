"""slime's small helpers: HTTP requests, loading of functions, and coroutines in plain functions.

post, get, get_rollout_num_engines      slime.utils.http_utils
load_function, SingletonMeta, ...       slime.utils.misc
run, get_async_loop                     slime.utils.async_utils
apply_rollout_sample_hooks              slime.rollout.sample_hooks
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterable
from functools import cache
from typing import Any, ClassVar

import httpx

from rlpipe.system.certificates import certificates
from rlpipe.types import Sample

ATTEMPTS = 60
PAUSE_S = 1.0
LONGEST_REASON = 500
"""Characters of a refusal in the error."""


async def post(
    url: str, payload: Any, max_retries: int = ATTEMPTS, headers: dict[str, str] | None = None
) -> Any:
    """Return the JSON answer of a POST request, or its text if it is not JSON.

    Raises: httpx.HTTPError after the last attempt, or at once for a status below 500. The message
    has the answer's text.
    """
    return await _request("POST", url, max_retries, json=payload or {}, headers=headers)


async def get(url: str) -> Any:
    """Return the JSON answer of a GET request. Raises: httpx.HTTPError, like `post`."""
    return await _request("GET", url, ATTEMPTS)


async def _request(method: str, url: str, attempts: int, **keywords: Any) -> Any:
    async with httpx.AsyncClient(timeout=None, verify=certificates()) as client:
        for remaining in range(attempts - 1, -1, -1):
            try:
                response = await client.request(method, url, **keywords)
                _raise_for_status(response)
                return _content(response)
            except httpx.HTTPError as error:
                is_refused = (
                    isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                )
                if is_refused or not remaining:
                    raise
            await asyncio.sleep(PAUSE_S)
    raise AssertionError("at least one attempt is needed")


def _raise_for_status(response: httpx.Response) -> None:
    try:
        response.raise_for_status()
    except httpx.HTTPStatusError as error:
        reason = response.text[:LONGEST_REASON]
        raise httpx.HTTPStatusError(
            f"{error}\nanswer: {reason}", request=error.request, response=response
        ) from None


def _content(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def init_http_client(args: Any) -> None:
    """Do nothing: `post` and `get` need no client that is created before."""


def get_rollout_num_engines(args: Any) -> int:
    """Return the number of engines behind the router; 0 without GPUs for them."""
    if (given := getattr(args, "rollout_num_engines", None)) is not None:
        return int(given)
    gpus = getattr(args, "rollout_num_gpus", None) or 0
    per_engine = getattr(args, "rollout_num_gpus_per_engine", None) or 1
    return max(1, gpus // per_engine) if gpus > 0 else 0


def is_port_available(port: int) -> bool:
    """True if a server can listen on the port."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except (OSError, OverflowError):
            return False
        return True


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Return the first of `consecutive` free ports in a row."""
    port = start_port
    while not all(is_port_available(port + offset) for offset in range(consecutive)):
        port += 1
    return port


@cache
def load_function(path: str) -> Callable[..., Any]:
    """Return the object of a dotted path, or of `path/to/file.py:name`."""
    if ".py" in path:
        from rlpipe.config.hooks import load_hook  # imports this package

        return load_hook(path)
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class SingletonMeta(type):
    """Metaclass of classes with one instance in a process."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*arguments, **keywords)
        return cls._instances[cls]

    def clear_instances(cls) -> None:
        """Forget the instance of this class."""
        cls._instances.pop(cls, None)


class Box:
    """A value that Ray does not look into."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a command in bash. Raises: subprocess.CalledProcessError."""
    result = subprocess.run(["bash", "-c", cmd], check=True, capture_output=capture_output)
    return result.stdout.decode() if capture_output else None


def group_by(values: Iterable[Any], key: Callable[[Any], Any] | None = None) -> dict[Any, list]:
    """Return the values by key, in their order."""
    groups: dict[Any, list] = {}
    for value in values:
        groups.setdefault(value if key is None else key(value), []).append(value)
    return groups


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """True after every `interval` iterations, at the end of an epoch, and in the last iteration."""
    if interval is None:
        return False
    done = rollout_id + 1
    return done == num_rollout or not all(done % n for n in (interval, num_rollout_per_epoch) if n)


class AsyncLoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="slime-loop", daemon=True).start()

    def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine; the calling thread waits for it."""
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result()


@cache
def get_async_loop() -> AsyncLoopThread:
    """Return the loop that all calls of `run` share, so that tasks outlive a call."""
    return AsyncLoopThread()


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine, for a plain function."""
    return get_async_loop().run(coro)


_rollout_id: int | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Set the `rollout_id` that sample hooks get."""
    global _rollout_id
    _rollout_id = rollout_id


async def apply_rollout_sample_hooks(args: Any, value: Any, **keywords: Any) -> Any:
    """Apply the functions of `args.rollout_sample_hook_path` to a sample, or to each in lists.

    Raises: TypeError for another value, or if a function returns another type.
    """
    paths = getattr(args, "rollout_sample_hook_path", None) or []
    if not paths:
        return value
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, entry, **keywords) for entry in value]
    if not isinstance(value, Sample):
        raise TypeError(f"Rollout sample hooks expected Sample or list, got {type(value).__name__}")
    keywords = {"rollout_id": _rollout_id, **keywords}
    for path in paths:
        hook = load_function(path)
        answer = hook(args, value, **_accepted(hook, keywords))
        answer = await answer if inspect.isawaitable(answer) else answer
        if answer is not None and not isinstance(answer, Sample):
            found = type(answer).__name__
            raise TypeError(
                f"Rollout sample hook {path!r} returned {found}, expected Sample or None"
            )
        value = value if answer is None else answer
    return value


def _accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}
