"""Write down what every process of a stuck run waits for.

Stacks by py-spy if installed, else the kernel function in which each thread sleeps; the end of
every log; the states in Prefect.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.soak.chaos.prefect_api import PrefectApi
from tests.soak.chaos.processes import title

if TYPE_CHECKING:
    from tests.soak.chaos.stack import Stack

LAST_LINES = 60
TIMEOUT_S = 20


def dump(stack: Stack, name: str) -> Path:
    """Write the stacks and logs to a folder of this name, and return the folder."""
    folder = stack.folder / "stuck" / f"{name}-{int(time.time())}"
    folder.mkdir(parents=True, exist_ok=True)
    for process in stack.processes():
        text = f"{title(process)}\n\n{_threads(process)}"
        (folder / f"{process.pid}.txt").write_text(text)
    logs = [
        stack.log,
        *(stack.home / stack.layout.run / "logs").glob("*.log"),
        *stack.folder.glob("trace.jsonl"),
    ]
    for log in logs:
        if log.is_file():
            (folder / f"{log.name}.tail").write_text(
                "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
            )
    (folder / "prefect.json").write_text(json.dumps(_flow_runs(stack.prefect_url), indent=1))
    return folder


def _threads(process: psutil.Process) -> str:
    if spy := shutil.which("py-spy"):
        done = subprocess.run(
            [spy, "dump", "--pid", str(process.pid)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return done.stdout + done.stderr
    lines = []
    for thread in Path(f"/proc/{process.pid}/task").glob("*"):
        try:
            name = (thread / "comm").read_text().strip()
            lines.append(f"{thread.name} {name}: {(thread / 'wchan').read_text()}")
        except OSError as error:
            lines.append(f"{thread.name}: {error}")
    return "\n".join(lines)


def _flow_runs(url: str) -> object:
    try:
        return PrefectApi(url).newest()
    except OSError as error:
        return str(error)
