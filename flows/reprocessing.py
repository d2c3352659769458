"""The branch that stored rollouts are reprocessed into, and the run that is trained from it: their
configurations.

The branch is known by the whole configuration of the run it is made of, with what was changed.
Where the range does not begin with the first iteration, it is a fork of the commit before.

Not here: doing it (`flows.reprocess`). Imports no Prefect, so that a command line can refuse what
is wrong before a server starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.recorded import Recorded, recorded, write_recipe
from rlpipe.config.load import load_run
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.lineage.rollouts import iterations as stored_iterations
from rlpipe.store.branches import Branches, parse_commit_name

PLACED = ("num_rollout", "fork_from", "warm_start", "model.start_from", "debug", "store.root")
"""Keys that a reprocessed branch sets itself."""


@dataclass(frozen=True)
class Reprocessing:
    """What is asked for."""

    source: Recorded
    config: RunConfig
    """Of the new branch."""
    iterations: list[int]
    parent: str | None
    """Commit that the first of them follows; None if it is the first of all, or nothing was
    committed."""
    init: str
    """Digest of the node of the first weights."""


def reprocessing(
    home: Path,
    *,
    of: str,
    iterations: str | None = None,
    run: str | None = None,
    overrides: Sequence[str] = (),
    store: str | None = None,
) -> Reprocessing:
    """The branch `run` of the run `of`, from A up to B (`iterations`: `A:B`; None: all). Raises:
    ConfigError."""
    source = recorded(home, of, store)
    refuse_placed(overrides)
    name = run or f"{of}.reprocessed"
    if name == of:
        raise ConfigError(
            "a reprocessed run is another branch",
            where="run",
            found=name,
            do="take another name: --run NEW",
        )
    chosen = chosen_iterations(source, iterations)
    branches = Branches(source.files)
    trunk = trunk_of(branches, of)
    first = chosen[0]
    parent = branches.parent_name(trunk, first) if branches.newest(trunk) is not None else None
    config = load_run(source.recipe, [*overrides, *placed(source, chosen, parent, loads=of)], name)
    return Reprocessing(source, config, chosen, parent, branches.get(of).init)


def training(home: Path, asked: Reprocessing, name: str, overrides: Sequence[str] = ()) -> Path:
    """The recipe of a run that trains from the reprocessed branch. Raises: ConfigError if it
    cannot."""
    if asked.parent is None and asked.iterations[0] != 0:
        raise ConfigError(
            "training begins with the first iteration, or after a committed one",
            where="iterations",
            found=f"the first is {asked.iterations[0]}, and {asked.source.run} has committed nothing",
            expected="0:B",
        )
    loads = asked.config.run
    fixed = [*overrides, *placed(asked.source, asked.iterations, asked.parent, loads=loads)]
    config = load_run(write_recipe(home, loads, asked.config.model_dump(mode="json")), fixed, name)
    return write_recipe(home, name, config.model_dump(mode="json"))


def placed(
    source: Recorded, iterations: Sequence[int], parent: str | None, *, loads: str
) -> list[str]:
    """The overrides that make a configuration one of a branch that loads its rollouts, and goes on
    from `parent`."""
    fork = parse_commit_name(parent) if parent else None
    return [
        f"num_rollout={iterations[-1] + 1}",
        f"fork_from={json.dumps({'branch': fork[0], 'iteration': fork[1]} if fork else None)}",
        "warm_start=null",
        f"model.start_from={json.dumps(None if fork else first_weights(source))}",
        f"debug={json.dumps({'load_debug_rollout_data': loads})}",
        "stop_when=null",
    ]


def first_weights(source: Recorded) -> dict[str, Any] | None:
    """`model.start_from` of a run whose first weights are the source's: those of its warm start, if
    it had one."""
    if source.config.get("warm_start"):
        return {"branch": f"{source.run}.warm_start", "iteration": None}
    return source.config["model"].get("start_from")


def trunk_of(branches: Branches, run: str) -> str:
    """The run that trained along the rollouts of `run`: itself, or of a reprocessed one that which
    it was made of."""
    branch = branches.get(run)
    seen = {run}
    while (
        loads := branch.config.get("debug", {}).get("load_debug_rollout_data")
    ) and not _own_commits(branches, branch.branch):
        if loads in seen or branches.find(loads) is None:
            break
        seen.add(loads)
        branch = branches.get(loads)
    return branch.branch


def _own_commits(branches: Branches, run: str) -> bool:
    newest = branches.newest(run)
    return newest is not None and newest.branch == run


def chosen_iterations(source: Recorded, said: str | None) -> list[int]:
    """The stored iterations from A up to B, without gaps. Raises: ConfigError."""
    there = stored_iterations(source.files, source.run)
    if not there:
        raise ConfigError(
            "no rollout of this run is stored", where=source.run, found=source.files.root
        )
    first, colon, end = (said or ":").partition(":")
    if not all(
        number.isdigit() or (colon and not number)
        for number in ((first, end) if colon else (first,))
    ):
        raise ConfigError(
            "not iterations",
            where="iterations",
            found=said,
            expected="A:B, A:, :B, : or one number",
        )
    low = int(first or there[0])
    high = (int(end) if end else there[-1] + 1) if colon else low + 1
    chosen = [k for k in there if low <= k < high]
    if chosen and chosen == list(range(chosen[0], chosen[-1] + 1)):
        return chosen
    found = f"{said or ':'}, of which there are {chosen}" if chosen else said
    raise ConfigError(
        "no such rollouts",
        where="iterations",
        found=found,
        expected=f"some of {there[0]}:{there[-1] + 1}, no gaps",
    )


def refuse_placed(overrides: Sequence[str]) -> None:
    """Raises: ConfigError for a key that the branch sets itself."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if any(key == one or key.startswith(f"{one}.") for one in PLACED):
            raise ConfigError(
                "a reprocessed run sets this itself", where=key, found=override, do="leave it out"
            )
