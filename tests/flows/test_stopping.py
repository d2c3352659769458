"""SIGTERM: current work may finish, no new work begins (flows.stopping)."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from flows.stopping import Preempted, Stopping, handle_sigterm


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


def terminate_soon() -> None:
    asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGTERM)


async def test_work_without_a_signal_finishes():
    with Stopping(grace_s=1) as stopping:
        assert await stopping.run(after(0.01)) == "done"


async def test_work_that_finishes_within_the_grace_period_counts_and_no_more_begins():
    with Stopping(grace_s=5) as stopping:
        terminate_soon()
        assert await stopping.run(after(0.2)) == "done"
        with pytest.raises(Preempted, match="SIGTERM"):
            await stopping.run(after(0))


async def test_longer_work_is_abandoned():
    ended: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with Stopping(grace_s=0.05) as stopping:
        terminate_soon()
        with pytest.raises(Preempted, match="abandoned"):
            await stopping.run(long())
    assert ended == ["cancelled"]


async def test_the_hook_installs_the_handler_again():
    with Stopping(grace_s=5) as stopping:
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        handle_sigterm(None, None, None)
        terminate_soon()
        assert await stopping.run(after(0.2)) == "done"
        with pytest.raises(Preempted):
            await stopping.run(after(0))
        assert signal.getsignal(signal.SIGTERM) == before


async def test_leaving_the_block_restores_the_previous_handler():
    before = signal.getsignal(signal.SIGTERM)
    with Stopping(grace_s=5):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    handle_sigterm(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == before


async def test_an_error_of_the_work_is_raised():
    with Stopping(grace_s=1) as stopping, pytest.raises(ZeroDivisionError):
        await stopping.run(fails())


async def fails() -> None:
    raise ZeroDivisionError


async def test_a_nested_context_is_the_outer_one():
    with Stopping(grace_s=5) as outer:
        with Stopping(grace_s=0) as inner:
            assert inner is outer
        terminate_soon()
        assert await outer.run(after(0.2)) == "done"
