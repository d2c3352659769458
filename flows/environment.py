"""Environment of the processes in which flows run: caches below the run's home, and how patient
Prefect's client is.

Read before Prefect is imported, so it is not imported here. Not here: the server
(`tools.local_prefect`).
"""

from __future__ import annotations

import os
from pathlib import Path

CLIENT_SETTINGS = {
    # after 2, 4, 8 … s: a server that is away for two minutes costs no run
    "PREFECT_CLIENT_MAX_RETRIES": "7",
    "DO_NOT_TRACK": "1",
}
CACHES = {
    "HF_HOME": "huggingface",
    "XDG_CACHE_HOME": "cache",
    "MPLCONFIGDIR": "matplotlib",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TMPDIR": "tmp",
}
LONGEST_TMPDIR = 107 - len("/torch-shm-dir-XXXXXX/manager.sock.12345")
"""Unix sockets are made in TMPDIR, and their paths end at 107 bytes; torch's are the longest."""


def keep_caches_in(home: Path) -> None:
    """Point the caches of this process and its children below `{home}/.cache`, unless the user
    pointed them elsewhere."""
    for variable, name in CACHES.items():
        folder = home / ".cache" / name
        if variable == "TMPDIR" and len(str(folder)) > LONGEST_TMPDIR:
            continue
        if variable not in os.environ:
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[variable] = str(folder)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
