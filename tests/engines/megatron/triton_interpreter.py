"""A process in which Triton interprets kernels on the CPU.

The mode must be set before Triton's first import.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from typing import Any


class Interpreted:
    """Calls functions of `rlpipe.engines.megatron.model.kernels` in that process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Return (the function's result, its arguments after the call)."""
        self._pipe.send((name, arguments, keywords))
        assert self._pipe.poll(120), "the interpreter did not answer"
        result, left, error = self._pipe.recv()
        assert error is None, error
        return result, left

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


def _serve(pipe) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from rlpipe.engines.megatron.model import kernels

    kernels.COLUMNS = 16
    kernels.FLAT = 32
    kernels.PROGRAMS = 3
    while (order := pipe.recv()) is not None:
        name, arguments, keywords = order
        try:
            pipe.send((getattr(kernels, name)(*arguments, **keywords), arguments, None))
        except Exception:  # noqa: BLE001 - the test that called shows it
            pipe.send((None, None, traceback.format_exc()))
