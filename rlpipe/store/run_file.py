"""`{home}/{run}/run.json`: in which store a run of this home is, and what it was last started with.

For whoever has the name of a run and nothing else: command lines, and processes that join a run.
Written by who starts one.

Not here: the run itself, which is its branch (`branches`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from rlpipe.errors import ConfigError, ObjectCorrupt


class RunFile(BaseModel):
    """What it says."""

    store: str
    """URL or directory of the store."""
    config: dict[str, Any]
    """The whole configuration."""
    epoch: int | None = None
    """Under which it is driven; None: nobody can join it."""
    ray: str | None = None
    """Address of the Ray that its actors are on, once they are up."""


def run_path(home: Path, run: str) -> Path:
    """Where it lies."""
    return home / run / "run.json"


def find_run(home: Path, run: str) -> RunFile | None:
    """What this home says of a run; None if it knows none of that name. Raises: ObjectCorrupt if it
    cannot be read."""
    path = run_path(home, run)
    try:
        return RunFile.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        found = (
            f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
            if isinstance(error, ValidationError)
            else error
        )
        do = "start the run again, which writes it anew; or remove it, and name the store: --store URL"
        raise ObjectCorrupt(
            "not the record of a run", where=str(path), found=found, do=do
        ) from error


def get_run(home: Path, run: str) -> RunFile:
    """As `find_run`. Raises: ConfigError if there is none; ObjectCorrupt."""
    if (said := find_run(home, run)) is None:
        found = f"no {run_path(home, run)}"
        raise ConfigError(
            "there is no such run",
            where=f"run={run}",
            found=found,
            do="start it, or name one of this home",
        )
    return said


def store_of(home: Path, run: str) -> str | Path:
    """The store that a run of this home uses, or the home's own. Raises: ObjectCorrupt."""
    said = find_run(home, run)
    return said.store if said else home / "store"


def write_run(home: Path, run: str, said: RunFile) -> None:
    """Say where a run is. Readers see all of it or what was there before, whoever else writes."""
    path = run_path(home, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{uuid4().hex[:8]}")
    unfinished.write_text(said.model_dump_json(indent=1), encoding="utf-8")
    unfinished.replace(path)
