"""Evaluate a run's weights, or a recipe's model, on held-out sets.

    rlpipe evaluate --of my_run[@K]                                # the run's own sets
    rlpipe evaluate --of my_run --eval-prompt-data aime aime.jsonl
    rlpipe evaluate --recipe my_run.yaml [dotted.key=value ...]    # the recipe's model

Prints every metric of every set. The run stays as it is. Flags are those of `rlpipe train`, such as
`--n-samples-per-eval-prompt 16`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable
from typing import Any, cast

from flows.derived_runs import evaluation_config
from rlpipe.config.load import home, use_home
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.preflight import check
from rlpipe.slime.command_line import read_flags
from rlpipe.slime.flag_keys import BASE, overrides_of
from tools.command import parsers
from tools.command.run_words import option_names, read_words
from tools.train import finish


def main() -> int:
    """Run the command. Exit codes: as `rlpipe train`."""
    arguments, rest = read_words(parsers.evaluate(), sys.argv[1:])
    try:
        use_home(arguments.home)
        parameters = flow_parameters(arguments, rest)
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2

    def start() -> Awaitable[dict[str, Any]]:
        from flows.evaluate import evaluate

        return cast("Awaitable[dict[str, Any]]", evaluate(**parameters))

    code, summary = finish(start)
    for name, value in sorted((summary or {}).get("evaluation", {}).items()):
        print(f"{name:48} {value:.4f}")
    return code


def flow_parameters(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Return the parameters of the flow, after checking their configuration.

    Wrong input is refused before a server starts. Raises: as `check`.
    """
    flags = read_flags(words, also=option_names(parsers.evaluate()))
    run, _, iteration = (arguments.of or "").partition("@")
    if iteration and not iteration.isdigit():
        raise ConfigError(
            "not the name of a commit",
            where="--of",
            found=arguments.of,
            expected="RUN or RUN@K",
        )
    parameters = {
        "run": run or None,
        "iteration": int(iteration) if iteration else None,
        "recipe": arguments.recipe or (str(BASE) if flags and not run else None),
        "overrides": overrides_of(flags),
        "name": arguments.name,
    }
    check(evaluation_config(home(), **parameters), home())
    return {**parameters, "takeover": arguments.takeover}


if __name__ == "__main__":
    sys.exit(main())
