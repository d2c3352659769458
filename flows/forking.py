"""A fork under its parent's own configuration, with some settings changed: no recipe is needed.

Not here: what a fork shares with its parent, or how its weights come to be in the store
(`tasks.fork`). Imports no Prefect, so that a command line can refuse what is wrong before a server
starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flows.recorded import recorded, run_at, write_recipe
from rlpipe.config.load import load_run
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.store.branches import Branches, parse_commit_name


class Forked(NamedTuple):
    """A fork that can be started."""

    config: RunConfig
    recipe: Path
    """A file with all of it."""


def forked(
    home: Path,
    of: str,
    run: str | None = None,
    overrides: Sequence[str] = (),
    store: str | None = None,
) -> Forked:
    """The fork `run` (default: `RUN-from-K`) of `RUN[@K]` (default: its newest commit, or that of a
    fork that has begun).

    Raises: ConfigError.
    """
    parent, iteration = run_at(of, "fork")
    source = recorded(home, parent, store)
    branches = Branches(source.files)
    newest = branches.newest(parent)
    if newest is None or (iteration is not None and iteration > newest.iteration):
        raise ConfigError(
            "that run has not committed this iteration",
            where="fork",
            found=of,
            expected=f"RUN@K with K from 0 to {newest.iteration}"
            if newest
            else "a run with a committed iteration",
        )
    began = branches.find(run) if run and iteration is None else None
    at = (
        parse_commit_name(began.parent)[1]
        if began and began.parent
        else newest.iteration
        if iteration is None
        else iteration
    )
    start = json.dumps({"branch": parent, "iteration": at})
    fixed = [f"fork_from={start}", "warm_start=null", "model.start_from=null"]
    config = load_run(source.recipe, [*overrides, *fixed], run or f"{parent}-from-{at}")
    if config.num_rollout <= at + 1:
        raise ConfigError(
            "nothing would be trained",
            where="num_rollout",
            found=f"{config.num_rollout}, counted from iteration 0 of {parent}",
            expected=f"more than {at + 1}",
            do=f"num_rollout={at + 1 + max(1, config.num_rollout // 2)}, or fork from an earlier iteration",
        )
    return Forked(config, write_recipe(home, config.run, config.model_dump(mode="json")))
