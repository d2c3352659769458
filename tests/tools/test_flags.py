"""The table of slime flags as a command (tools.flags)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import flags

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["eval-interval"], "evaluation.eval_interval"),
        (["lora_rank"], "refused: LoRA is not supported"),
        (["use-fault"], "changes nothing: engines are always watched"),
        (["ckpt-format"], "only torch_dist"),
        (["sglang-*"], "names of sglang"),
        (["--arguments", "engine.sglang.tp_size"], "refused"),
    ],
)
def test_the_tables_are_printed(
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(sys, "argv", ["tools.flags", *arguments])
    assert flags.main() == 0
    assert line in capsys.readouterr().out


def test_an_unknown_name_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["tools.flags", "no such flag"])
    assert flags.main() == 1
    assert "no name contains 'no such flag'" in capsys.readouterr().err


def test_an_unknown_name_gives_the_nearest_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["tools.flags", "rollout-batch-sise"])
    assert flags.main() == 1
    assert "nearest: --rollout-batch-size" in capsys.readouterr().err


def test_a_closed_pipe_ends_the_command_quietly():
    command = [sys.executable, "-m", "tools.flags"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline()
        process.stdout.close()
        assert process.stderr and process.stderr.read() == ""
    assert process.returncode in (0, 141)
