"""Print how many launches of a checkout of slime are accepted here, and why the others are not.

    python -m tools.slime_counts CHECKOUT [scripts|launchers] [--only TEXT ...] [--start FOLDER]

Accepted means that `rlpipe train` with the words of the launch, unchanged, has a configuration.
With `--start`, each accepted launch also trains two iterations of a small model of its type
(`tools.slime_counts.start`); FOLDER has a folder for each with its output and result. The same
command again tries those that did not pass.
The current folder is the checkout, as in the launches. `git clone https://github.com/THUDM/slime`
makes one; the counts in rlpipe/slime/README.md name their commit.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlpipe.config.load import load_run
from rlpipe.errors import RlpipeError
from rlpipe.slime.command_line import read_flags
from tools.command import parsers
from tools.command.run_words import apply_flags, read_words
from tools.slime_counts.launches import Launch, launchers, scripts
from tools.slime_counts.start import FAILED, STARTED, TRAINER_ONLY, Start, start

ACCEPTED = "accepted"
REFUSED = "refused"
OUTCOMES = (STARTED, TRAINER_ONLY, FAILED, REFUSED)


def main() -> int:
    """Print the counts. Exit code 1 if a launch is not accepted."""
    parser = argparse.ArgumentParser(prog="python -m tools.slime_counts", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("kind", nargs="?", choices=("scripts", "launchers"))
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="names with one of these texts"
    )
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="start them in this folder")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    folder = arguments.start and arguments.start.resolve()
    os.chdir(checkout)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for kind in [arguments.kind] if arguments.kind else ["scripts", "launchers"]:
            launches = [
                launch
                for launch in _launches(kind, checkout, Path(scratch))
                if any(text in launch.name for text in arguments.only)
            ]
            failed += _count(launches, kind, checkout, folder)
    return 1 if failed else 0


def _count(launches: list[Launch], kind: str, checkout: Path, folder: Path | None) -> int:
    """Print the result of each launch and a table; return the number that failed."""
    results: Counter[str] = Counter()
    for launch in launches:
        problem = launch.problem or refusal(launch.words)
        result = Start(REFUSED if problem else ACCEPTED, problem)
        if not problem and folder is not None:
            name = re.sub(r"[^A-Za-z0-9_.-]+", "-", launch.name)
            result = start(launch, checkout, folder / name)
        results[result.outcome] += 1
        problem = " ".join(result.problem.split())
        print(f"{launch.name}: {result.outcome}{problem and f': {problem}'}", flush=True)
    print(f"{len(launches) - results[REFUSED]} of {len(launches)} {kind} accepted")
    for outcome in OUTCOMES if folder is not None else ():
        print(f"{results[outcome]} of {len(launches)} {kind} {outcome}")
    return results[REFUSED] + results[FAILED]


def _launches(kind: str, checkout: Path, scratch: Path) -> Iterator[Launch]:
    return (scripts if kind == "scripts" else launchers)(checkout, scratch)


def refusal(words: Sequence[str]) -> str:
    """Return the error of `rlpipe train` with these words, or "" if they have a configuration."""
    try:
        arguments, rest = read_words(parsers.train(), words)
        flags = read_flags(rest)
        if flags.own.get("num_epoch") is not None:
            # Epochs count the rows of a file that only the user's machine has.
            flags.own.setdefault("num_rollout", 1)
        apply_flags(arguments, flags)
        load_run(arguments.recipe, arguments.overrides, arguments.run)
    except RlpipeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
