"""Run an sglang-router that ends with its parent process.

    python -m rlpipe.engines.sglang.router_launch ARGUMENTS

The arguments are the router's own, and optionally `--rlpipe-parent PID`.
"""

from __future__ import annotations

import argparse
import sys

from rlpipe.system import orphan


def main(argv: list[str]) -> None:
    """Route until killed."""
    parent, arguments = orphan.take_parent(argv)
    if parent is not None:
        orphan.end_with(parent)
    import setproctitle

    # Not `sglang_router.launch_router`: it imports sglang, transformers and torch for its Python
    # stand-in of the router, which takes 5 s of CPU time.
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(prog="sglang-router")
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    router = RouterArgs.from_cli_args(parser.parse_args(arguments), use_router_prefix=False)
    setproctitle.setproctitle("sglang::router")
    Router.from_args(router).start()


if __name__ == "__main__":
    main(sys.argv[1:])
