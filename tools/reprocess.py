"""Score and estimate a run's stored rollouts anew, as a branch beside it:

    python -m tools.reprocess --of my_run 'reward.function={type: python, path: mine.py:score}'
    [dotted.key=value ...] python -m tools.reprocess --of my_run --iterations 10:50 --run stricter
    rollout.dynamic_sampling_filter_path=mine.py:keep python -m tools.reprocess --of my_run --run
    by_rloo advantage.advantage_estimator=rloo --train by_rloo.trained

Starts neither engines nor a trainer, unless `--train NAME` trains a run from the result, without
engines too. The run and its records stay as they are. The same command goes on where it was
stopped, and finds everything done the second time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

from flows.derived_runs import reprocessing, training_recipe
from rlpipe.config.load import HOME_VARIABLE, home, load_run, use_home
from rlpipe.errors import RlpipeError
from rlpipe.observe.progress import duration
from rlpipe.preflight import check
from rlpipe.reprocess.branch import Reprocessor
from tools.train import finish


def main() -> int:
    """Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    arguments = parse_arguments()
    asked = {
        "of": arguments.of,
        "iterations": arguments.iterations,
        "run": arguments.run,
        "overrides": arguments.overrides,
        "store": arguments.store,
    }
    try:
        use_home(arguments.home)
        found = reprocessing(home(), **asked)
        Reprocessor(found.source.files, found.config)
        if arguments.train:
            recipe = training_recipe(home(), found, arguments.train, arguments.train_set)
            check(load_run(recipe, (), arguments.train), home())
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2

    def start() -> Awaitable[dict[str, Any]]:
        from flows.reprocess import reprocess

        more = {
            "train": arguments.train,
            "train_overrides": arguments.train_set,
            "jobs": arguments.jobs,
        }
        return cast("Awaitable[dict[str, Any]]", reprocess(**asked, **more))

    code, said = finish(start)
    if said is not None:
        show(said, home() / found.config.run)
    return code


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.reprocess",
        description="Score and estimate stored rollouts anew.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--of", required=True, metavar="RUN", help="the run whose stored rollouts are reprocessed"
    )
    parser.add_argument(
        "--iterations",
        metavar="A:B",
        help="from A up to B, without B (default: all that are stored)",
    )
    parser.add_argument("--run", help="name of the new branch (default: RUN.reprocessed)")
    parser.add_argument(
        "--train", metavar="NAME", help="train a run of this name from the result, without engines"
    )
    parser.add_argument(
        "--train-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an override of that run alone; may be repeated",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="iterations under way at once (default: 2)"
    )
    parser.add_argument("--home", help=f"where runs are kept (default: ${HOME_VARIABLE} or ./runs)")
    parser.add_argument("--store", help="URL of the store (default: that of the run)")
    parser.add_argument(
        "overrides", nargs="*", metavar="dotted.key=value", help="what shall be different"
    )
    return parser.parse_intermixed_args()


def show(said: dict[str, Any], folder: Path) -> None:
    """The table, and where the page is."""
    for row in said["figures"]:
        print(f"{row['what']:42} {_figure(row['before']):>12} {_figure(row['after']):>12}")
    for name, value in said["agreement"].items():
        print(f"{name.replace('_', ' '):42} {'':>12} {_figure(value):>12}")
    for k, why in said["without_advantages"].items():
        print(f"iteration {k} has no advantages: {why}")
    print(
        f"{said['iterations']} iterations in {duration(said['seconds'])}, {said['reused']} reused; see {folder}/reprocessed.html"
    )


def _figure(value: float | int | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


if __name__ == "__main__":
    sys.exit(main())
