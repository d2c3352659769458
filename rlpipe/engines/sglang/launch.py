"""Run an SGLang server that ends with its parent: `python -m rlpipe.engines.sglang.launch
ARGUMENTS`.

The arguments are SGLang's own, and optionally `--rlpipe-parent PID`.

Megatron-core is hidden from the server and its children, which import this main module again. A
debugging tool of SGLang imports it where it is installed, for nothing that is used here; that takes
seconds in each process, and switches torch_memory_saver to a mode in which CUDA graphs cannot be
given up.

Not here: choosing the arguments (see `server`) or making SGLang run without CUDA (see `cpu_launch`,
which ends up in `main` too).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rlpipe.system import orphan


def hide_megatron() -> None:
    """Whoever imports it in this process gets an ImportError."""
    hidden: dict[str, Any] = {"megatron": None}
    sys.modules.update(hidden)


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


if __name__ in ("__main__", "__mp_main__"):
    hide_megatron()

if __name__ == "__main__":
    main(sys.argv[1:])
