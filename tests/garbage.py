"""Keep garbage collections of tests short. Not a test.

A collection looks at every object that is not exempt. Torch, transformers, Megatron and 5,000
tests are a million objects, so that a collection took half a CPU second. A Megatron engine
collects garbage when it is closed, and most tests of Megatron close several.
"""

from __future__ import annotations

import gc
import sys

_exempt_modules = 0


def exempt_imports() -> None:
    """Exempt all present objects from garbage collections, if modules were imported since."""
    global _exempt_modules
    if len(sys.modules) != _exempt_modules:
        _exempt_modules = len(sys.modules)
        gc.collect()
        gc.freeze()
