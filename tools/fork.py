"""Fork a run: continue from one of its iterations with some settings changed.

    python -m tools.fork my_run@99 --run hotter rollout.rollout_temperature=1.2 num_rollout=300

Without `@K` the fork starts at the newest iteration. The fork shares the history up to there; the
parent stays as it is. The same command continues the fork. To use another recipe: `python -m
tools.train --recipe ... --fork my_run@99`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable
from typing import Any, cast

from flows.derived_runs import fork_run
from rlpipe.config.load import HOME_VARIABLE, home, use_home
from rlpipe.config.text import dump
from rlpipe.errors import RlpipeError
from rlpipe.preflight import check
from tools.train import finish


def main() -> int:
    """Run the command. Exit codes: as `tools.train`."""
    arguments = parse_arguments()
    parameters = {
        "of": arguments.of,
        "run": arguments.run,
        "overrides": arguments.overrides,
        "store": arguments.store,
    }
    try:
        use_home(arguments.home)
        config, _ = fork_run(home(), **parameters)
        if arguments.dump_config:
            print(dump(config.model_dump(mode="json")), end="")
            return 0
        check(config, home())
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2

    def start() -> Awaitable[dict[str, Any]]:
        from flows.fork import fork

        return cast("Awaitable[dict[str, Any]]", fork(**parameters, takeover=arguments.takeover))

    code, summary = finish(start)
    if summary is not None:
        print(f"{summary['run']}: see {home() / summary['run']}/report.html")
    return code


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fork",
        description="Continue from an iteration of a run with changed settings.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "of", metavar="RUN[@K]", help="the parent, and its iteration (default: the newest)"
    )
    parser.add_argument("--run", help="name of the fork (default: RUN-from-K)")
    parser.add_argument("--home", help=f"directory of runs (default: ${HOME_VARIABLE} or ./runs)")
    parser.add_argument("--store", help="URL of the store (default: the parent's)")
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="replace the process that drives the fork now, on any machine",
    )
    parser.add_argument(
        "--dump-config", action="store_true", help="print the resolved configuration and stop"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="dotted.key=value", help="settings that differ"
    )
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
