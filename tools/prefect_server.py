"""Run `prefect` until no run uses it.

    python -m tools.prefect_server PID server start ...
    python -m tools.prefect_server --unused PATH SECONDS server start ...

The first form ends with a process, the second as `tools.kept_server` describes. Neither depends on
the process that started it: that one may be killed before it stops the server.
"""

from __future__ import annotations

import runpy
import sys
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rlpipe.system.imports import quick_imports
from rlpipe.system.orphan import end_with
from tools.kept_server import end_when_unused

POLL = timedelta(seconds=2)


def poll_less() -> None:
    """Let the worker of Prefect's background services look for work every two seconds.

    By default, for which Prefect has no setting, it looks four times a second in two loops. That
    is a third of the CPU time of a server without requests. The services run every 5 s or less
    often.
    """
    workers: Any = import_module("prefect.server.api.background_workers")
    workers.Worker = partial(
        workers.Worker, minimum_check_interval=POLL, scheduling_resolution=POLL
    )


if __name__ == "__main__":
    if (word := sys.argv.pop(1)) == "--unused":
        end_when_unused(Path(sys.argv.pop(1)), float(sys.argv.pop(1)))
    else:
        end_with(int(word))
    with quick_imports():
        import_module("prefect.server.api.server")
        import_module("prefect.cli.server")
        poll_less()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
