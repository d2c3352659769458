"""Replay a run: train its stored batches again and compare every state.

    rlpipe replay NAME [--home DIR] [--store URL] [--ray-address local]

Starts at weight version 0 in a separate trainer (Ray, no engines), and follows warm starts and
forks. A different state means another kind of machine, other packages, or damaged records. Exit
codes: 0 every state is bit for bit as recorded, 1 a state differs, 2 the replay failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from rlpipe.actors.ray.local_ray import disconnect
from rlpipe.actors.trainer.replay import ComparedState, Replay, replay
from rlpipe.config.load import home, use_home
from rlpipe.errors import RlpipeError
from rlpipe.lineage.named_runs import require_run
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of
from tools.command import parsers
from tools.piped import piped

AGAIN = "the same command with --ray-address local"


def main() -> int:
    """Run the command."""
    arguments = parsers.replay().parse_args()
    try:
        use_home(arguments.home)
        files = Files(arguments.store or store_of(home(), arguments.run))
        require_run(files, arguments.run, where=arguments.run)
        home().mkdir(parents=True, exist_ok=True)
        result = asyncio.run(
            replay(
                files,
                arguments.run,
                home=home(),
                on_state=report,
                ray_address=arguments.ray_address,
            )
        )
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        if error.where == "resources.ray_address" and arguments.ray_address is None:
            print(f"  or:       replay on a Ray of its own: {AGAIN}", file=sys.stderr)
        return 2
    finally:
        disconnect()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result.as_json(), indent=1))
    print(summary(result))
    return 0 if result.equal else 1


def report(state: ComparedState) -> None:
    """Print a line for each state."""
    verdict = "equal" if state.equal else f"DIFFERS: recorded {state.recorded}, found {state.found}"
    print(
        f"{state.branch:<30} v{state.version:<6} {state.stage:<10} {state.node[:12]}  "
        f"{state.seconds:7.2f} s  {verdict}",
        flush=True,
    )


def summary(result: Replay) -> str:
    """Return the last line."""
    first = result.first_difference
    if first is None:
        return f"{result.branch}: {len(result.states)} states, all bit for bit as recorded"
    return (
        f"{result.branch}: weight version {first.version} ({first.stage} {first.node}) differs; "
        "stopped there"
    )


if __name__ == "__main__":
    sys.exit(piped(main))
