"""Train a run's stored batches again and compare every state:  python -m tools.replay --run NAME [--home DIR] [--store URL]

From weight version 0, in a trainer of its own (Ray, no engines), through warm starts and forks.
Exit codes: 0 every state came out bit for bit as recorded, 1 one did not, 2 it could not be tried.
A run whose states differ was made elsewhere (another kind of machine, other packages), or is not
what its records say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from rlpipe.actors.ray.local_ray import disconnect
from rlpipe.actors.trainer.replay import Compared, Replay, replay
from rlpipe.config.load import HOME_VARIABLE, home, use_home
from rlpipe.errors import RlpipeError
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of
from tools.piped import piped


def main() -> int:
    """Parse, replay, report."""
    arguments = parse_arguments()
    try:
        use_home(arguments.home)
        files = Files(arguments.store or store_of(home(), arguments.run))
        home().mkdir(parents=True, exist_ok=True)
        result = asyncio.run(replay(files, arguments.run, home=home(), say=report))
    except RlpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    finally:
        disconnect()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result.as_json(), indent=1))
    print(summary(result))
    return 0 if result.equal else 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay", description="Train a run's stored batches again."
    )
    parser.add_argument("--run", required=True, help="name of the run, that is of its branch")
    parser.add_argument(
        "--home", help=f"where everything is kept (default: ${HOME_VARIABLE} or ./runs)"
    )
    parser.add_argument(
        "--store", help="URL of the store (default: the one the run was started with)"
    )
    parser.add_argument("--json", help="write all digests to this file")
    return parser.parse_args()


def report(state: Compared) -> None:
    """One line as a state is done."""
    verdict = "equal" if state.equal else f"DIFFERS: recorded {state.recorded}, found {state.found}"
    print(
        f"{state.branch:<30} v{state.version:<6} {state.stage:<10} {state.node[:12]}  {state.seconds:7.2f} s  {verdict}",
        flush=True,
    )


def summary(result: Replay) -> str:
    """The last line."""
    first = result.first_difference
    if first is None:
        return f"{result.branch}: {len(result.states)} states, all bit for bit as recorded"
    return f"{result.branch}: weight version {first.version} ({first.stage} {first.node}) came out different; stopped there"


if __name__ == "__main__":
    sys.exit(piped(main))
