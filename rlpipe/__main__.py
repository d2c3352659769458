"""The command `rlpipe`, also as `python -m rlpipe`.

    rlpipe                                          list all commands
    rlpipe train my_run.yaml num_rollout=10         run one of them

`tools.command` has the commands. It is imported by name, because the library does not depend on
command lines, and in a wheel its folder is found only after `use_project`.
"""

from __future__ import annotations

import importlib
import sys

from rlpipe.system.project import use_project


def main() -> int:
    """Run the command line; return the exit code."""
    use_project()
    return importlib.import_module("tools.command.main").main()


if __name__ == "__main__":
    sys.exit(main())
