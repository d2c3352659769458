"""Folders in which libraries keep compiled kernels, so that the next start finds them.

By default they are in the user's home and in /tmp, which a container loses when it ends. Entry
point: `keep_compiled`.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = ".compiled"
"""In the home of the runs."""
VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
}
"""Environment variable of a library → its folder. SGLang's has DeepGEMM's kernels too."""


def keep_compiled(home: Path) -> None:
    """Make this process and its children keep compiled kernels under the home of the runs.

    Variables of the user's environment stay. Call it before the libraries compile.
    """
    for variable, folder in VARIABLES.items():
        os.environ.setdefault(variable, str(home.absolute() / FOLDER / folder))
