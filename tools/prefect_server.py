"""Run `prefect` until no run uses it.

    python -m tools.prefect_server PID server start ...
    python -m tools.prefect_server --unused PATH SECONDS server start ...

The first form ends with a process, the second as `tools.kept_server` describes. Neither depends on
the process that started it: that one may be killed before it stops the server.
"""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from pathlib import Path

from rlpipe.system.imports import quick_imports
from rlpipe.system.orphan import end_with
from tools.kept_server import end_when_unused

if __name__ == "__main__":
    if (word := sys.argv.pop(1)) == "--unused":
        end_when_unused(Path(sys.argv.pop(1)), float(sys.argv.pop(1)))
    else:
        end_with(int(word))
    with quick_imports():
        import_module("prefect.server.api.server")
        import_module("prefect.cli.server")
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
