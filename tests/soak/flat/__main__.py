"""`python -m tests.soak.flat --iterations 200 --home runs/flat`: sample an undisturbed run.

Prints the first iterations against the last (memory by process, seconds, orchestration, listings),
then the cost of an iteration that is already done (`reuse`). Writes `{home}/summary.json` and
`{home}/flat.png`. Exit code 1 if the run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rlpipe.store.objects.files import Files
from tests.soak.chaos.drivers import RECIPE
from tests.soak.chaos.processes import Family
from tests.soak.chaos.watch import Watch
from tests.soak.flat.plot import draw
from tests.soak.flat.sample import Look, look, summarise, table
from tools.s3_server import S3Server

POLL_S = 0.2


def main() -> int:
    """Run, sample, compare."""
    arguments = parse_arguments()
    home = Path(arguments.home).absolute()
    home.mkdir(parents=True, exist_ok=True)
    run = f"flat-{datetime.now():%m%d-%H%M%S}"
    family = Family()
    try:
        with S3Server(home / "s3", bucket="flat") as server:
            os.environ.update(server.environment)
            root = f"s3://{server.bucket}/runs"
            code, looks = drive(home, run, root, family, arguments)
            timing = [
                json.loads(line) for line in (home / run / "timing.jsonl").read_text().splitlines()
            ]
            rows = summarise(looks, timing, window=arguments.window)
            reused = reuse(home, run) if code == 0 else None
    finally:
        family.end()
    print(table(rows))
    print(f"an iteration that is done already takes {reused} s")
    summary = {
        "run": run,
        "rows": rows,
        "reused_s": reused,
        "looks": [vars(look) for look in looks],
    }
    (home / "summary.json").write_text(json.dumps(summary, indent=1))
    draw(looks, timing, home / "flat.png")
    print(f"see {home}/summary.json and {home}/flat.png")
    return code


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.flat",
        description="Compare the first and the last iterations of an undisturbed run.",
    )
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument(
        "--window", type=int, default=20, help="number of first and of last iterations"
    )
    parser.add_argument("--every", type=int, default=2, help="iterations between two samples")
    parser.add_argument("--home", default="runs/flat", help="folder for all files")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides of tests/soak/chaos/recipe.yaml",
    )
    return parser.parse_args()


def drive(
    home: Path, run: str, root: str, family: Family, arguments: argparse.Namespace
) -> tuple[int, list[Look]]:
    """Run to the end; return the exit code and the samples."""
    command = [
        sys.executable,
        "-m",
        "tools.train",
        "--recipe",
        RECIPE,
        "--home",
        str(home),
        "--run",
        run,
    ]
    overrides = [f"store.root={root}", f"num_rollout={arguments.iterations}", *arguments.overrides]
    watch = Watch(home / run / "trace.jsonl")
    files = Files(root)
    looks = list[Look]()
    with (home / f"{run}.log").open("ab") as log:
        flow = subprocess.Popen(
            [*command, *overrides],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    while flow.poll() is None:
        family.look()
        watch.poll()
        if watch.newest >= (looks[-1].iteration + arguments.every if looks else 0):
            looks.append(look(family, files, run, watch.newest))
        time.sleep(POLL_S)
    return flow.returncode, looks


def reuse(home: Path, run: str) -> list[float] | str:
    """Return the seconds of an iteration that is done, several times; or the error output."""
    command = [sys.executable, "-m", "tests.soak.flat.reuse", "--home", str(home), "--run", run]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer: dict[str, Any] = (
        json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    )
    return answer.get("seconds") or done.stderr[-2000:]


if __name__ == "__main__":
    sys.exit(main())
