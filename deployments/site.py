"""What is particular to one place: its sets of GPUs, its schedules, settings of all its runs, whom
to alert.

    python -m deployments.apply --site my_site.yaml        # see site.example.yaml beside this file

Not here: the deployments that every place has (`declared`), or telling the Prefect server
(`apply`).
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
"""The set that training runs are put into unless they name another."""
UNLIMITED = "default"
"""The queue without a limit: iterations, which must never wait for the place of the run that waits
for them."""


class GpuSet(Config):
    """GPUs that belong together: a queue of the work pool, so many runs at a time."""

    gpus: tuple[int, ...] | None = None
    """CUDA devices of the worker's machine that runs of this set see; None: all, or those of the
    cluster that a run joins."""
    limit: int = Field(default=1, ge=1)
    """Runs at a time; further ones wait in line."""


class Schedule(Config):
    """When runs are made without being asked for; exactly one of `cron`, `interval_s`, `rrule`."""

    cron: str | None = None
    """Five fields: `0 2 * * *` is every night at two."""
    interval_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds from one to the next."""
    rrule: str | None = None
    """iCalendar, such as `FREQ=WEEKLY;BYDAY=SA`, or once:
    `DTSTART:20270101T020000Z\\nRRULE:FREQ=DAILY;COUNT=1`."""
    timezone: str = "UTC"
    """IANA name in which `cron` and `rrule` are read."""
    active: bool = True
    """False: declared, but paused until somebody switches it on in Prefect's pages."""

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
    """One more deployment: a flow with parameters of its own, and when it runs by itself."""

    flow: Literal["train", "fork", "evaluate", "reprocess", "convert", "audit"]
    """Which flow."""
    name: str = Field(pattern=r"^[^/%&<>]+$")
    """Its name after the flow's: `train/<name>`."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters that differ from the flow's defaults; a run may still change them."""
    gpu_set: str | None = None
    """In which set of GPUs it runs; None: `train` for training, without a limit for the others."""
    schedules: tuple[Schedule, ...] = ()
    """When it runs by itself; (): only when asked to."""
    tags: tuple[str, ...] = ()
    """Tags of its runs in Prefect's pages, beside the flow's name."""


class Alerts(Config):
    """Who is told, and of what, by automations of the Prefect server."""

    block: str | None = None
    """Notification block made in Prefect's pages, `<type>/<name>`, such as `slack-webhook/oncall`;
    None: nobody is told."""
    silent_after_s: float | None = Field(default=240.0, ge=90)
    """A run whose process gives no sign of life (one a minute) for so long is Crashed: it can be
    retried then. None: never."""


class Site(Config):
    """One place where runs are made."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """Where several places have one Prefect server: its deployments are `train/<recipe>@<name>`, so
    that each has its own. None: there is no other place, or that one has a name."""
    pool: str = "rlpipe"
    """Process work pool; made if there is none. With a name it is `rlpipe-<name>` unless it is
    given."""
    gpu_sets: dict[str, GpuSet] = Field(default_factory=dict)
    """Name → GPUs. `train` is always there, for all of them."""
    overrides: tuple[str, ...] = ()
    """`dotted.key=value` for every training run and evaluation from here: where the store is, which
    Ray cluster. The form shows them, and a run may change them."""
    deployments: tuple[Entry, ...] = ()
    """Deployments beside those that every place has."""
    alerts: Alerts = Alerts()
    """Who is told of what."""

    @model_validator(mode="before")
    @classmethod
    def _pool_of_its_own(cls, values: Any) -> Any:
        if (
            isinstance(values, dict)
            and isinstance(values.get("name"), str)
            and "pool" not in values
        ):
            return {**values, "pool": f"rlpipe-{values['name']}"}
        return values

    @model_validator(mode="after")
    def _sets_are_there(self) -> Site:
        if UNLIMITED in self.gpu_sets:
            raise ValueError(f"no set of GPUs can be called {UNLIMITED}: that queue has no limit")
        if unknown := {entry.gpu_set for entry in self.deployments if entry.gpu_set} - {
            *self.gpu_sets,
            ANY_GPUS,
        }:
            raise ValueError(
                f"no such set of GPUs: {', '.join(sorted(unknown))}; there are {', '.join(self.sets)}"
            )
        return self

    @property
    def settings(self) -> tuple[str, ...]:
        """`overrides`, and before them what follows from the place's name."""
        iterations = f"orchestration.deployment=iteration/{self.called('iteration')}"
        return (iterations, *self.overrides) if self.name else self.overrides

    def called(self, deployment: str) -> str:
        """The name of a deployment here, of what every place calls it."""
        return f"{deployment}@{self.name}" if self.name else deployment

    @property
    def tag(self) -> str:
        """Tag of the runs of its deployments, and how the names of its automations begin: another
        place may have the same Prefect server."""
        return f"rlpipe/{self.pool}"

    @property
    def sets(self) -> dict[str, GpuSet]:
        """All sets of GPUs by name."""
        return {ANY_GPUS: GpuSet(), **self.gpu_sets}


def load_site(path: Path | None) -> Site:
    """The site of a YAML file, or one without anything of its own. Raises: ConfigError naming file,
    line and key."""
    if path is None:
        return Site()
    values, lines = parse(read(path, "the site"), str(path))
    try:
        return Site.model_validate(values or {})
    except ValidationError as error:
        origin = Origin(str(path), lines)
        raise ConfigError(
            "\n".join(_said(problem, origin) for problem in error.errors()), where=str(path)
        ) from None


def _said(problem: Any, origin: Origin) -> str:
    """One of pydantic's problems: `file:line: key: what is wrong`."""
    key = ".".join(str(part) for part in problem["loc"])
    return f"{origin.of(key)}: {key or 'the whole'}: {problem['msg'].removeprefix('Value error, ')}"
