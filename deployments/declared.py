"""The deployments there are, as data: those that every place has, one for each recipe, and those of
a site.

    train/train, train/<recipe> …, fork/fork, iteration/iteration, evaluate/evaluate,
    reprocess/reprocess, convert/convert, audit/audit        (of a place with a name: train/<recipe>@<place> …)

Not here: telling a server (`apply`), or running them without a work pool (`serve`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from prefect.schedules import Schedule as Timetable

from deployments.site import ANY_GPUS, UNLIMITED, Entry, Schedule, Site
from rlpipe.config.load import load_run, recipes
from rlpipe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
FLOWS = {
    "train": "flows/train.py:train",
    "fork": "flows/fork.py:fork",
    "iteration": "flows/iteration_run.py:iteration_run",
    "evaluate": "flows/evaluate.py:evaluate",
    "reprocess": "flows/reprocess.py:reprocess",
    "convert": "flows/convert.py:convert",
    "audit": "flows/audit.py:audit",
}
"""Flow → the file and function it is."""
TRAINING = ("train", "fork")
"""Flows that wait in line for GPUs unless their deployment names a set."""
TAKE_SITE = ("train", "evaluate")
"""Flows that take a site's settings."""
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""From when intervals are counted, so that declaring one again does not shift it."""


@dataclass(frozen=True)
class Declaration:
    """One deployment."""

    flow: str
    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    queue: str = UNLIMITED
    gpus: tuple[int, ...] | None = None
    schedules: tuple[Schedule, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """How Prefect calls it."""
        return f"{self.flow}/{self.name}"

    @property
    def timetables(self) -> list[Timetable]:
        """Its schedules, as Prefect takes them."""
        return [timetable(schedule) for schedule in self.schedules]


def entrypoints() -> dict[str, str]:
    """Flow → its file and function, of those that this checkout has."""
    return {
        name: entrypoint
        for name, entrypoint in FLOWS.items()
        if (ROOT / entrypoint.partition(":")[0]).is_file()
    }


def declared(site: Site, kinds: set[str]) -> list[Declaration]:
    """Every deployment of a site, of flows of these kinds. Raises: ConfigError if a configuration
    would be refused later."""
    return [one for one in (*_everywhere(site), *_recipes(site), *_own(site)) if one.flow in kinds]


def _everywhere(site: Site) -> Iterator[Declaration]:
    for flow in FLOWS:
        queue, gpus = _place(site, None, flow)
        yield Declaration(
            flow,
            site.called(flow),
            _with_site(site, flow, {}),
            queue,
            gpus,
            tags=("rlpipe", site.tag, flow),
        )


def _recipes(site: Site) -> Iterator[Declaration]:
    for recipe in recipes():
        load_run(recipe, site.settings)
        queue, gpus = _place(site, None, "train")
        parameters = _with_site(site, "train", {"recipe": recipe})
        yield Declaration(
            "train",
            site.called(recipe),
            parameters,
            queue,
            gpus,
            tags=("rlpipe", site.tag, "train", "recipe"),
        )


def _own(site: Site) -> Iterator[Declaration]:
    for entry in site.deployments:
        if entry.flow == "train" and "recipe" in entry.parameters:
            load_run(
                entry.parameters["recipe"], [*site.settings, *entry.parameters.get("overrides", ())]
            )
        for schedule in entry.schedules:
            _check(schedule, f"{entry.flow}/{entry.name}")
        queue, gpus = _place(site, entry, entry.flow)
        parameters = _with_site(site, entry.flow, entry.parameters)
        tags = ("rlpipe", site.tag, entry.flow, *entry.tags)
        yield Declaration(
            entry.flow, site.called(entry.name), parameters, queue, gpus, entry.schedules, tags
        )


def _place(site: Site, entry: Entry | None, flow: str) -> tuple[str, tuple[int, ...] | None]:
    """Queue and GPUs: the set that is asked for, else `train` for training; other flows wait for
    nobody."""
    chosen = (
        entry.gpu_set
        if entry is not None and entry.gpu_set
        else ANY_GPUS
        if flow in TRAINING
        else None
    )
    return (chosen, site.sets[chosen].gpus) if chosen else (UNLIMITED, None)


def _with_site(site: Site, flow: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return (
        {**parameters, "site": list(site.settings)}
        if flow in TAKE_SITE and site.settings
        else parameters
    )


def _check(schedule: Schedule, of: str) -> None:
    try:
        timetable(schedule)
    except ValueError as error:
        found = schedule.cron or schedule.rrule
        raise ConfigError(
            "this is no schedule", where=of, found=found, expected=str(error)
        ) from error


def timetable(schedule: Schedule) -> Timetable:
    """A schedule as Prefect takes it. Raises: ValueError for a cron or iCalendar text that is
    none."""
    return Timetable(
        cron=schedule.cron,
        interval=None if schedule.interval_s is None else timedelta(seconds=schedule.interval_s),
        rrule=schedule.rrule,
        timezone=schedule.timezone,
        anchor_date=EPOCH,
        active=schedule.active,
    )
