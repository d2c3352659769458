"""A flow process survives the death of its worker (flows.output)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.cancellation import FLOW_RUN_ID_VARIABLE

SCRIPT = """
import sys, time
from pathlib import Path
from rich.console import Console
from flows.output import outlive_the_worker
if {protected}:
    outlive_the_worker(None, None, None)
    outlive_the_worker(None, None, None)
console = Console(file=sys.stderr)
console.print("first")
print("and this", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
for number in range(20):
    console.print(f"line {{number}}")
    print(number, flush=True)
Path(sys.argv[2]).write_text("alive")
"""


def _run(tmp_path: Path, *, protected: bool) -> subprocess.Popen[str]:
    environment = {**os.environ, FLOW_RUN_ID_VARIABLE: "a flow run"}
    command = [
        sys.executable,
        "-c",
        SCRIPT.format(protected=protected),
        str(tmp_path / "go"),
        str(tmp_path / "end"),
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.parametrize("protected", [True, False])
def test_a_run_survives_the_death_of_the_process_that_reads_its_output(
    tmp_path: Path, protected: bool
):
    process = _run(tmp_path, protected=protected)
    assert process.stdout is not None and process.stderr is not None
    assert process.stderr.readline() == "first\n"
    assert process.stdout.readline() == "and this\n"
    process.stdout.close()
    process.stderr.close()
    time.sleep(0.1)
    (tmp_path / "go").touch()
    assert (process.wait(60) == 0) == protected
    assert (tmp_path / "end").exists() == protected


def test_the_last_line_is_read(tmp_path: Path):
    (tmp_path / "go").touch()
    message, complained = _run(tmp_path, protected=True).communicate(timeout=60)
    assert (message.splitlines()[-1], complained.splitlines()[-1]) == ("19", "line 19")
