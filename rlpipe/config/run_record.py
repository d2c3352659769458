"""What this machine remembers of a run: `{home}/<run>/run.json`, written when the run is opened.

    store     root of its store
    config    its whole configuration
    …         where its processes are (`tasks.context`)

Not here: what happened, which the store's records say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError


def record_path(home: Path, run: str) -> Path:
    """Where the record of a run lies."""
    return home / run / "run.json"


def read_record(path: Path) -> dict[str, Any]:
    """The record at this path. Raises: ConfigError if it cannot be read, or says neither store nor configuration."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("the record of a run cannot be read", where=str(path), found=error, do=_DO) from error
    if not (isinstance(record, dict) and isinstance(record.get("store"), str) and isinstance(record.get("config"), dict)):
        found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ConfigError("not the record of a run", where=str(path), found=found, expected="store and config", do=_DO)
    return record


def store_of(home: Path, run: str) -> str | Path:
    """The store that a run of this home uses, or the home's own. Raises: ConfigError."""
    path = record_path(home, run)
    return read_record(path)["store"] if path.is_file() else home / "store"


_DO = "start the run again, which writes it anew; its store has lost nothing"
