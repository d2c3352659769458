"""`python -m tools.bench.ahead`: measure the gain of rollouts that run ahead of training.

The demo with a slow verifier runs with async_buffer_size 0, 1, 2, ... one after another, from the
same warm start. The table shows iterations a minute, the ratio to the synchronous run, the
staleness of the trained tokens and the final held-out accuracy. Writes `{home}/ahead.json`.

A synchronous iteration takes sampling + training; with rollouts ahead it takes the longer of the
two at best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.types import Stage

SAMPLING = ("rollout", "reward")
TRAINING = ("advantage", "train", "sync")
REWARD = "reward.function={type: python, path: 'tools/bench/slow_reward.py:score'}"
WARMUP_ITERATIONS = 5
"""Iterations that do not count: caches fill, kernels load."""


def main() -> int:
    """Run each S and compare. Exit code: that of the first failed run, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.ahead",
        description="Measure rollouts that run ahead of training.",
    )
    parser.add_argument(
        "--s",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="values of async_buffer_size; the first is the baseline",
    )
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--home", default="runs/bench", help="folder for all files")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of the recipe spell_backward"
    )
    arguments = parser.parse_args()
    home = Path(arguments.home).absolute()
    found = list[dict[str, Any]]()
    for s in arguments.s:
        if code := train(home, s, arguments.iterations, arguments.overrides):
            return code
        found.append(figures(home, s))
    for row in found:
        row["ratio"] = row["iterations_per_minute"] / found[0]["iterations_per_minute"]
    (home / "ahead.json").write_text(json.dumps(found, indent=1))
    print(table(found))
    return 0


def train(home: Path, s: int, iterations: int, overrides: list[str]) -> int:
    """Run to the end; return the exit code."""
    settings = [
        f"async_buffer_size={s}",
        f"num_rollout={iterations}",
        f"evaluation.eval_interval={iterations}",
        REWARD,
    ]
    command = [
        sys.executable,
        "-m",
        "tools.train",
        "--recipe",
        "spell_backward",
        "--home",
        str(home),
        "--run",
        name(s),
    ]
    return subprocess.run([*command, *settings, *overrides], check=False).returncode


def name(s: int) -> str:
    """Return the name of the run with this S."""
    return f"ahead-{s}"


def figures(home: Path, s: int) -> dict[str, Any]:
    """Return the figures of a run from its records."""
    files = Files(home / "store")
    nodes = Nodes(files)
    commits = list(Branches(files).walk(name(s)))[::-1]
    outputs = [
        {stage: nodes.get(stage, digest).outputs for stage, digest in commit.nodes.items()}
        for commit in commits
    ]
    timing = [
        json.loads(line) for line in (home / name(s) / "timing.jsonl").read_text().splitlines()
    ]
    seconds = [entry["iteration_s"] for entry in timing if "iteration_s" in entry][
        WARMUP_ITERATIONS:
    ]
    ages: dict[str, list[float]] = {}
    for output in outputs:
        for metric, value in output[Stage.ADVANTAGE]["metrics"].items():
            if metric.startswith("staleness/"):
                ages.setdefault(metric.removeprefix("staleness/"), []).append(value)
    summary = json.loads((home / name(s) / "summary.json").read_text())
    return {
        "s": s,
        "iterations_per_minute": 60 / statistics.fmean(seconds),
        "sampling_s": sum(median(outputs, stage) for stage in SAMPLING),
        "training_s": sum(median(outputs, stage) for stage in TRAINING),
        "staleness": {age: sum(values) / len(outputs) for age, values in sorted(ages.items())},
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
    }


def median(outputs: list[dict[Stage, Any]], stage: str) -> float:
    """Return the median seconds of a stage."""
    return statistics.median(
        output[Stage(stage)]["seconds"] for output in outputs[WARMUP_ITERATIONS:]
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table."""
    columns = (
        "S",
        "iterations/min",
        "ratio",
        "sampling s",
        "training s",
        "tokens by staleness",
        "held-out accuracy",
    )
    return "\n".join(
        [_line(*columns), _line(*["---"] * len(columns)), *(_line(*_cells(row)) for row in rows)]
    )


def _cells(row: dict[str, Any]) -> list[str]:
    ages = ", ".join(f"{age}: {share:.0%}" for age, share in row["staleness"].items())
    accuracy = f"{row['accuracy_before']:.3f} → {row['accuracy_after']:.3f}"
    rate = [
        f"{row['iterations_per_minute']:.1f}",
        f"{row['ratio']:.2f}",
        f"{row['sampling_s']:.2f}",
        f"{row['training_s']:.2f}",
    ]
    return [str(row["s"]), *rate, ages, accuracy]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
