"""What a person fills in to start a run, on a form or a command line: types of parameters, and what
forks and seeds mean.

    recipe, overrides, run, seed, fork  →  the overrides and the name that `load_run` takes

Not here: the configuration itself (`rlpipe.config`). Imports no Prefect, so that a command line can
use it before a server starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import WithJsonSchema

from rlpipe.config.load import recipes

RECIPE = "A recipe that comes with the project, or the path of a YAML file."
Recipe = Annotated[
    str,
    WithJsonSchema(
        {
            "type": "string",
            "description": RECIPE,
            "anyOf": [
                {"type": "string", "title": "of the project", "enum": recipes()},
                {"type": "string", "title": "a file", "pattern": r"\.ya?ml$"},
            ],
        }
    ),
]
"""A recipe by name or path; on the form a list to choose from, or a path."""
Fork = Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^[^@\s]+(@\d+)?$"})]
"""`RUN` or `RUN@K`."""


def as_settled(
    recipe: str,
    overrides: Sequence[str],
    run: str | None,
    *,
    seed: int | None = None,
    fork: str | None = None,
) -> tuple[list[str], str | None]:
    """The overrides and the name of a run, with what `seed` and `fork` add to them; overrides that
    are given win.

    Without `run`: a seed makes it `<recipe>-seed<N>`, a fork `<run>-from-<K>`.
    """
    settled = list(overrides)
    if seed is not None:
        settled.insert(0, f"seed={seed}")
        run = run or f"{Path(recipe).stem}-seed{seed}"
    if fork:
        branch, _, iteration = fork.partition("@")
        run = run or f"{branch}-from-{iteration or 'newest'}"
        settled[:0] = [
            f"fork_from={{branch: {branch}, iteration: {iteration or 'null'}}}",
            "warm_start=null",
            "model.start_from=null",
        ]
    return settled, run


def named_at(run: str | None, moment: datetime | None) -> str | None:
    """A run's name with `%Y`, `%m`, `%d`, `%H` … of the moment it was scheduled for (UTC): a name
    for each run of a schedule.

    A retry has the moment of its first try, so it goes on with the same run.
    """
    if run is None or "%" not in run:
        return run
    return (moment or datetime.now(UTC)).strftime(run)


def name_of(parameters: dict[str, Any], moment: datetime | None) -> str:
    """What a run will be called, from the parameters of its flow; nothing is checked."""
    recipe = parameters["recipe"]
    _, run = as_settled(
        recipe, (), parameters.get("run"), seed=parameters.get("seed"), fork=parameters.get("fork")
    )
    return named_at(run, moment) or Path(recipe).stem
