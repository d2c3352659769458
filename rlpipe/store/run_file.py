"""`{home}/{run}/run.json`: the store of a run, and the configuration of its last start.

Command lines, and processes that join a run, know only its name and read this file. The process
that starts a run writes it. The run itself is a branch of the store (`branches`).

Entry points: `get_run`, `find_run`, `store_of`, `stores_of`, `write_run`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from rlpipe.config.store_root import canonical_root
from rlpipe.errors import ConfigError, ObjectCorrupt


class RunFile(BaseModel):
    """Content of the file."""

    store: str
    """URL or directory of the store."""
    config: dict[str, Any]
    """The whole configuration."""
    epoch: int | None = None
    """Epoch of the driver; None if no process can join the run."""
    ray: str | None = None
    """Address of the Ray cluster of the actors, once they are up."""


def run_path(home: Path, run: str) -> Path:
    """Return the path of the file."""
    return home / run / "run.json"


def find_run(home: Path, run: str) -> RunFile | None:
    """Return the file of a run, or None if it is missing. Raises: ObjectCorrupt."""
    path = run_path(home, run)
    try:
        return RunFile.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        found = error
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            found = f"{first['loc']}: {first['msg']}"
        raise ObjectCorrupt(
            "not a readable run file",
            where=str(path),
            found=found,
            do="start the run again, which writes the file; or remove the file, and name the "
            "store: --store URL",
        ) from error


def get_run(home: Path, run: str) -> RunFile:
    """Return the file of a run. Raises: ConfigError if it is missing; ObjectCorrupt."""
    if (run_file := find_run(home, run)) is None:
        known = sorted(path.parent.name for path in home.glob("*/run.json"))
        raise ConfigError(
            "there is no such run",
            where=f"run={run}",
            found=f"no {run_path(home, run)}",
            expected=f"a run of this home: {', '.join(known[:10])}"
            if known
            else "a run; this home has none",
            do="name another home: --home or RLPIPE_HOME",
        )
    return run_file


def store_of(home: Path, run: str) -> str | Path:
    """Return the store of a run; the home's own store if the run is unknown.

    Raises: ObjectCorrupt.
    """
    run_file = find_run(home, run)
    return run_file.store if run_file else home / "store"


def stores_of(home: Path) -> list[str]:
    """Return the home's own store, if it exists, and every other store of the runs of this home.

    Raises: ObjectCorrupt.
    """
    own = home / "store"
    runs = sorted(path.parent.name for path in home.glob("*/run.json"))
    stores = [run_file.store for run in runs if (run_file := find_run(home, run)) is not None]
    # The home's own store counts also where no run is left.
    found = [str(own)] if own.exists() or not stores else []
    return list({canonical_root(store): store for store in [*found, *stores]}.values())


def write_run(home: Path, run: str, run_file: RunFile) -> None:
    """Write the file of a run. Readers see the old file or all of the new one."""
    path = run_path(home, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A rename is atomic. The random suffix keeps concurrent writers from sharing a file.
    unfinished = path.with_suffix(f".{uuid4().hex[:8]}")
    unfinished.write_text(run_file.model_dump_json(indent=1), encoding="utf-8")
    unfinished.replace(path)
