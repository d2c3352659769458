"""Limit the effect of a user function to its own call.

`guarded(function)` behaves like the function except in two cases:

- The function ends Python instead of returning: it raises SystemExit, KeyboardInterrupt or a
  cancellation without a cancel request. The guard raises HookError, which callers handle like any
  other exception of the function.
- The function forks, and the copy returns or raises. Without a guard the copy would continue as a
  second trainer, sampler or reward process, and answer on its parent's pipes and sockets. The guard
  writes a message to stderr and ends the copy.

The guard ends a copy of an async function at its next await. It does not cover a copy that only
runs in an asyncio task that the function created, nor a process that ends itself (`os._exit`, a
signal).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from rlpipe.errors import HookError

FORKED_STATUS = 70
"""Exit status of a copy that the guard ends."""
LONGEST_TEXT = 2000
"""Characters that are kept of an error's message, which may be stored in a row."""


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the guarded function, with the same signature and name; async stays async."""
    if _is_async(function):

        @functools.wraps(function)
        async def guarded_async(*arguments: Any, **keywords: Any) -> Any:
            pid = os.getpid()
            try:
                return await _await_guarded(function(*arguments, **keywords), pid)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # a request to cancel the task, which must pass through
                raise _ended_python(function, error) from error
            except (Exception, GeneratorExit):
                raise  # GeneratorExit: the event loop closes the coroutine
            except BaseException as error:
                raise _ended_python(function, error) from error
            finally:
                exit_if_forked(pid, function)

        return guarded_async

    @functools.wraps(function)
    def guarded_plain(*arguments: Any, **keywords: Any) -> Any:
        pid = os.getpid()
        try:
            return function(*arguments, **keywords)
        except Exception:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and _may_be_ctrl_c():
                raise
            raise _ended_python(function, error) from error
        finally:
            exit_if_forked(pid, function)

    return guarded_plain


def _is_async(function: Any) -> bool:
    if inspect.isclass(function):
        # Its `__call__` is called on objects; creating one is never async.
        return False
    call = getattr(function, "__call__", None)  # noqa: B004 - an object may have an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def exit_if_forked(pid: int, function: object) -> None:
    """End this process at once if it is not process `pid`, because the user's code forked."""
    if os.getpid() == pid:
        return
    error = sys.exc_info()[1]
    raised = f" and raised {error_text(error)}" if error is not None else ""
    line = f"{_name(function)}: a forked copy returned from the function{raised}; copy ended\n"
    try:
        # Not print: the copy may have inherited a locked or half-written buffer of sys.stderr.
        os.write(2, line.encode(errors="replace"))
    finally:
        # Not sys.exit: exit handlers of the copy would close the parent's connections.
        os._exit(FORKED_STATUS)


def error_text(error: BaseException) -> str:
    """Return `Type: message`, cut at LONGEST_TEXT characters."""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 - the user's exception may have its own __str__
        text = f"(its message cannot be read: {type(second).__name__})"
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}... ({len(text)} characters)"
    return f"{type(error).__name__}: {text}"


def location(error: BaseException, file: str | None) -> str:
    """Return the last line of the user's file that an exception passed, as text."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
    ]
    if not frames:
        return ""
    return f" ({file}:{frames[-1].lineno}: {frames[-1].line})"


@types.coroutine
def _await_guarded(coroutine: Coroutine[Any, Any, Any], pid: int) -> Generator[Any, Any, Any]:
    """Await the coroutine, and end a forked copy of this process at its next suspension."""
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        try:
            awaited = resume(value)
        except StopIteration as done:
            return done.value
        except GeneratorExit as error:  # raised by the coroutine: it has not been closed here
            raise _ended_python(coroutine, error) from error
        exit_if_forked(pid, coroutine)
        try:
            value = yield awaited
            resume = coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001 - the coroutine may handle any exception
            resume = coroutine.throw
            value = error


def _may_be_ctrl_c() -> bool:
    """True if Python itself may have raised KeyboardInterrupt for SIGINT.

    Python does so only in the main thread. A running event loop handles SIGINT itself.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


def _ended_python(function: object, error: BaseException) -> HookError:
    return HookError(
        "a user function ended Python instead of returning",
        where=_name(function),
        found=error_text(error),
    )


def _name(function: object) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f"{code.co_filename}:{name}" if code is not None else str(name)
