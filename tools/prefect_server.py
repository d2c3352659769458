"""`prefect` for as long as another process lives:  python -m tools.prefect_server PID server start …

Used by `local_prefect`, whose process may be killed before it can stop its server.
"""

from __future__ import annotations

import runpy
import sys

from rlpipe.system.orphan import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
