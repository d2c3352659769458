"""Environment variables of processes that run flows: cache folders and Prefect client settings.

Prefect reads its settings at import. This module must run earlier, so it does not import Prefect.
"""

from __future__ import annotations

import os
from pathlib import Path

CLIENT_SETTINGS = {
    # Retries wait 2, 4, 8 ... s: runs survive a Prefect server that is down for two minutes.
    "PREFECT_CLIENT_MAX_RETRIES": "7",
    "DO_NOT_TRACK": "1",
}
CACHES = {
    "XDG_CACHE_HOME": "cache",
    "MPLCONFIGDIR": "matplotlib",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TMPDIR": "tmp",
}
LONGEST_TMPDIR = 107 - len("/torch-shm-dir-XXXXXX/manager.sock.12345")
"""Length limit of TMPDIR in bytes. A Unix socket path has at most 107 bytes; torch's are the
longest.
"""


def keep_caches_in(home: Path) -> None:
    """Set cache variables of this process and its children to `{home}/.cache`.

    Variables that the user has set stay as they are. HF_HOME is not changed: it has the user's
    token, and models that other programs have downloaded.
    """
    for variable, name in CACHES.items():
        folder = home / ".cache" / name
        # A longer TMPDIR would break torch's shared-memory sockets.
        if variable == "TMPDIR" and len(str(folder)) > LONGEST_TMPDIR:
            continue
        if variable not in os.environ:
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[variable] = str(folder)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
