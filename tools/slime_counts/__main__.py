"""Print how many launches of a checkout of slime are accepted here, and why the others are not.

    python -m tools.slime_counts CHECKOUT [scripts|launchers] [--only TEXT]

Accepted means that `rlpipe train` with the words of the launch, unchanged, has a configuration.
The current folder is the checkout, as in the launches. `git clone https://github.com/THUDM/slime`
makes one; the counts in rlpipe/slime/README.md name their commit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlpipe.config.load import load_run
from rlpipe.errors import RlpipeError
from rlpipe.slime.command_line import read_flags
from tools.command import parsers
from tools.command.run_words import apply_flags, read_words
from tools.slime_counts.launches import Launch, launchers, scripts


def main() -> int:
    """Print the counts. Exit code 1 if a launch is not accepted."""
    parser = argparse.ArgumentParser(prog="python -m tools.slime_counts", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("kind", nargs="?", choices=("scripts", "launchers"))
    parser.add_argument("--only", default="", help="launches with this text in their name")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    os.chdir(checkout)
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in [arguments.kind] if arguments.kind else ["scripts", "launchers"]:
            launches = [
                launch
                for launch in _launches(kind, checkout, Path(folder))
                if arguments.only in launch.name
            ]
            problems = {launch.name: launch.problem or refusal(launch.words) for launch in launches}
            for name, problem in problems.items():
                print(f"{name}: {' '.join(problem.split()) or 'accepted'}")
            failed = sum(bool(problem) for problem in problems.values())
            print(f"{len(launches) - failed} of {len(launches)} {kind} accepted")
            refused += failed
    return 1 if refused else 0


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
