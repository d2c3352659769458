"""Train a recipe on this machine:  python -m tools.train --recipe spell_backward [--run NAME] [dotted.key=value ...]

Uses the Prefect server of the current profile if there is one, else one of its own for as long as the run takes. Ctrl-C
stops it; the same command goes on from the last committed stage.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from rlpipe.config.load import HOME_VARIABLE, home, load_run, recipes
from rlpipe.errors import RlpipeError
from rlpipe.preflight import check


def main() -> int:
    """Parse, check, run. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted, 143 asked to stop (SIGTERM)."""
    arguments = parse_arguments()
    if arguments.home:
        os.environ[HOME_VARIABLE] = str(Path(arguments.home).expanduser().absolute())
    if arguments.seed is not None:
        arguments.overrides.insert(0, f"seed={arguments.seed}")
        arguments.run = arguments.run or f"{Path(arguments.recipe).stem}-seed{arguments.seed}"
    if arguments.fork:
        branch, _, iteration = arguments.fork.partition("@")
        arguments.run = arguments.run or f"{branch}-from-{iteration or 'newest'}"
        arguments.overrides[:0] = [
            f"fork_from={{branch: {branch}, iteration: {iteration or 'null'}}}",
            "warm_start=null",
            "model.start_from=null",
        ]
    try:
        config = load_run(arguments.recipe, arguments.overrides, arguments.run)
        if not arguments.dump_config:
            check(config, home())
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if arguments.dump_config:
        from rlpipe.config.load import dump

        print(dump(config), end="")
        return 0
    return drive(arguments)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.train", description="Train a recipe on this machine.")
    parser.add_argument("--recipe", required=True, help=f"a YAML file, or one of: {', '.join(recipes())}")
    parser.add_argument("--run", help="name of the run (default: the recipe's)")
    parser.add_argument("--home", help=f"where everything is kept (default: ${HOME_VARIABLE} or ./runs)")
    parser.add_argument("--seed", type=int, help="another seed, as a run of its own: <recipe>-seed<N> unless --run names it")
    parser.add_argument(
        "--fork", metavar="RUN[@K]", help="go on from iteration K of that run (default: its newest), as a new run"
    )
    parser.add_argument("--takeover", action="store_true", help="replace the process that drives this run now, wherever it is")
    parser.add_argument("--dump-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as train.optimizer.lr=1e-5")
    return parser.parse_intermixed_args()


def drive(arguments: argparse.Namespace) -> int:
    """Run the flow to its end in this process."""
    from tools.local_prefect import drain, local_prefect

    with local_prefect(home()):
        from flows.stopping import Preempted
        from flows.train import train
        from rlpipe.actors.local_ray import disconnect

        async def run() -> dict[str, Any]:
            try:
                return await train(arguments.recipe, arguments.overrides, arguments.run, arguments.takeover)
            finally:
                await drain()

        try:
            summary = asyncio.run(run())
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from the last committed stage", file=sys.stderr)
            return 130
        except Preempted as error:
            print(error, file=sys.stderr)
            return 143
        except RlpipeError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        finally:
            disconnect()
    folder = home() / summary["run"]
    if summary["accuracy_before"] is not None:
        print(f"{summary['run']}: accuracy {summary['accuracy_before']:.3f} → {summary['accuracy_after']:.3f}")
    print(f"{summary['run']}: see {folder}/report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
