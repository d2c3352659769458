"""Keep what a function of the user does from reaching beyond its own call.

`guarded(function)` is called like the function, and differs in two cases:

- The function ends Python instead of returning: it raises SystemExit, KeyboardInterrupt, or a
  cancellation that nobody asked for. That is a HookError, so the caller treats it like any other
  exception of the function.
- The function forks, and the copy returns or raises. Without a guard the copy would go on as a
  second trainer, sampler or reward process, and answer on its parent's pipes and sockets. The copy
  says so on stderr and ends.

A copy that an async function makes is ended at the latest when the function awaits something. Not
guarded: a copy that only runs in an asyncio task that the function created; a process that ends
itself (`os._exit`, a signal).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from rlpipe.errors import HookError

FORKED_STATUS = 70
"""Exit status of a copy that is ended."""
LONGEST_TEXT = 2000
"""Characters of an error that are kept: a row has to hold it."""


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind the guard. It keeps its signature, its name, and whether it is async."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object may have an async __call__
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):

        @functools.wraps(function)
        async def guarded_async(*arguments: Any, **keywords: Any) -> Any:
            pid = os.getpid()
            try:
                return await _stepped(function(*arguments, **keywords), pid)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise _ended_python(function, error) from error
            except (Exception, GeneratorExit):
                raise
            except BaseException as error:
                raise _ended_python(function, error) from error
            finally:
                leave_if_copied(pid, function)

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
            leave_if_copied(pid, function)

    return guarded_plain


def leave_if_copied(pid: int, function: object) -> None:
    """End this process at once unless it is process `pid`: the user's code forked, and the copy
    came back from it."""
    if os.getpid() == pid:
        return
    error = sys.exc_info()[1]
    said = f", which raised {error_text(error)}" if error is not None else ""
    line = f"{_name(function)}: a copy that it forked came back from it{said}; the copy is ended\n"
    try:
        os.write(2, line.encode(errors="replace"))
    finally:
        os._exit(FORKED_STATUS)


def error_text(error: BaseException) -> str:
    """`Type: message`, whatever the message is: not longer than a row should hold, also where
    `str(error)` itself raises."""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 - the exception is the user's, and so is its __str__
        text = f"(its message cannot be read: {type(second).__name__})"
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}... ({len(text)} characters)"
    return f"{type(error).__name__}: {text}"


@types.coroutine
def _stepped(coroutine: Coroutine[Any, Any, Any], pid: int) -> Generator[Any, Any, Any]:
    """Await the coroutine. A copy of this process gets no further than its next suspension."""
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        try:
            awaited = resume(value)
        except StopIteration as done:
            return done.value
        except GeneratorExit as error:  # raised by the coroutine itself: nobody has closed it
            raise _ended_python(coroutine, error) from error
        leave_if_copied(pid, coroutine)
        try:
            value = yield awaited
            resume = coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001 - it is the coroutine's to handle
            resume = coroutine.throw
            value = error


def _may_be_ctrl_c() -> bool:
    """True where Python itself raises KeyboardInterrupt for SIGINT; a running event loop takes
    SIGINT for itself."""
    if threading.current_thread() is not threading.main_thread():
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


def _ended_python(function: object, error: BaseException) -> HookError:
    return HookError(
        "a function of the user ended Python instead of returning",
        where=_name(function),
        found=error_text(error),
    )


def _name(function: object) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f"{code.co_filename}:{name}" if code is not None else str(name)
