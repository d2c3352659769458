"""The configuration of a run that is in a store, as a recipe: for what goes on from it with a few
settings changed.

    recorded(home, "my_run").recipe     {home}/my_run/configuration.yaml

Imports no Prefect, so that a command line can refuse what is wrong before a server starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlpipe.config.introduced import upgraded
from rlpipe.config.run import RunConfig
from rlpipe.config.text import dump
from rlpipe.errors import ConfigError
from rlpipe.store.branches import Branches
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import find_run


@dataclass(frozen=True)
class Recorded:
    """A run of a store."""

    run: str
    files: Files
    config: dict[str, Any]
    """As the run was last started on this machine with this home, else as its branch was."""
    recipe: Path
    """A file with that."""


def recorded(home: Path, run: str, store: str | None = None) -> Recorded:
    """The run of this name, in `store` or where the run of this home keeps it, else in the home's
    own.

    Raises: ConfigError if there is none; ObjectCorrupt.
    """
    said = find_run(home, run)
    files = Files(store or (said.store if said else home / "store"))
    branches = Branches(files)
    branch = branches.find(run)
    if branch is None:
        raise ConfigError(
            "there is no such run",
            where=run,
            found=f"not in {files.root}",
            expected=f"one of {', '.join(branches.names()) or 'its runs, but it has none'}",
            do="name one of this store, or give --home or --store",
        )
    config = said.config if said and Files(said.store).root == files.root else branch.config
    config = upgraded(RunConfig, config)
    if store is not None or files.root != Files(home / "store").root:
        config = {**config, "store": {**config.get("store", {}), "root": files.root}}
    return Recorded(run, files, config, write_recipe(home, run, config))


def write_recipe(home: Path, run: str, config: dict[str, Any]) -> Path:
    """A configuration as a recipe file beside the run's other files."""
    recipe = home / run / "configuration.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    unfinished = recipe.with_suffix(f".{uuid4().hex[:8]}")
    unfinished.write_text(dump(config), encoding="utf-8")
    return unfinished.replace(recipe)


def run_at(said: str, where: str) -> tuple[str, int | None]:
    """Run and iteration of `RUN` or `RUN@K`. Raises: ConfigError."""
    run, at, iteration = said.partition("@")
    if not run or (at and not iteration.isdigit()):
        raise ConfigError(
            "not the number of an iteration", where=where, found=said, expected="RUN or RUN@K"
        )
    return run, int(iteration) if at else None
