"""Train all batches of a branch again from v = 0 with `tools.replay`, in a separate home."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rlpipe.store.objects.files import Files
from tests.soak.chaos.verify import Replay


def replay_branch(files: Files, branch: str, home: Path) -> Replay:
    """Return whether the stored batches lead to the recorded states.

    Raises: RuntimeError with the end of its output if the replay cannot run.
    """
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        result = Path(folder) / "states.json"
        where = ["--home", str(home / "replay"), "--store", files.root, "--json", str(result)]
        command = [sys.executable, "-m", "tools.replay", "--run", branch, *where]
        command += ["--ray-address", "local"]  # the run's may have ended
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not result.is_file():
            raise RuntimeError(f"the replay ended with {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads(result.read_text())
    versions = max((state["version"] for state in found["states"]), default=0)
    first = found["first_difference"]
    return Replay(
        versions, found["equal"], None if first is None else f"{first['stage']} {first['node']}"
    )
