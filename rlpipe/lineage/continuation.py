"""Compare the configuration of a stored run with another one.

`check_same_run` decides whether the run may continue. `changes_before_first_commit` lists the keys
that the run may still change. `differing` lists the keys of two configurations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlpipe.config.load import validate_stored
from rlpipe.config.paths import with_moved_paths
from rlpipe.config.run import RunConfig
from rlpipe.errors import ConfigError
from rlpipe.lineage.stage_inputs import critic_schedule_length, schedule_length
from rlpipe.store.branches import Branches


class _Absent:
    """Marks a missing key, as opposed to a key with the value null."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
REPROCESSED_KEYS = (
    "num_rollout",
    "fork_from",
    "warm_start",
    "model.start_from",
    "debug",
    "store.root",
    "stop_when",
)
"""Keys that a reprocessed branch sets itself."""
UNTIL_FIRST_COMMIT = ("reward", "advantage")
"""Sections that a run without a commit may change. Its plans and samples stay valid."""


def check_same_run(branches: Branches, config: RunConfig) -> None:
    """Refuse to continue a branch under a configuration that gives other results.

    A run without a commit may change the sections of UNTIL_FIRST_COMMIT.
    Raises: ConfigError naming each key that differs.
    """
    found = _changes(branches, config)
    if found and not _may_change(branches, config.run, found):
        newest = branches.newest(config.run)
        if newest is None:
            removal = f"rlpipe gc --remove {config.run} --delete"
            another = f"or remove it, as it has no iteration yet: {removal}; "
        else:
            another = _advised_fork(config, newest.iteration, found)
        raise ConfigError(
            "a run of this name exists with another configuration",
            where=f"run={config.run}",
            found="\n            ".join(
                f"{key}: was {old!r}, now {new!r}" for key, (old, new) in sorted(found.items())
            ),
            expected="the same values of keys that decide results",
            do=f"undo these changes to continue the run; {another}or start a new run: --run NEW",
        )


def _advised_fork(config: RunConfig, newest: int, keys: Iterable[str]) -> str:
    """Return the words that advise a fork; "" if the changed keys may mean another model."""
    if any(key == "seed" or key.startswith("model.") for key in keys):
        return ""
    done = newest + 1
    longer = f" num_rollout={2 * done}" if done >= config.num_rollout else ""
    return f"or continue it as another run: --fork {config.run}@{newest} --run NEW{longer}; "


def changes_before_first_commit(branches: Branches, config: RunConfig) -> dict[str, str]:
    """Return dotted key → `old → new` of the settings that a run without a commit changes."""
    found = _changes(branches, config)
    if not _may_change(branches, config.run, found):
        return {}
    return {key: f"{old!r} → {new!r}" for key, (old, new) in sorted(found.items())}


def _changes(branches: Branches, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return dotted key → (stored, new) of the decisive settings that differ."""
    record = branches.find(config.run)
    if record is None:
        return {}
    stored = with_moved_paths(validate_stored(record.config), config)
    return differing(_decisive(stored), _decisive(config))


def _may_change(branches: Branches, run: str, keys: Iterable[str]) -> bool:
    """True if no commit needs the configuration, and the keys decide no weights or samples."""
    return (
        all(key.partition(".")[0] in UNTIL_FIRST_COMMIT for key in keys)
        and branches.get(run).parent is None
        and not branches.committed(run)
        and not branches.noted(run)
    )


def _decisive(config: RunConfig) -> dict[str, Any]:
    """Return the settings that decide results.

    The number of iterations decides results only if the learning rate follows from it.
    """
    lengths = {
        "schedule": schedule_length(config),
        "critic's schedule": critic_schedule_length(config),
    }
    schedule = {
        f"optimizer steps of the {name}": length
        for name, length in lengths.items()
        if length is not None
    }
    ranks = {
        "trainer ranks": config.resources.trainer_ranks,
        "critic's own ranks": config.resources.critic_ranks,
    }
    return {**config.non_tuning_values(), **schedule, **ranks}


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key → `old → new` of the settings of a derived run that differ.

    The name of the run and keys that a derived run sets itself are left out.
    """
    own = ("run", *REPROCESSED_KEYS)
    return {
        key: f"{old} → {new}"
        for key, (old, new) in differing(before, after).items()
        if not any(key == name or key.startswith(f"{name}.") for name in own)
    }


def differing(before: Any, after: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Return dotted key → (old, new) of the settings of two configurations that differ.

    A key that only one of them has is ABSENT in the other.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        found: dict[str, tuple[Any, Any]] = {}
        for name in sorted({*before, *after}):
            dotted = f"{key}.{name}" if key else name
            found |= differing(before.get(name, ABSENT), after.get(name, ABSENT), dotted)
        return found
    same = (
        # A stored list was a tuple before it became JSON.
        list(before) == list(after)
        if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple))
        else before == after
    )
    return {} if same else {key: (before, after)}
