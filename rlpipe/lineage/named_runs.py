"""Find the runs and iterations that a user named; refuse unknown ones with the names that exist.

Entry points: `require_run`, `require_commit`, `unknown_run`.
"""

from __future__ import annotations

from rlpipe.config.similar_keys import nearest
from rlpipe.errors import ConfigError
from rlpipe.store.branches import Branch, Branches
from rlpipe.store.objects.files import Files
from rlpipe.types import Commit

MOST_NAMES = 5
"""Names that an error lists."""


def unknown_run(files: Files, run: str, *, where: str) -> ConfigError:
    """Return the error for a name of no run, with the nearest names of the store first."""
    names = Branches(files).names()
    near = nearest(run, names)
    known = [*near, *(name for name in names if name not in near)][:MOST_NAMES]
    return ConfigError(
        "the run does not exist",
        where=where,
        found=f"no run {run!r} in {files.root}",
        expected=f"a run of this store, such as {', '.join(known)}"
        if known
        else "a run; the store has none",
        do=f"did you mean {near[0]}? Otherwise name another store: --home or --store"
        if near
        else "name a run of this store, or another store: --home or --store",
    )


def require_run(files: Files, run: str, *, where: str) -> Branch:
    """Return the start of a run. Raises: ConfigError if the store does not have it."""
    branch = Branches(files).find(run)
    name, _, number = run.partition("@")
    if branch is None and number.isdigit() and Branches(files).find(name):
        raise ConfigError(
            "this command takes the name of a run, without an iteration",
            where=where,
            found=run,
            do=f"write {name}, and --iterations {number} if the command has this option",
        )
    if branch is None:
        raise unknown_run(files, run, where=where)
    return branch


def require_commit(files: Files, run: str, k: int, *, where: str) -> Commit:
    """Return the newest commit of a run that has finished iteration `k`.

    Raises: ConfigError if the run has not.
    """
    newest = Branches(files).newest(run)
    if newest is not None and k <= newest.iteration:
        return newest
    raise ConfigError(
        "the run has not finished this iteration",
        where=where,
        found=f"{run}@{k}",
        expected=f"{run}@K with K from 0 to {newest.iteration}; after {run}@{newest.iteration} "
        f"{newest.iteration + 1} iterations are done"
        if newest
        else "a run with a finished iteration",
        do=f"name one of these, such as {run}@{newest.iteration}"
        if newest
        else f"wait for the first iteration of {run}, or name another run",
    )
