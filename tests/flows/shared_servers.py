"""One Prefect server and one template process, which all runs of a process of pytest share.

A run that starts its own needs 25 CPU seconds for them: as many as for everything else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import psutil

from rlpipe.system.forked import VARIABLE
from tools import template
from tools.local_prefect import SETTINGS, start_server


@dataclass(frozen=True)
class SharedServers:
    """They end with this process. `environment`: variables of a run that uses them."""

    environment: Mapping[str, str]
    template: psutil.Process | None

    def forked(self) -> list[psutil.Process]:
        """Return the processes that were forked from the template, with their children."""
        if self.template is None:
            return []
        below = self.template.children(recursive=True)
        return [process for process in below if not _is_template(process)]


@cache
def shared_servers() -> SharedServers:
    """Return the servers; start them at the first call."""
    folder = Path(tempfile.mkdtemp(prefix="rlpipe-tests-"))
    life = [str(os.getpid())]
    forking = template.start(life, folder / "template") if template.usable() else None
    with patch.dict(os.environ, {**SETTINGS, "PREFECT_HOME": str(folder)}):
        _, url = start_server(folder, life, lambda: None)
    environment = {"PREFECT_API_URL": f"{url}/api"}
    if forking is None:
        return SharedServers(environment, None)
    environment[VARIABLE] = str(folder / "template")
    return SharedServers(environment, psutil.Process(forking.pid))


def _is_template(process: psutil.Process) -> bool:
    """True for the template of engines, a child of the template of workers."""
    try:
        line = " ".join(process.cmdline())
        return "tools.template" in line or line.startswith("rlpipe template")
    except psutil.NoSuchProcess:
        return False
