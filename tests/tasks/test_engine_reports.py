"""Lines about the engines of a run (tasks.engine_reports)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlpipe.config.model import ResourcesConfig
from tasks.engine_reports import CHECK_INTERVAL_S, MOST_SOON_ENDS, SOON_S, EngineReports


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def reporting(said: list[str], clock: Clock | None = None, **resources: Any) -> EngineReports:
    config: Any = SimpleNamespace(run="mine", resources=ResourcesConfig(**resources))
    return EngineReports(config, Path("/runs/mine"), said.append, clock or Clock())


def engines(*alive: bool) -> list[dict[str, Any]]:
    return [{"number": number, "alive": is_alive} for number, is_alive in enumerate(alive)]


def test_an_engine_that_ends_and_comes_back_is_reported_once_each():
    said: list[str] = []
    clock = Clock()
    reports = reporting(said, clock)
    for alive in (True, False, False):
        reports.show(engines(True, alive))
    clock.now = 63.0
    reports.show(engines(True, True))
    assert said == [
        "mine: engine 1 has ended and is started again; its log is /runs/mine/logs/engine-1.log",
        "mine: engine 1 is back (1:03)",
    ]


def test_engines_that_join_wait_and_leave_are_reported_once_each():
    said: list[str] = []
    clock = Clock()
    reports = reporting(said, clock)
    reports.show(engines(True))
    waiting = [*engines(True, False), {"number": 2, "alive": False, "waiting": True}]
    for _ in range(2):
        reports.show(waiting)
    clock.now = 20.0
    reports.show(engines(True, True, False))
    reports.show(engines(True))
    reports.show(engines(True))
    reports.show(engines(True, False))
    assert said == [
        "mine: engine 1 joins and is started; 2 engines",
        "mine: engine 2 waits for room in the Ray cluster",
        "mine: engine 2 joins and is started; 3 engines",
        "mine: engine 1 is up (20.0 s)",
        "mine: engine 1 has left; 1 engine",
        "mine: engine 2 has left; 1 engine",
        "mine: engine 1 joins and is started; 2 engines",
    ]


def test_an_engine_whose_node_vanished_has_room_again():
    said: list[str] = []
    clock = Clock()
    reports = reporting(said, clock)
    gone = [*engines(True), {"number": 1, "alive": False, "waiting": True}]
    for status in (engines(True, True), engines(True, False), gone):
        reports.show(status)
    clock.now = 30.0
    reports.show(engines(True, True))
    assert said[1:] == [
        "mine: engine 1 waits for room in the Ray cluster",
        "mine: engine 1 has room again and is started; 2 engines",
        "mine: engine 1 is back (30.0 s)",
    ]


def test_an_external_engine_is_not_started_again():
    said: list[str] = []
    reports = reporting(said, external_engines=["http://10.0.0.1:30000"])
    reports.show(engines(False))
    assert said == ["mine: engine 0 does not answer; the run waits for it"]


def end_and_come_back(reports: EngineReports, clock: Clock, times: int, up_s: float = 5.0) -> None:
    for _ in range(times):
        reports.show(engines(True, False))
        reports.show(engines(False, False))
        clock.now += 40.0
        reports.show(engines(True, True))
        clock.now += up_s


def test_engines_that_end_after_each_start_without_a_finished_group_fail_the_rollout():
    clock = Clock()
    reports = reporting([], clock)
    end_and_come_back(reports, clock, MOST_SOON_ENDS - 1)
    assert reports.trouble() is None
    reports.show(engines(True, False))
    assert reports.trouble() is None, "engine 0 still answers"
    reports.show(engines(False, False))
    error = reports.trouble()
    assert error is not None and "/runs/mine/logs/engine-0.log" in str(error)
    reports.forget_ends()
    assert reports.trouble() is None


def test_engines_that_end_after_a_while_or_belong_to_others_do_not_fail_the_rollout():
    clock = Clock()
    reports = reporting([], clock)
    end_and_come_back(reports, clock, 2 * MOST_SOON_ENDS, up_s=SOON_S + 1)
    assert reports.trouble() is None
    reports = reporting([], clock, external_engines=["http://10.0.0.1:30000"])
    end_and_come_back(reports, clock, 2 * MOST_SOON_ENDS)
    assert reports.trouble() is None
    assert reporting([]).trouble() is None


def test_engines_are_looked_at_every_two_seconds_of_the_run():
    clock = Clock()
    reports = reporting([], clock)
    assert reports.is_due() and not reports.is_due()
    clock.now += CHECK_INTERVAL_S / 2
    assert not reports.is_due()
    clock.now += CHECK_INTERVAL_S
    assert reports.is_due()
