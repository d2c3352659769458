"""Show or change the number of engines of a run, while it runs or before its next start.

    rlpipe engines RUN        # show
    rlpipe engines RUN 4      # request

Engines that join wait for room in the Ray cluster, get the published weights, and then sample.
Engines that leave hand their samples back, unfinished ones with the tokens so far. The request is a
record of the store. It holds until another one, or until a start that configures another number.

Exit codes: 0 done, 2 the run does not exist or cannot have this number.
"""

from __future__ import annotations

import sys

from rlpipe.config.load import home, use_home
from rlpipe.errors import RlpipeError
from rlpipe.lineage.engine_requests import RunEngines, engines_of, request_engines
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import store_of
from tools.command import parsers


def main() -> int:
    """Run the command."""
    arguments = parsers.engines().parse_args()
    run = arguments.run
    try:
        use_home(arguments.home)
        files = Files(arguments.store or store_of(home(), run))
        if arguments.engines is None:
            print(f"{run}: {shown(engines_of(files, home(), run))}")
        else:
            before = request_engines(files, home(), run, arguments.engines)
            print(f"{run}: {change(before, arguments.engines)}")
    except RlpipeError as error:
        print(f"{error.kind}: {error}", file=sys.stderr)
        return 2
    return 0


def shown(engines: RunEngines) -> str:
    """Return the number of engines and its origin."""
    target = engines.target
    if target is None or target.configured != engines.configured:
        return f"{count(engines.number)}, as configured"
    return f"{count(engines.number)}, requested {target.created}; configured: {engines.configured}"


def change(before: RunEngines, engines: int) -> str:
    """Return the effect of a request."""
    if engines == before.number:
        return f"{count(engines)}, as before"
    when = "the run follows within seconds" if before.running else "its next start follows"
    return f"{before.number} → {count(engines)}; {when}"


def count(engines: int) -> str:
    """Return the number with its noun."""
    return f"{engines} engine{'' if engines == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
