"""Engines on nodes that vanish (tests.soak.spot): its figures alone, and a minute of the real
thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.flows.shared_servers import shared_servers
from tests.soak.spot.__main__ import throughput


def test_iterations_count_for_the_nodes_at_their_commit():
    spots: Any = SimpleNamespace(changes=[(0.0, 1), (1.0, 2), (20.0, 1), (30.0, 2)])
    watch: Any = SimpleNamespace(commits={0: 10.0, 1: 12.0, 2: 19.0, 3: 25.0, 4: 31.0, 5: 34.0})
    assert throughput(watch, spots) == {2: (4, 14.0), 1: (1, 10.0)}
    assert throughput(SimpleNamespace(commits={}), spots) == {}  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.integration
def test_a_run_continues_while_the_nodes_of_its_engines_vanish_and_loses_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "tests.soak.spot", "--home", str(tmp_path / "spot")]
    command += ["--kills", "2"]
    # Not the template: a node is killed with its own children.
    environment = {**os.environ, "PREFECT_API_URL": shared_servers().environment["PREFECT_API_URL"]}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "spot" / "summary.json").read_text())
    assert found["kills"] == 2 and found["proof"]["replay"]["equal"]
