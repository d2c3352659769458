"""Messages of a rollout (tasks.rollout)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlpipe.config.model import ResourcesConfig
from tasks.rollout import MOST_SOON_ENDS, SOON_S, EngineReports


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(said: list[str], **resources: Any) -> Any:
    config = SimpleNamespace(run="mine", resources=ResourcesConfig(**resources))
    progress = SimpleNamespace(say=said.append)
    return SimpleNamespace(config=config, progress=progress, directory=Path("/runs/mine"))


def engines(*alive: bool) -> list[dict[str, Any]]:
    return [{"number": number, "alive": is_alive} for number, is_alive in enumerate(alive)]


def test_an_engine_that_ends_and_comes_back_is_reported_once_each():
    said: list[str] = []
    clock = Clock()
    reports = EngineReports(run(said), clock)
    for alive in (True, False, False):
        reports.show(engines(True, alive))
    clock.now = 63.0
    reports.show(engines(True, True))
    assert said == [
        "mine: engine 1 has ended and is started again; its log is /runs/mine/logs/engine-1.log",
        "mine: engine 1 is back (1:03)",
    ]


def test_an_external_engine_is_not_started_again():
    said: list[str] = []
    reports = EngineReports(run(said, external_engines=["http://10.0.0.1:30000"]))
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
    reports = EngineReports(run([]), clock)
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
    reports = EngineReports(run([]), clock)
    end_and_come_back(reports, clock, 2 * MOST_SOON_ENDS, up_s=SOON_S + 1)
    assert reports.trouble() is None
    reports = EngineReports(run([], external_engines=["http://10.0.0.1:30000"]), clock)
    end_and_come_back(reports, clock, 2 * MOST_SOON_ENDS)
    assert reports.trouble() is None
    assert EngineReports(run([])).trouble() is None
