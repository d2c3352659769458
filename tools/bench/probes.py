"""Count calls, seconds and store requests of named functions in a running process.

`install` wraps functions, given as `module:Class.method` or `module:function`, and the backends of
the store. `totals` returns what the process has counted so far. Requests to the store count for
the innermost probed function, also in threads that it started with `asyncio.to_thread` or a
`ThreadPoolExecutor`.

CPU seconds are those of the calling thread. For a coroutine they include whatever else its event
loop ran meanwhile.
"""

from __future__ import annotations

import importlib
import inspect
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import wraps
from typing import Any

BACKENDS = ("rlpipe.store.objects.local:LocalBackend",)
REQUESTS = ("create", "create_from", "read", "sha256", "download", "stat", "delete")
POOL = "concurrent.futures.thread:ThreadPoolExecutor.submit"
LISTINGS = ("entries", "survey")

CALL = "call of "
"""Prefix of the counts of calls of Ray to engines and ranks, by method."""

_part: ContextVar[str | None] = ContextVar("part", default=None)
_totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
_lock = threading.Lock()
_elsewhere = "elsewhere"


def install(parts: Mapping[str, str], *, elsewhere: str) -> None:
    """Wrap these functions (target → name of its part) and the store's backends, once.

    `elsewhere`: part of store requests outside of these functions.
    """
    global _elsewhere
    _elsewhere = elsewhere
    for target, part in parts.items():
        _wrap(target, part)
    for backend in BACKENDS:
        for request in REQUESTS:
            _replace(f"{backend}.{request}", _counting_requests)
        for listing in LISTINGS:
            _replace(f"{backend}.{listing}", _counting_listings)
    _replace(POOL, _with_context)


def totals() -> dict[str, dict[str, float]]:
    """Return part → counts so far.

    `calls`, `wall_s`, `cpu_s`; of the store `requests`, `read_bytes`, `listings`, `listed` names.
    """
    with _lock:
        return {part: dict(counts) for part, counts in _totals.items()}


def add(part: str, **counts: float) -> None:
    """Add to the counts of a part."""
    with _lock:
        for name, value in counts.items():
            _totals[part][name] += value


@contextmanager
def measured(part: str) -> Iterator[None]:
    """Count the block as a call of a part."""
    token = _part.set(part)
    wall_s = time.perf_counter()
    cpu_s = time.thread_time()
    try:
        yield
    finally:
        _part.reset(token)
        add(
            part,
            calls=1,
            wall_s=time.perf_counter() - wall_s,
            cpu_s=time.thread_time() - cpu_s,
        )


def _wrap(target: str, part: str) -> None:
    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def awaited(*arguments: Any, **keywords: Any) -> Any:
                with measured(part):
                    return await function(*arguments, **keywords)

            return awaited

        @wraps(function)
        def called(*arguments: Any, **keywords: Any) -> Any:
            with measured(part):
                return function(*arguments, **keywords)

        return called

    _replace(target, wrapped)


def _counting_requests(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        read_bytes = len(result) if isinstance(result, bytes) else 0
        add(_part.get() or _elsewhere, requests=1, read_bytes=read_bytes)
        return result

    return counted


def _counting_listings(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*arguments: Any, **keywords: Any) -> Iterator[Any]:
        part = _part.get() or _elsewhere
        add(part, listings=1)
        for entry in function(*arguments, **keywords):
            add(part, listed=1)
            yield entry

    return counted


def _with_context(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @wraps(submit)
    def submitted(
        pool: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> Future[Any]:
        return submit(pool, copy_context().run, function, *arguments, **keywords)

    return submitted


def _replace(target: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function by a wrapped one. Do nothing if it is replaced already."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    function = inspect.getattr_static(owner, name)
    is_class_method = isinstance(function, classmethod)
    plain = function.__func__ if is_class_method else function
    if not hasattr(plain, "probed"):
        replaced: Any = wrapped(plain)
        replaced.probed = True
        setattr(owner, name, classmethod(replaced) if is_class_method else replaced)
