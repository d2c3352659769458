"""All batches of a branch trained again from v = 0, by `tools.replay` in a home of its own: nothing
of the run but its store."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rlpipe.store.objects.files import Files
from tests.soak.chaos.verify import Replay


def replay_branch(files: Files, branch: str, home: Path) -> Replay:
    """Are the recorded states what the stored batches lead to? Raises: RuntimeError with its last
    words if it cannot be tried."""
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        answer = Path(folder) / "states.json"
        where = ["--home", str(home / "replay"), "--store", files.root, "--json", str(answer)]
        command = [sys.executable, "-m", "tools.replay", "--run", branch, *where]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not answer.is_file():
            raise RuntimeError(f"the replay ended with {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads(answer.read_text())
    versions = max((state["version"] for state in found["states"]), default=0)
    first = found["first_difference"]
    return Replay(
        versions, found["equal"], None if first is None else f"{first['stage']} {first['node']}"
    )
