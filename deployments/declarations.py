"""Deployments of a site as data: one for each flow, one for each recipe, and the site's own.

    train/train, train/<recipe> ..., fork/fork, iteration/iteration, evaluate/evaluate,
    reprocess/reprocess, convert/convert, audit/audit, engines/engines

Names of a site with a name end in `@<site>`: `train/<recipe>@<site>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from prefect.schedules import Schedule as Timetable

from deployments.site import ANY_GPUS, UNLIMITED, Entry, Schedule, Site
from flows.parameters import recipe_summary
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
    "engines": "flows/engines.py:engines",
}
"""Flow → its entrypoint, file and function."""
TRAINING = ("train", "fork")
"""Flows that wait for GPUs, unless their deployment names another set."""
TAKE_SITE = ("train", "evaluate")
"""Flows with the parameter `site`."""
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""Start of all intervals. A fixed start keeps a schedule in place when it is declared again."""


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
    description: str = ""
    """One sentence for Prefect's page of the deployment, before the flow's own description."""

    @property
    def full_name(self) -> str:
        """Name in Prefect: flow and deployment."""
        return f"{self.flow}/{self.name}"

    def described(self, flow_description: str | None) -> str:
        """Return the description in Prefect: of this deployment, then of its flow."""
        return "\n\n".join(filter(None, (self.description, flow_description)))

    @property
    def timetables(self) -> list[Timetable]:
        """Schedules in Prefect's type."""
        return [timetable(schedule) for schedule in self.schedules]


def entrypoints() -> dict[str, str]:
    """Return flow → entrypoint, of the flows that this checkout has."""
    return {
        name: entrypoint
        for name, entrypoint in FLOWS.items()
        if (ROOT / entrypoint.partition(":")[0]).is_file()
    }


def declared(site: Site, flows: set[str]) -> list[Declaration]:
    """Return every deployment of a site whose flow is in `flows`.

    Loads each configuration, so a wrong one is refused now. Raises: ConfigError.
    """
    declarations = (*_flows(site), *_recipes(site), *_entries(site))
    return [declaration for declaration in declarations if declaration.flow in flows]


def _flows(site: Site) -> Iterator[Declaration]:
    for flow in FLOWS:
        queue, gpus = _queue_and_gpus(site, None, flow)
        yield Declaration(
            flow,
            site.deployment_name(flow),
            _with_site(site, flow, {}),
            queue,
            gpus,
            tags=("rlpipe", site.tag, flow),
        )


def _recipes(site: Site) -> Iterator[Declaration]:
    for recipe in recipes():
        # Refuse settings now that every scheduled run would refuse later.
        load_run(recipe, site.settings)
        queue, gpus = _queue_and_gpus(site, None, "train")
        parameters = _with_site(site, "train", {"recipe": recipe})
        yield Declaration(
            "train",
            site.deployment_name(recipe),
            parameters,
            queue,
            gpus,
            tags=("rlpipe", site.tag, "train", "recipe"),
            description=recipe_summary(recipe),
        )


def _entries(site: Site) -> Iterator[Declaration]:
    for entry in site.deployments:
        if entry.flow == "train" and "recipe" in entry.parameters:
            load_run(
                entry.parameters["recipe"], [*site.settings, *entry.parameters.get("overrides", ())]
            )
        for schedule in entry.schedules:
            _check(schedule, f"{entry.flow}/{entry.name}")
        queue, gpus = _queue_and_gpus(site, entry, entry.flow)
        parameters = _with_site(site, entry.flow, entry.parameters)
        tags = ("rlpipe", site.tag, entry.flow, *entry.tags)
        yield Declaration(
            entry.flow,
            site.deployment_name(entry.name),
            parameters,
            queue,
            gpus,
            entry.schedules,
            tags,
        )


def _queue_and_gpus(
    site: Site, entry: Entry | None, flow: str
) -> tuple[str, tuple[int, ...] | None]:
    """Return queue and GPUs: the entry's set, else `train` for training, else no limit."""
    if entry is not None and entry.gpu_set:
        return entry.gpu_set, site.sets[entry.gpu_set].gpus
    if flow in TRAINING:
        return ANY_GPUS, site.sets[ANY_GPUS].gpus
    return UNLIMITED, None


def _with_site(site: Site, flow: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if flow in TAKE_SITE and site.settings:
        return {**parameters, "site": list(site.settings)}
    return parameters


def _check(schedule: Schedule, deployment: str) -> None:
    try:
        timetable(schedule)
    except ValueError as error:
        found = schedule.cron or schedule.rrule
        raise ConfigError(
            "not a valid schedule", where=deployment, found=found, expected=str(error)
        ) from error


def timetable(schedule: Schedule) -> Timetable:
    """Convert a schedule to Prefect's type. Raises: ValueError for a wrong cron or rrule."""
    return Timetable(
        cron=schedule.cron,
        interval=None if schedule.interval_s is None else timedelta(seconds=schedule.interval_s),
        rrule=schedule.rrule,
        timezone=schedule.timezone,
        anchor_date=EPOCH,
        active=schedule.active,
    )
