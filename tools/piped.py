"""Command lines that print much and may be read by `head`. Not here: what they print."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def piped(main: Callable[[], int]) -> int:
    """What `main` answers; 141, as a shell says of SIGPIPE, if nobody reads what it prints any
    more."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # what Python still has to write on its way out
        return 128 + signal.SIGPIPE
    return code
