"""Engines that join and leave during a real run: Prefect, Ray, SGLang, router, Megatron, store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.store.audit.verification import check_store
from rlpipe.store.objects.files import Files
from tests.flows.live_run import REPOSITORY, LiveRun
from tests.flows.test_train import REWARD, SAMPLING, committed

ITERATIONS = 400
"""More than the test needs: it ends the run."""


def request(home: Path, engines: int) -> str:
    """Request a number of engines; return the output."""
    command = [sys.executable, "-m", "tools.engines", "small", str(engines), "--home", str(home)]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.long
@pytest.mark.integration
def test_engines_join_and_leave_while_a_run_continues_and_nothing_is_lost(tmp_path: Path):
    home = tmp_path / "home"
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "small.yaml").write_text(SAMPLING % (tmp_path / "reward.py"))
    arguments = ("--recipe", str(tmp_path / "small.yaml"))
    # Responses that take seconds, so that an engine leaves in the middle of some.
    arguments += (f"num_rollout={ITERATIONS}", "rollout.rollout_max_response_len=300")
    with LiveRun(home, *arguments) as run:
        run.wait_until(lambda: committed(home, "small") >= 1)
        assert request(home, 2) == "small: 1 → 2 engines; the run follows within seconds\n"
        run.wait_until(lambda: "small: engine 1 is up" in run.output)
        joined = committed(home, "small")
        run.wait_until(lambda: committed(home, "small") >= joined + 2)
        assert request(home, 1) == "small: 2 → 1 engine; the run follows within seconds\n"
        run.wait_until(lambda: "small: engine 1 has left; 1 engine" in run.output)
        left = committed(home, "small")
        run.wait_until(lambda: committed(home, "small") >= left + 2)
        assert len(run.parts(lambda line: "sglang::engine" in line or "EngineActor" in line)) >= 1
        assert run.interrupt() == 130
    assert "Traceback" not in run.output
    sampled = (home / "small" / "logs" / "engine-1.log").read_text()
    assert "/generate" in sampled or "Decode batch" in sampled or "Prefill batch" in sampled
    assert check_store(Files(home / "store"), "small").findings == []
