"""Run `prefect` until another process ends.

    python -m tools.prefect_server PID server start ...

`tools.local_prefect` uses it, because its own process may be killed before it stops the server.
"""

from __future__ import annotations

import runpy
import sys

from rlpipe.system.orphan import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
