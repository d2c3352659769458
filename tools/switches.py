"""Print the cost of sharing GPUs (`resources.colocate`): seconds and memory of each switch.

    python -m tools.switches --run NAME

Each line is a switch from one phase to another (`rlpipe.actors.sharing`). Columns: number of
switches; median and longest seconds; GiB of a trainer rank's process at its peak in the phase that
ended, and kept in the next one; GiB in use of the GPU right after the switch, engines included: the
first time, the largest, the last time. A last value above the first one is memory that was not
released.
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
    """Run the command. Exit codes: 0 done, 2 the run does not exist or shares no GPUs."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.switches", description="Print the cost of sharing GPUs."
    )
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--home", help=f"directory of runs (default: ${HOME_VARIABLE} or ./runs)")
    arguments = parser.parse_args()
    try:
        use_home(arguments.home)
        rows = summary(switches(home() / arguments.run))
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([dict(zip(HEADER, row, strict=True)) for row in rows], indent=1))
        return 0
    for row in (HEADER, *rows):
        print("  ".join(f"{_format(cell):>10}" for cell in row))
    return 0


def switches(directory: Path) -> list[dict[str, Any]]:
    """Return all switches of a run, oldest first. Raises: ConfigError if there are none."""
    files = Files(get_run(directory.parent, directory.name).store)
    nodes = Nodes(files)
    commits = [*Branches(files).walk(directory.name)][::-1]
    outputs = (
        nodes.get(stage, digest).outputs
        for commit in commits
        for stage, digest in commit.nodes.items()
    )
    switches = [switch for output in outputs for switch in output.get("switches", ())]
    if not switches:
        raise ConfigError(
            "the run did not share GPUs",
            where=directory.name,
            expected="a run with resources.colocate",
        )
    return switches


def summary(switches: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return a row of HEADER for each pair of phases, in order of first use. Memory is in GiB."""
    pairs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for switch in switches:
        pairs.setdefault((switch["from"] or "–", switch["to"]), []).append(switch)
    return [(*pair, len(group), *_seconds(group), *_memory(group)) for pair, group in pairs.items()]


def _seconds(group: list[dict[str, Any]]) -> tuple[float, float]:
    seconds = [switch["seconds"] for switch in group]
    return statistics.median(seconds), max(seconds)


def _memory(group: list[dict[str, Any]]) -> tuple[float, ...]:
    peaks, kept, used = (
        [switch[name] / 1024**3 for switch in group]
        for name in ("trainer_peak_bytes", "trainer_bytes", "used_bytes")
    )
    return max(peaks), max(kept), used[0], max(used), used[-1]


def _format(cell: Any) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


if __name__ == "__main__":
    sys.exit(main())
