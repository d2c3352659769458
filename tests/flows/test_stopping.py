"""SIGTERM: what runs may finish, nothing new begins."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from flows.stopping import Preempted, Stopping, hear_sigterm


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


def terminate_soon() -> None:
    asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGTERM)


async def test_unasked_work_is_just_done():
    with Stopping(grace_s=1) as stopping:
        assert await stopping.unless_asked(after(0.01)) == "done"


async def test_work_that_finishes_within_the_grace_is_kept_and_nothing_follows():
    with Stopping(grace_s=5) as stopping:
        terminate_soon()
        assert await stopping.unless_asked(after(0.2)) == "done"
        with pytest.raises(Preempted, match="SIGTERM"):
            await stopping.unless_asked(after(0))


async def test_work_that_takes_longer_is_abandoned():
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
            await stopping.unless_asked(long())
    assert ended == ["cancelled"]


async def test_it_hears_again_after_another_handler_was_put_in_its_place():
    with Stopping(grace_s=5) as stopping:
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        hear_sigterm(None, None, None)
        terminate_soon()
        assert await stopping.unless_asked(after(0.2)) == "done"
        with pytest.raises(Preempted):
            await stopping.unless_asked(after(0))
        assert signal.getsignal(signal.SIGTERM) == before


async def test_on_the_way_out_the_handler_before_is_back():
    before = signal.getsignal(signal.SIGTERM)
    with Stopping(grace_s=5):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    hear_sigterm(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == before


async def test_an_error_of_the_work_comes_through():
    with Stopping(grace_s=1) as stopping, pytest.raises(ZeroDivisionError):
        await stopping.unless_asked(fails())


async def fails() -> None:
    raise ZeroDivisionError


async def test_inside_another_one_it_is_that_one():
    with Stopping(grace_s=5) as outer:
        with Stopping(grace_s=0) as inner:
            assert inner is outer
        terminate_soon()
        assert await outer.unless_asked(after(0.2)) == "done"
