"""Run an SGLang server that ends with its parent: `python -m rlpipe.engines.sglang.launch ARGUMENTS`.

The arguments are SGLang's own, and optionally `--rlpipe-parent PID`. Not here: choosing the arguments (see `server`) or making
SGLang run without CUDA (see `cpu_launch`, which ends up in `main` too).
"""

from __future__ import annotations

import os
import sys

from rlpipe import orphan


def main(argv: list[str]) -> None:
    """Serve until killed; children are ended in any case."""
    parent, arguments = orphan.take_parent(argv)
    if parent is not None:
        orphan.end_with(parent)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
