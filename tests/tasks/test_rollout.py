"""Messages of a rollout (tasks.rollout)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlpipe.config.model import ResourcesConfig
from tasks.rollout import EngineReports


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
