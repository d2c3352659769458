"""Decide whether an existing run may continue under a configuration: `check_same_run`."""

from __future__ import annotations

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


def check_same_run(branches: Branches, config: RunConfig) -> None:
    """Refuse to continue a branch under a configuration that gives other results.

    Raises: ConfigError naming each key that differs.
    """
    record = branches.find(config.run)
    if record is None:
        return
    stored = with_moved_paths(validate_stored(record.config), config)
    differing = sorted(_differences(_decisive(stored), _decisive(config)))
    if differing:
        newest = branches.newest(config.run)
        fork = (
            f"{config.run}@{newest.iteration}"
            if newest
            else f"{config.run}@K (after its first commit)"
        )
        raise ConfigError(
            "a run of this name exists with another configuration",
            where=f"run={config.run}",
            found="\n            ".join(differing),
            expected="the same values of keys that decide results",
            do="undo these changes to continue the run; "
            f"or continue it as another run: --fork {fork} --run NEW; "
            "or start a new run: --run NEW",
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


def _differences(stored: Any, current: Any, key: str = "") -> list[str]:
    if isinstance(stored, dict) and isinstance(current, dict):
        names = sorted(set(stored) | set(current))
        nested = (
            _differences(
                stored.get(name, ABSENT),
                current.get(name, ABSENT),
                f"{key}.{name}" if key else name,
            )
            for name in names
        )
        return [line for lines in nested for line in lines]
    same = (
        # A stored list was a tuple before it became JSON.
        list(stored) == list(current)
        if isinstance(stored, (list, tuple)) and isinstance(current, (list, tuple))
        else stored == current
    )
    return [] if same else [f"{key}: was {stored!r}, now {current!r}"]
