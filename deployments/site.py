"""Settings of one site: sets of GPUs, schedules, overrides for all runs, alerts.

python -m deployments.apply --site my_site.yaml        # example: site.example.yaml
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, ValidationError, field_validator, model_validator

from rlpipe.config.base import Config
from rlpipe.config.problems import Origin
from rlpipe.config.text import parse, read
from rlpipe.errors import ConfigError

ANY_GPUS = "train"
"""Set of GPUs of training runs that name no other set."""
UNLIMITED = "default"
"""Queue without a limit, for iterations: they must never wait for a slot that their run holds."""


class GpuSet(Config):
    """GPUs that a queue of the work pool gives to its runs."""

    gpus: tuple[int, ...] | None = None
    """CUDA devices of the worker's machine that runs see; None: all, or those of the run's
    cluster.
    """
    limit: int = Field(default=1, ge=1)
    """Concurrent runs; further ones wait."""


class Schedule(Config):
    """Times at which runs start automatically; exactly one of `cron`, `interval_s`, `rrule`."""

    cron: str | None = None
    """Five fields: `0 2 * * *` is every night at two."""
    interval_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds between two runs."""
    rrule: str | None = None
    """iCalendar, such as `FREQ=WEEKLY;BYDAY=SA`, or once:
    `DTSTART:20270101T020000Z\\nRRULE:FREQ=DAILY;COUNT=1`."""
    timezone: str = "UTC"
    """IANA name in which `cron` and `rrule` are read."""
    active: bool = True
    """False: declared, but paused until a person switches it on in Prefect's UI."""

    @model_validator(mode="after")
    def _one_kind(self) -> Schedule:
        if sum(kind is not None for kind in (self.cron, self.interval_s, self.rrule)) != 1:
            raise ValueError("give exactly one of cron, interval_s, rrule")
        return self

    @field_validator("timezone")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError) as error:
            raise ValueError("not a time zone; IANA names look like Europe/Berlin") from error
        return name


class Entry(Config):
    """A deployment: a flow with parameters and schedules."""

    flow: Literal["train", "fork", "evaluate", "reprocess", "convert", "audit", "engines"]
    """Name of the flow."""
    name: str = Field(pattern=r"^[^/%&<>]+$")
    """Name of the deployment: `train/<name>`."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters that differ from the flow's defaults. A run may change them."""
    gpu_set: str | None = None
    """Set of GPUs; None: `train` for training, no limit for other flows."""
    schedules: tuple[Schedule, ...] = ()
    """Schedules; (): no automatic runs."""
    tags: tuple[str, ...] = ()
    """Further tags of its runs in Prefect."""


class Alerts(Config):
    """Notifications by automations of the Prefect server."""

    block: str | None = None
    """Notification block of the Prefect server, `<type>/<name>`, such as `slack-webhook/oncall`;
    None: no alerts.
    """
    silent_after_s: float | None = Field(default=240.0, ge=90)
    """Seconds without a heartbeat (one a minute) after which a run becomes Crashed and can be
    retried; None: never.
    """


class Site(Config):
    """One site that starts runs."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the site, if several sites share a Prefect server: deployments are
    `train/<recipe>@<name>`. None: the only site without a name.
    """
    pool: str = "rlpipe"
    """Process work pool, created if missing. Default of a site with a name: `rlpipe-<name>`."""
    gpu_sets: dict[str, GpuSet] = Field(default_factory=dict)
    """Name → GPUs. The set `train` always exists and has all GPUs by default."""
    overrides: tuple[str, ...] = ()
    """`dotted.key=value` for every training run and evaluation of this site, such as the store
    or the Ray cluster. Prefect's form shows them, and a run may change them.
    """
    deployments: tuple[Entry, ...] = ()
    """Deployments in addition to those that every site has."""
    alerts: Alerts = Alerts()
    """Notifications."""

    @model_validator(mode="before")
    @classmethod
    def _default_pool(cls, values: Any) -> Any:
        if (
            isinstance(values, dict)
            and isinstance(values.get("name"), str)
            and "pool" not in values
        ):
            return {**values, "pool": f"rlpipe-{values['name']}"}
        return values

    @model_validator(mode="after")
    def _check_sets(self) -> Site:
        if UNLIMITED in self.gpu_sets:
            raise ValueError(f"a set of GPUs cannot be named {UNLIMITED}: that queue has no limit")
        used = {entry.gpu_set for entry in self.deployments if entry.gpu_set}
        if unknown := used - self.sets.keys():
            raise ValueError(
                f"unknown sets of GPUs: {', '.join(sorted(unknown))}; "
                f"expected {', '.join(self.sets)}"
            )
        return self

    @property
    def settings(self) -> tuple[str, ...]:
        """`overrides`, preceded by the settings that follow from the site's name."""
        # Iterations of this site must run on its own workers.
        iterations = f"orchestration.deployment=iteration/{self.deployment_name('iteration')}"
        return (iterations, *self.overrides) if self.name else self.overrides

    def deployment_name(self, deployment: str) -> str:
        """Return the name of a deployment at this site."""
        return f"{deployment}@{self.name}" if self.name else deployment

    @property
    def tag(self) -> str:
        """Tag of the site's runs, and prefix of its automations."""
        return f"rlpipe/{self.pool}"

    @property
    def sets(self) -> dict[str, GpuSet]:
        """All sets of GPUs by name."""
        return {ANY_GPUS: GpuSet(), **self.gpu_sets}


def load_site(path: Path | None) -> Site:
    """Load a site from a YAML file; None: the default site.

    Raises: ConfigError naming file, line and key.
    """
    if path is None:
        return Site()
    values, lines = parse(read(path, "the site"), str(path))
    try:
        return Site.model_validate(values or {})
    except ValidationError as error:
        origin = Origin(str(path), lines)
        raise ConfigError(
            "\n".join(_problem_line(problem, origin) for problem in error.errors()), where=str(path)
        ) from None


def _problem_line(problem: Any, origin: Origin) -> str:
    """Format a problem of pydantic as `file:line: key: problem`."""
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{origin.of(key)}: {key or 'the whole file'}: {message}"
