"""End a command quietly when the reader of its output, such as `head`, closes the pipe."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def piped(main: Callable[[], int]) -> int:
    """Return the exit code of `main`, or 141 (128 + SIGPIPE, as in a shell) after a closed pipe."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout at exit: that must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code
