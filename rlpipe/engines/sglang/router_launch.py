"""Run an sglang-router that ends with its parent process.

    python -m rlpipe.engines.sglang.router_launch ARGUMENTS

The arguments are the router's own, and optionally `--rlpipe-parent PID`.
"""

from __future__ import annotations

import sys

from rlpipe.system import orphan


def main(argv: list[str]) -> None:
    """Route until killed."""
    parent, arguments = orphan.take_parent(argv)
    if parent is not None:
        orphan.end_with(parent)
    from sglang_router import launch_router

    sys.argv[1:] = arguments
    launch_router.main()


if __name__ == "__main__":
    main(sys.argv[1:])
