"""What taking turns on shared GPUs cost a run, and what was in memory meanwhile:  python -m tools.switches --run NAME

A line for each switch from one phase to another (`rlpipe.actors.sharing`): how often, the median
and the longest in seconds, then in GiB the most that a trainer rank's process had of its GPU during
the phase that ended, what it keeps in the next one, and what is in use of its GPU right after the
switch, engines included: the first time, the largest, the last time. A last column that is larger
than the first is memory that was not given back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlpipe.config.load import HOME_VARIABLE, home, use_home
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import get_run

HEADER = (
    "from",
    "to",
    "times",
    "seconds",
    "longest",
    "peak",
    "kept",
    "used first",
    "largest",
    "last",
)


def main() -> int:
    """Exit codes: 0 done, 2 there is no such run, or it shares no GPUs."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.switches", description="What taking turns on shared GPUs cost."
    )
    parser.add_argument("--run", required=True, help="name of the run, that is of its branch")
    parser.add_argument("--json", action="store_true", help="a JSON list instead of the table")
    parser.add_argument("--home", help=f"where runs are kept (default: ${HOME_VARIABLE} or ./runs)")
    arguments = parser.parse_args()
    try:
        use_home(arguments.home)
        rows = summary(switches(home() / arguments.run))
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([dict(zip(HEADER, row, strict=True)) for row in rows], indent=1))
        return 0
    for row in (HEADER, *rows):
        print("  ".join(f"{_shown(cell):>10}" for cell in row))
    return 0


def switches(directory: Path) -> list[dict[str, Any]]:
    """All switches of a run, oldest first, from the nodes of its commits. Raises: ConfigError if
    there are none."""
    files = Files(get_run(directory.parent, directory.name).store)
    nodes = Nodes(files)
    commits = [*Branches(files).walk(directory.name)][::-1]
    said = (
        nodes.get(stage, digest).outputs
        for commit in commits
        for stage, digest in commit.nodes.items()
    )
    found = [switch for outputs in said for switch in outputs.get("switches", ())]
    if not found:
        raise ConfigError(
            "this run did not share GPUs",
            where=directory.name,
            expected="a run with resources.colocate",
        )
    return found


def summary(found: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """A row of HEADER for each pair of phases, in the order of their first time; memory in GiB."""
    pairs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for switch in found:
        pairs.setdefault((switch["from"] or "–", switch["to"]), []).append(switch)
    return [(*pair, len(those), *_seconds(those), *_memory(those)) for pair, those in pairs.items()]


def _seconds(those: list[dict[str, Any]]) -> tuple[float, float]:
    seconds = [switch["seconds"] for switch in those]
    return statistics.median(seconds), max(seconds)


def _memory(those: list[dict[str, Any]]) -> tuple[float, ...]:
    peaks, kept, used = (
        [switch[name] / 1024**3 for switch in those]
        for name in ("trainer_peak_bytes", "trainer_bytes", "used_bytes")
    )
    return max(peaks), max(kept), used[0], max(used), used[-1]


def _shown(cell: Any) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


if __name__ == "__main__":
    sys.exit(main())
