"""Parts of the parsers of several verbs: the parser itself, home, store, run, overrides, recipe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlpipe.system.project import HOME_VARIABLE, RECIPES
from tools.command.verbs import VERBS

COMMAND = "rlpipe"


def new_parser(name: str, description: str, **settings: Any) -> argparse.ArgumentParser:
    """Return a parser with `-h`, without abbreviations, and with the example of the verb."""
    verb = VERBS[name]
    settings.setdefault("epilog", f"example: {COMMAND} {name} {verb.example}".rstrip())
    return argparse.ArgumentParser(
        prog=f"{COMMAND} {name}", description=description, allow_abbrev=False, **settings
    )


def add_home(parser: argparse.ArgumentParser) -> None:
    """Add the directory of runs."""
    parser.add_argument("--home", help=f"directory of runs (default: ${HOME_VARIABLE} or ./runs)")


def add_store(parser: argparse.ArgumentParser, default: str = "the run's") -> None:
    """Add the URL of the store."""
    parser.add_argument("--store", help=f"URL of the store (default: {default})")


def add_iterations(
    parser: argparse.ArgumentParser, default: str, *, value: str | None = None
) -> None:
    """Add a range of iterations."""
    parser.add_argument(
        "--iterations",
        metavar="A:B",
        default=value,
        help=f"from A up to B, without B (default: {default})",
    )


def add_takeover(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the switch that replaces the process that does `what`."""
    parser.add_argument(
        "--takeover", action="store_true", help=f"replace the process that {what} now"
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the name of a run, as a word or as `--run`."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "run", nargs="?", default=argparse.SUPPRESS, metavar="RUN", help="name of the run"
    )
    group.add_argument("--run", dest="run", metavar="RUN", help="the same, as an option")


def add_input(parser: argparse.ArgumentParser, other: str, text: str, *, required: bool) -> None:
    """Add `--input-dir` of a conversion. `other`: slime's name of the same option."""
    parser.add_argument(
        "--input-dir", other, dest="input_dir", required=required, metavar="DIR", help=text
    )


def add_output(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--output-dir` of a conversion; some conversions of slime call it `--save`."""
    parser.add_argument(
        "--output-dir", "--save", dest="output_dir", required=True, metavar="DIR", help=text
    )


def add_sizes(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Add the data type and the size of written weights. `dtype`: description of the default."""
    parser.add_argument(
        "--dtype",
        help=f"data type of the weights: float32, bfloat16, float16 (default: {dtype})",
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        help="size of a file, and memory of the conversion (default: 5GB)",
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `dotted.key=value` words."""
    parser.add_argument(
        "overrides", nargs="*", metavar="dotted.key=value", help="settings that differ"
    )


def names_in(folder: Path) -> str:
    """Return the names of the YAML files of a folder."""
    return ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))


def recipe_help() -> str:
    """Return the help of a recipe, with the names of the project's recipes."""
    return f"a YAML file, or one of: {names_in(RECIPES)}"
