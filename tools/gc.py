"""Garbage collection: list or delete objects of a store that no run needs.

    rlpipe gc                                          # unreferenced objects
    rlpipe gc --keep-checkpoints 3 [--keep-every 100]  # and spare checkpoints
    rlpipe gc --remove RUN [--remove RUN ...]          # and whole runs
    rlpipe gc ... --delete                             # delete instead of listing

Without `--delete` nothing changes, and runs may continue. `--delete` is exclusive: it is refused
while a run is driven, and a run that begins meanwhile is refused. After a kill, the same command
continues. Objects younger than `--grace` stay. rlpipe/store/gc.py and rlpipe/store/retention.py
define which objects may be deleted.

Exit codes: 0 done, 2 the objects cannot be determined, or another process uses the store.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from rich.progress import Progress

from rlpipe.config.load import home, use_home
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.lineage.named_runs import unknown_run
from rlpipe.store.epochs import Epochs
from rlpipe.store.gc import remove, unreachable
from rlpipe.store.objects.files import Files
from rlpipe.store.retention import (
    Removal,
    Retention,
    branch_removal,
    record_removed_checkpoints,
    spare_checkpoints,
)
from tools.command import parsers
from tools.piped import piped

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def main() -> int:
    """Run the command."""
    arguments = parsers.gc().parse_args()
    try:
        use_home(arguments.home)
        files = Files(arguments.store or home() / "store")
        with Epochs(files).exclusive() if arguments.delete else nullcontext() as own:
            for run in arguments.remove:
                if not files.list(f"branches/{run}"):
                    raise unknown_run(files, run, where=f"--remove {run}")
            asked = enumerate(arguments.remove)
            records = [
                one.path
                for n, run in asked
                for one in branch_removal(files, run, arguments.remove[:n])
            ]
            grace_s = seconds(arguments.grace)
            spare = spare_of(files, grace_s, arguments.keep_checkpoints, arguments.keep_every)
            rest = unreachable(files, grace_s, {*records, *(removal.path for removal in spare)})
            paths = list(dict.fromkeys([*records, *rest]))
            print_summary(files, paths, listed=arguments.list)
            if own is not None:
                # Another process may have taken the store over while objects were listed.
                own.check()
                # Before the deletion: an audit must know why checkpoints are missing.
                record_removed_checkpoints(files, spare, set(paths))
                with Progress(transient=True) as bar:
                    shown = bar.add_task("deleting", total=len(paths))
                    remove(
                        files, paths, own.check, lambda done, _: bar.update(shown, completed=done)
                    )
        result = "deleted" if arguments.delete else "can be deleted with --delete"
        count = f"{len(paths)} object{'s' if len(paths) != 1 else ''}"
        print(f"{count} {result} (younger than {arguments.grace} are kept)")
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    return 0


def seconds(text: str) -> float:
    """Return seconds of a time such as 90m. Raises: ConfigError."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return float(match[1]) * UNITS[match[2]]
    raise ConfigError(
        "not a time",
        where="--grace",
        found=text,
        expected="a number and one of s, m, h, d, such as 90m",
    )


def spare_of(
    files: Files, grace_s: float, keep_last: int | None, keep_every: int | None
) -> list[Removal]:
    """Return records and files of spare checkpoints. Raises: as `spare_checkpoints`."""
    if keep_every is not None and keep_last is None:
        raise ConfigError(
            "--keep-every needs --keep-checkpoints",
            where="--keep-every",
            found=keep_every,
            do="give --keep-checkpoints too",
        )
    return (
        spare_checkpoints(files, Retention(keep_last, keep_every), grace_s)
        if keep_last is not None
        else []
    )


def print_summary(files: Files, paths: Sequence[str], *, listed: bool) -> None:
    """Print objects and bytes by folder, and every object if `listed`."""
    selected = set(paths)
    totals = {}
    for entry in (
        entry for temporary in (False, True) for entry in files.entries(temporary=temporary)
    ):
        if entry.path in selected:
            count, size = totals.get(entry.path.split("/")[0], (0, 0))
            totals[entry.path.split("/")[0]] = (count + 1, size + entry.size_bytes)
    for folder, (count, size) in sorted(totals.items()):
        print(f"{folder:<12} {count:>8} objects {size / 1e6:>12.1f} MB")
    for path in paths if listed else ():
        print(path)


if __name__ == "__main__":
    sys.exit(piped(main))
