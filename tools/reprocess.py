"""Score stored rollouts of a run again and estimate advantages, on a new branch.

    rlpipe reprocess --of my_run 'reward.function={type: python, path: mine.py:score}'
    rlpipe reprocess --of my_run --iterations 10:50 --run stricter
        rollout.dynamic_sampling_filter_path=mine.py:keep
    rlpipe reprocess --of my_run --run by_rloo advantage.advantage_estimator=rloo
        --train by_rloo.trained

Starts no engines and no trainer. `--train NAME` trains a run from the result, also without engines.
The source run stays as it is. The same command continues after an interruption, and reuses all
nodes the second time.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

from flows.derived_runs import reprocessing, training_recipe
from rlpipe.config.load import home, load_run, use_home
from rlpipe.errors import RlpipeError
from rlpipe.observe.comparison import AGREEMENT, AGREEMENT_LEGEND
from rlpipe.observe.terminal import duration
from rlpipe.preflight import check
from rlpipe.reprocess.branch import Reprocessor
from tools.command import parsers
from tools.train import finish


def main() -> int:
    """Run the command. Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    arguments = parsers.reprocess().parse_intermixed_args()
    parameters = {
        "of": arguments.of,
        "iterations": arguments.iterations,
        "run": arguments.run,
        "overrides": arguments.overrides,
        "store": arguments.store,
    }
    try:
        use_home(arguments.home)
        branch = reprocessing(home(), **parameters)
        Reprocessor(branch.source.files, branch.config)  # loads the user's functions
        if arguments.train:
            recipe = training_recipe(home(), branch, arguments.train, arguments.train_set)
            trained = load_run(recipe, (), arguments.train)
            check(trained, home(), planned=[branch.config.run])
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2

    def start() -> Awaitable[dict[str, Any]]:
        from flows.reprocess import reprocess

        more = {
            "train": arguments.train,
            "train_overrides": arguments.train_set,
            "jobs": arguments.jobs,
        }
        return cast("Awaitable[dict[str, Any]]", reprocess(**parameters, **more))

    code, figures = finish(start)
    if figures is not None:
        show(figures, home() / branch.config.run)
    return code


def show(figures: dict[str, Any], folder: Path) -> None:
    """Print the table of figures and the path of the page."""
    print(f"{'':42} {'stored':>12} {'new':>12}")
    for row in figures["figures"]:
        before = _format(row["before"])
        print(f"{row['what']:42} {before:>12} {_format(row['after']):>12}")
    for name, value in figures["agreement"].items():
        print(f"{AGREEMENT[name]:42} {'':>12} {_format(value):>12}")
    if figures["agreement"]:
        print(AGREEMENT_LEGEND)
    for k, reason in figures["without_advantages"].items():
        print(f"iteration {k} has no advantages: {reason}")
    print(
        f"{figures['iterations']} iterations in {duration(figures['seconds'])}, "
        f"{figures['reused']} reused; see {folder}/reprocessed.html"
    )


def _format(value: float | int | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:z.4f}"


if __name__ == "__main__":
    sys.exit(main())
