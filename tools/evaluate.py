"""Evaluate a run's weights, or a recipe's model, on held-out sets:

    python -m tools.evaluate --of my_run[@K]                                       on the run's own sets
    python -m tools.evaluate --of my_run --eval-prompt-data aime aime.jsonl --n-samples-per-eval-prompt 16
    python -m tools.evaluate --recipe my_run.yaml [dotted.key=value ...]           the model that the recipe starts with

Prints every metric of every set; nothing of the run is changed. Flags are those of `tools.train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable
from typing import Any, cast

from flows.derived_runs import evaluation_config
from rlpipe.config.load import HOME_VARIABLE, home, use_home
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.preflight import check
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import BASE, overrides_of
from tools.train import finish, split

OPTIONS = {
    "--of": True,
    "--recipe": True,
    "--name": True,
    "--home": True,
    "--takeover": False,
    "--help": False,
    "-h": False,
}


def main() -> int:
    """Exit codes: as `tools.train`."""
    mine, rest = split(sys.argv[1:], OPTIONS)
    arguments = parse_arguments(mine)
    try:
        use_home(arguments.home)
        asked = settle(arguments, rest)
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2

    def start() -> Awaitable[dict[str, Any]]:
        from flows.evaluate import evaluate

        return cast("Awaitable[dict[str, Any]]", evaluate(**asked))

    code, summary = finish(start)
    for name, value in sorted((summary or {}).get("evaluation", {}).items()):
        print(f"{name:48} {value:.4f}")
    return code


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """The options of this command itself."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate",
        description="Evaluate weights on held-out sets.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--of",
        metavar="RUN[@K]",
        help="whose weights: of that run, after iteration K or its newest saved",
    )
    parser.add_argument("--recipe", help="a recipe: its held-out sets, and without --of its model")
    parser.add_argument(
        "--name", help="name of the evaluation as a run of its own (default: RUN.eval-K)"
    )
    parser.add_argument(
        "--home", help=f"where everything is kept (default: ${HOME_VARIABLE} or ./runs)"
    )
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="replace the process that evaluates under this name now",
    )
    return parser.parse_args(words)


def settle(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """The parameters of the flow. Its configuration is made and checked here too: what is wrong is
    refused at once.

    Raises: as `check`.
    """
    given = read_flags(words, also=OPTIONS)
    run, _, iteration = (arguments.of or "").partition("@")
    if iteration and not iteration.isdigit():
        raise ConfigError(
            "not the number of an iteration",
            where="--of",
            found=arguments.of,
            expected="RUN or RUN@K",
        )
    asked = {
        "run": run or None,
        "iteration": int(iteration) if iteration else None,
        "recipe": arguments.recipe or (str(BASE) if given and not run else None),
        "overrides": overrides_of(given),
        "name": arguments.name,
    }
    check(evaluation_config(home(), **asked), home())
    return {**asked, "takeover": arguments.takeover}


if __name__ == "__main__":
    sys.exit(main())
