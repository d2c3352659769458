"""A user function must not end or fork the calling process (rlpipe.config.guard)."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.guard import FORKED_STATUS, LONGEST_TEXT, error_text, guarded
from rlpipe.errors import HookError


class Stop(BaseException):
    """No Exception and no exception of Python."""


@pytest.mark.parametrize("error", [SystemExit(3), Stop("now"), asyncio.CancelledError()])
async def test_a_function_that_ends_python_raises_a_hook_error(error: BaseException):
    def plain() -> None:
        raise error

    async def later() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(HookError, match=f"(?s)ended Python.*{type(error).__name__}"):
        guarded(plain)()
    with pytest.raises(HookError, match=f"(?s)ended Python.*{type(error).__name__}"):
        await guarded(later)()


def test_a_keyboard_interrupt_is_a_hook_error_unless_it_may_be_ctrl_c():
    def interrupt() -> None:
        raise KeyboardInterrupt

    raised: list[BaseException] = []

    def on_a_thread() -> None:
        try:
            guarded(interrupt)()
        except HookError as error:
            raised.append(error)

    thread = threading.Thread(target=on_a_thread)
    thread.start()
    thread.join()
    assert "KeyboardInterrupt" in str(raised[0])
    with pytest.raises(KeyboardInterrupt):
        guarded(interrupt)()


async def test_a_requested_cancellation_passes_through():
    async def wait() -> None:
        await asyncio.sleep(60)

    task = asyncio.create_task(guarded(wait)())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_guarded_function_has_the_signature_and_results_of_the_function():
    def plain(sample: int, *, key: str = "a") -> tuple[int, str]:
        """Documented."""
        return sample, key

    async def later(sample: int) -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise
        return sample

    async def catches(value: int) -> int:
        try:
            await asyncio.wait_for(asyncio.sleep(60), 0.01)
        except TimeoutError:
            return value
        return -1

    assert guarded(plain)(1, key="b") == (1, "b")
    assert guarded(plain).__doc__ == "Documented."
    assert inspect.signature(guarded(plain)) == inspect.signature(plain)
    assert inspect.iscoroutinefunction(guarded(later))
    assert not inspect.iscoroutinefunction(guarded(plain))
    assert await guarded(catches)(5) == 5
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0)()


FORKS = """
import asyncio, os, sys, time
from rlpipe.config.guard import guarded

def plain():
    {body}

async def later():
    {body}

def main():
    result = asyncio.run(guarded(later)()) if sys.argv[1] == "async" else guarded(plain)()
    print("came back with", result, flush=True)

main()
"""


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize(
    "body",
    [
        "return 'copy' if os.fork() == 0 else os.wait()[1]",
        "if os.fork() == 0: raise ValueError('in the copy')\n    return os.wait()[1]",
        "if os.fork() == 0: sys.exit(0)\n    return os.wait()[1]",
    ],
    ids=["returns", "raises", "exits"],
)
def test_a_forked_copy_ends_when_the_function_returns(kind: str, body: str):
    done = subprocess.run(
        [sys.executable, "-c", FORKS.format(body=body), kind],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"came back with {FORKED_STATUS << 8}"]
    assert "a forked copy returned from the function" in done.stderr


def test_a_forked_copy_that_awaits_ends_before_other_tasks_run(tmp_path: Path):
    code = """
import asyncio, os, sys
from pathlib import Path
from rlpipe.config.guard import guarded

async def forks():
    copy = os.fork()
    await asyncio.sleep(0.2)
    return os.waitpid(copy, 0)[1]

async def other():
    for _ in range(20):
        await asyncio.sleep(0.05)
        Path(sys.argv[1], str(os.getpid())).touch()

async def main():
    status, _ = await asyncio.gather(guarded(forks)(), other())
    assert status >> 8 == 70, status

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert len(list(tmp_path.iterdir())) == 1


class _Unreadable(Exception):
    def __str__(self) -> Any:
        raise RuntimeError


def test_the_text_of_an_error_is_bounded_and_needs_no_readable_message():
    assert error_text(ValueError("no")) == "ValueError: no"
    assert len(error_text(ValueError("x" * 10**7))) < LONGEST_TEXT + 100
    assert "cannot be read: RuntimeError" in error_text(_Unreadable())
