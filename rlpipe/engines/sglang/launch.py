"""Run an SGLang server that ends with its parent process.

    python -m rlpipe.engines.sglang.launch ARGUMENTS

The arguments are SGLang's own, and optionally `--rlpipe-parent PID`. `cpu_launch` prepares a server
for machines without CUDA and then calls `main` here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from rlpipe.engines.sglang import image_inputs
from rlpipe.system import orphan
from rlpipe.system.imports import quick_imports


def hide_megatron() -> None:
    """Make `import megatron` fail in this process."""
    # A debugging tool of SGLang imports megatron-core if it is installed, and rlpipe does not use
    # the tool. The import takes seconds in each process, and switches torch_memory_saver to a mode
    # in which CUDA graphs cannot be released.
    hidden: dict[str, Any] = {"megatron": None}
    sys.modules.update(hidden)


def main(argv: list[str], prepare: Callable[[], None] | None = None) -> None:
    """Serve until killed. All child processes are ended in any case.

    `prepare`: see `load`.
    """
    parent, arguments = orphan.take_parent(argv)
    if parent is not None:
        orphan.end_with(parent)
    run = load(prepare)
    try:
        run(arguments)
    finally:
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(os.getpid(), include_parent=False)


@cache
def load(prepare: Callable[[], None] | None) -> Callable[[list[str]], None]:
    """Import SGLang's server; return a function that serves with these arguments.

    `prepare` is called before SGLang is imported completely. A repeated call imports nothing.
    """
    with quick_imports():
        if prepare is not None:
            prepare()
        image_inputs.hook()
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        from rlpipe.engines.sglang import adapters

        adapters.hook()
        # First: a module that imports a hooked function by name must get the hook.
        load_plugins()
        # `run_server` imports it.
        http_server = import_module("sglang.srt.entrypoints.http_server")
        from rlpipe.engines.sglang.push_routes import PushRoutes

        PushRoutes(http_server).add_to(http_server.app)
    return lambda arguments: run_server(prepare_server_args(arguments))


# Processes that SGLang spawns import this module again as `__mp_main__`.
if __name__ in ("__main__", "__mp_main__"):
    hide_megatron()

if __name__ == "__main__":
    main(sys.argv[1:])
