"""Fork a run: continue from one of its iterations with some settings changed.

    rlpipe fork my_run@99 --run hotter rollout.rollout_temperature=1.2 num_rollout=300

Without `@K` the fork starts at the newest iteration. The fork shares the history up to there; the
parent stays as it is. The same command continues the fork. To use another recipe: `rlpipe
train my_run.yaml --fork my_run@99`.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from flows.derived_runs import fork_run
from rlpipe.config.load import home, use_home
from rlpipe.config.text import dump
from rlpipe.errors import RlpipeError
from rlpipe.observe.terminal import Screen, waiting_for
from rlpipe.preflight import check
from tools.command import parsers
from tools.train import finish, print_result


def main() -> int:
    """Run the command. Exit codes: as `rlpipe train`."""
    arguments = parsers.fork().parse_intermixed_args()
    parameters = {
        "of": arguments.of,
        "run": arguments.run,
        "overrides": arguments.overrides,
        "store": arguments.store,
    }
    try:
        use_home(arguments.home)
        # The flow writes the recipe files that stay: here they are only read.
        with TemporaryDirectory() as folder:
            config, _ = fork_run(home(), **parameters, recipes=Path(folder))
        assert config.fork_from is not None
        origin = f"{config.fork_from.branch}@{config.fork_from.iteration}"
        if arguments.dump_config:
            print(dump(config.model_dump(mode="json")), end="")
            return 0
        # At once: on a busy machine, Prefect, Ray and the engines take minutes to start.
        print(
            f"{config.run}: a fork of {origin}, up to iteration {config.num_rollout}; the weights "
            "are loaded after Prefect and Ray have started",
            file=sys.stderr,
            flush=True,
        )
        with Screen(), waiting_for("checks before the start"):
            check(config, home())
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2

    def start() -> Awaitable[dict[str, Any]]:
        from flows.fork import fork

        return cast("Awaitable[dict[str, Any]]", fork(**parameters, takeover=arguments.takeover))

    code, summary = finish(start)
    if summary is not None:
        print_result(summary)
    return code


if __name__ == "__main__":
    sys.exit(main())
