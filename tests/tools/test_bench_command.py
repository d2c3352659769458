"""The benchmark's command line: parts, overrides, what it prints and leaves behind
(tools.bench)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlpipe.errors import DeadlineExceeded, ResourceError
from rlpipe.observe.trace import Event
from tools.bench import iterations
from tools.bench.__main__ import main
from tools.bench.bench import open_bench
from tools.bench.shapes import SHAPES
from tools.bench.utilisation import watched


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    return main()


def write_trace(folder: Path, iterations: int) -> None:
    """Of a run whose iterations take ten seconds, nine of them at work."""
    events = []
    for k in range(iterations):
        for stage, begin, end in (("rollout", 1, 6), ("train", 6, 9), ("checkpoint", 9, 10)):
            events += [
                Event(10 * k + begin, k, stage, "begin", 1),
                Event(10 * k + end, k, stage, "end", 1),
            ]
    folder.mkdir()
    (folder / "trace.jsonl").write_text(
        "".join(json.dumps(event._asdict()) + "\n" for event in events)
    )


def test_a_run_that_is_there_is_shown_in_shares(tmp_path, monkeypatch, capsys):
    write_trace(tmp_path / "run", 5)
    assert (
        run(monkeypatch, "iteration", "--run", str(tmp_path / "run"), "--home", str(tmp_path)) == 0
    )
    shown = [
        [cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()
    ]
    assert {line[2]: line[3] for line in shown[2:]} == {
        "iteration": "10 s [10, 10]",
        "rollout": "5 s [5, 5]",
        "train": "3 s [3, 3]",
        "checkpoint": "1 s [1, 1]",
        "in no stage": "10 %",
        "off the GPUs": "20 %",
    }
    left = json.loads((tmp_path / "bench-tiny.json").read_text())
    assert left["device"] and left["config"]["num_rollout"] == 8 and left["failed"] == []
    assert next(row for row in left["rows"] if row["what"] == "in no stage")["median"] == {
        "ours": pytest.approx(10)
    }


def test_a_part_that_fails_does_not_keep_others_from_being_shown(tmp_path, monkeypatch, capsys):
    write_trace(tmp_path / "run", 2)
    words = [
        "iteration",
        "store",
        "--run",
        str(tmp_path / "run"),
        "--home",
        str(tmp_path),
        "--repeats",
        "1",
    ]
    assert run(monkeypatch, *words) == 1
    output = capsys.readouterr()
    assert "bench iteration failed: DataError" in output.err and "too few iterations" in output.err
    assert "bytes/token" in output.out


@pytest.mark.parametrize("words", [["no_such_part"], ["--shape", "70b"]])
def test_a_word_that_is_no_part_is_refused(words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *words)
    assert caught.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_an_override_that_is_wrong_is_named(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "store", "rollout.rolout_batch_size=4", "--home", str(tmp_path)) == 2
    assert "rollout_batch_size" in capsys.readouterr().err


def test_a_shape_is_a_run_with_its_own_work(tmp_path):
    bench = open_bench(tmp_path, "0.6b", ["train.optimizer.lr=1e-5"], seconds=1, repeats=1)
    config = bench.config
    shape = SHAPES["0.6b"]
    assert config.samples_per_iteration == 256 and config.rollout.rollout_max_response_len == 512
    assert config.num_steps_per_rollout == 1 and config.train.optimizer.lr == 1e-5
    prompts = [
        json.loads(line)["prompt"] for line in (tmp_path / "0.6b.jsonl").read_text().splitlines()
    ]
    assert {len(prompt) for prompt in prompts} == {shape.prompt_tokens} and len(
        set(prompts)
    ) == len(prompts)
    assert not bench.model_dir.exists(), "made when a part needs it"


def test_a_run_has_begun_with_the_first_stage_of_an_iteration_not_with_its_engines(tmp_path):
    trace = tmp_path / "trace.jsonl"
    log = tmp_path / "train.log"
    log.write_text("")
    engines, rollout = (
        json.dumps(Event(1.0, k, stage, "begin", 1)._asdict())
        for k, stage in ((None, "switch to start"), (0, "rollout"))
    )
    with subprocess.Popen(["sleep", "60"]) as process:
        trace.write_text(f"{engines}\n")
        with pytest.raises(DeadlineExceeded):
            iterations._until_started(process, trace, log, time.monotonic())
        trace.write_text(f"{engines}\n{rollout}\n")
        iterations._until_started(process, trace, log, time.monotonic())
        process.kill()


def test_only_the_gpus_that_a_run_sees_are_watched(tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    (tmp_path / "nvidia-smi").write_text(
        f'#!/bin/sh\necho "$@" > {asked}.new && mv {asked}.new {asked}\nexec sleep 60\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for visible, expected in (("2,3", True), ("", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with watched():
            while not asked.exists():
                time.sleep(0.01)
        assert ("--id=2,3" in asked.read_text()) is expected
        asked.unlink()


@pytest.mark.parametrize(
    ("program", "fails"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", False),
        ("raise SystemExit(143)", False),
        ("raise SystemExit(1)", True),
    ],
)
def test_a_run_that_the_time_limit_ends_has_not_failed(tmp_path, monkeypatch, program, fails):
    bench = open_bench(tmp_path, "tiny", [], seconds=30, repeats=1)
    monkeypatch.setattr(iterations, "_until_started", lambda *_: None)
    program_of = subprocess.Popen

    def start(command, **options):
        return program_of([sys.executable, "-c", program], **options)

    monkeypatch.setattr(iterations.subprocess, "Popen", start)
    with pytest.raises(ResourceError) if fails else nullcontext():
        iterations.run(bench, tmp_path / "iteration" / "run")
