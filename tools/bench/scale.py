"""`rlpipe bench scale`: costs of an iteration without engines and GPUs, as their number grows.

    python -m tools.bench.scale --engines 2 4 8 32 128

Runs train flows with N simulated engines and N simulated ranks (`scale_run`), one after another,
with work in proportion to N. Fits cost = a + b × N to each part: CPU seconds, seconds, requests to
the store and what they read. Work of each rank is shown for one rank: ranks have own machines.
The growth is the exponent between the two largest runs: 1 is linear.

Writes `{home}/scale.json` and `{home}/scale.png`. `--only-fit` reads the runs that are there.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlpipe.errors import DataError, ResourceError
from rlpipe.observe.pictures import COLOURS, INK, SOFT
from tools.bench.measures import Row, figure
from tools.bench.probes import CALL
from tools.command.bench_options import add_scale

GPUS = (8, 64, 1024)
"""GPUs of the extrapolation: half of them are engines, half are ranks."""
CHECK_S = 2.0
"""Seconds between two checks of an engine in a real run (`fleet.CHECK_INTERVAL_S`)."""
STATUS_CALL = f"{CALL}engine.status"
SHOWN = 8
"""Parts in the picture."""
RUN_TIMEOUT_S = 1800.0
MIB = 2**20
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of an iteration, and how its costs are read from the figures of a run."""

    name: str
    process: str
    probes: tuple[str, ...] = ()
    """Parts of `probes`; their counts are added."""
    each: str | None = None
    """Divide by the calls of this probe: the costs of one rank, or of one checkpoint."""
    of_process: bool = False
    """CPU seconds of the whole process instead, without those of `probes`."""


PARTS = (
    Part("plan and draw", "generator", ("plan and draw",)),
    Part("generation client", "generator", ("plan and draw", "shards"), of_process=True),
    Part("router", "router", of_process=True),
    Part("shards", "generator", ("shards", "shards: adopt")),
    Part(
        "samples to rewards",
        "flow",
        ("reward: read samples", "reward: score", "reward: write"),
    ),
    Part(
        "batch: choose, build",
        "rank 0",
        ("batch: choose rows", "batch: read rows", "batch: advantages", "batch: metrics"),
    ),
    Part("batch: write", "rank 0", ("batch: write",)),
    Part("batch: packing plan", "each rank", ("batch: packing plan",), each="batch: packing plan"),
    Part(
        "batch: read",
        "each rank",
        ("rank: open batch", "rank: decode samples"),
        each="rank: open batch",
    ),
    Part("push: engine calls", "rank 0", ("push: trainer",)),
    Part("push: probe", "rank 0", ("push: probe",)),
    Part("commit", "flow", ("commit",)),
    Part(
        "checkpoint record",
        "flow",
        ("checkpoint: save", "checkpoint: settle"),
        each="checkpoint: save",
    ),
    Part("metrics and pages", "flow", ("observe",)),
    Part(
        "flow, the rest",
        "flow",
        (
            "reward: read samples",
            "reward: score",
            "reward: write",
            "commit",
            "observe",
        ),
        of_process=True,
    ),
    Part("Prefect server", "prefect server", of_process=True),
    Part("conductor", "conductor", of_process=True),
    Part("Ray's control processes", "ray gcs", of_process=True),
)
MEMORY = ("flow", "generator", "conductor", "router", "ray gcs", "prefect server")


@dataclass(frozen=True)
class Fit:
    """cost = a + b × N of one measure of a part."""

    part: str
    process: str
    measure: str
    engines: tuple[int, ...]
    values: tuple[float, ...]
    a: float
    b: float
    growth: float | None
    """Exponent between the two largest runs; None with one run, or without a cost."""

    def at(self, engines: float) -> float:
        """Return the measured cost of this number of engines, else the fitted one."""
        if engines in self.engines:
            return self.values[self.engines.index(int(engines))]
        return self.a + self.b * engines


def fit(engines: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return a and b, both at least 0, with the least squares of the relative errors.

    Shapes: engines, values [R], one of each run. Values of 0 have no relative error and are left
    out.
    """
    known = [(n, value) for n, value in zip(engines, values, strict=True) if value > 0]
    if not known:
        return 0.0, 0.0
    n, y = np.array(known, float).T
    both = np.stack([np.ones_like(n), n], axis=1) / y[:, None]
    candidates = []
    # Both terms, or one of them if the other would be negative.
    for used in ([0, 1], [0], [1]):
        solution = np.zeros(2)
        solution[used] = np.linalg.lstsq(both[:, used], np.ones_like(y), rcond=None)[0]
        if (solution >= 0).all():
            candidates.append((float(((both @ solution - 1) ** 2).sum()), *solution.tolist()))
    return min(candidates)[1:]


def growth(engines: Sequence[int], values: Sequence[float]) -> float | None:
    """Return the exponent of the cost between the two largest runs."""
    if len(engines) < 2 or min(values[-2:]) <= 0:
        return None
    return math.log(values[-1] / values[-2]) / math.log(engines[-1] / engines[-2])


def costs(part: Part, run: Figures) -> dict[str, float]:
    """Return measure → cost of a part in one iteration."""
    before, after = (run["snapshots"][number] for number in (0, 1))
    iterations = run["iterations"]

    def counted(name: str, probe: str) -> float:
        old = before["parts"].get(probe, {}).get(name, 0.0)
        return (after["parts"].get(probe, {}).get(name, 0.0) - old) / iterations

    def total(name: str) -> float:
        return sum(counted(name, probe) for probe in part.probes)

    if part.of_process:
        spent = after["cpu_s"].get(part.process, 0.0) - before["cpu_s"].get(part.process, 0.0)
        return {"cpu_s": max(0.0, spent / iterations - total("cpu_s"))}
    times = counted("calls", part.each) if part.each else 1.0
    if times == 0:
        return {}
    found = {name: total(name) / times for name in ("cpu_s", "wall_s")}
    found["requests"] = (total("requests") + total("listings")) / times
    if read_bytes := total("read_bytes"):
        found["read_mib"] = read_bytes / times / MIB
    return found


def check_cost(run: Figures) -> float | None:
    """Return CPU seconds a second of the checks of all engines, outside of the engines' actors.

    None if the run rested for less than the time between two checks.
    """
    resting, rested = run["snapshots"][1:]
    seconds = rested["time_s"] - resting["time_s"]
    if seconds < run["check_interval_s"]:
        return None
    spent = sum(
        rested["cpu_s"].get(name, 0.0) - resting["cpu_s"].get(name, 0.0)
        for name in ("conductor", "ray gcs", "raylet")
    )
    return spent / seconds * run["check_interval_s"] / CHECK_S


def _calls(run: Figures) -> dict[str, float]:
    """Return method → calls of Ray in an iteration, of each engine or rank; and their sum."""
    before, after = (run["snapshots"][number]["parts"] for number in (0, 1))
    found: dict[str, float] = {
        name: (counts["calls"] - before.get(name, {}).get("calls", 0.0))
        / (run["iterations"] * run["engines"])
        for name, counts in after.items()
        if name.startswith(CALL)
    }
    # Checks of health depend on the time, and not on the work.
    work = (calls for name, calls in found.items() if name != STATUS_CALL)
    return found | {"calls of an engine and a rank": sum(work)}


def fits(runs: Sequence[Figures]) -> list[Fit]:
    """Return the fits of all parts and measures. `runs`: by number of engines, ascending."""
    found = []

    def add(part: str, process: str, measure: str, values: list[float | None]) -> None:
        known = [
            (run["engines"], value)
            for run, value in zip(runs, values, strict=True)
            if value is not None
        ]
        if known:
            engines, numbers = zip(*known, strict=True)
            a, b = fit(engines, numbers)
            rate = growth(engines, numbers)
            found.append(Fit(part, process, measure, engines, numbers, a, b, rate))

    for part in PARTS:
        of_runs = [costs(part, run) for run in runs]
        for measure in ("cpu_s", "wall_s", "requests", "read_mib"):
            add(part.name, part.process, measure, [each.get(measure) for each in of_runs])
    for name in sorted({each for run in runs for each in _calls(run)}):
        add(name, "conductor", "calls", [_calls(run).get(name, 0.0) for run in runs])
    add("health checks, each second", "conductor, Ray", "cpu_s", [check_cost(r) for r in runs])
    of_ranks = Part("", "", ("ranks: rest", "rank: open batch"))
    reads = [costs(of_ranks, run)["requests"] / run["working_ranks"] for run in runs]
    add("store requests of a rank", "each rank", "requests", [*reads])
    for process in MEMORY:
        add(process, process, "rss_mib", [run["snapshots"][1]["rss_mib"][process] for run in runs])
    return found


def table(found: Sequence[Fit]) -> str:
    """Return the fits as a Markdown table."""
    gpus = " | ".join(f"{number:,} GPUs" for number in GPUS)
    lines = [
        f"| part | process | measure | a | b | growth | {gpus} |",
        f"|---|---|---|---|---|---|{'---|' * len(GPUS)}",
    ]
    for one in found:
        cells = [one.part, one.process, one.measure, figure(one.a), figure(one.b)]
        cells.append("" if one.growth is None else f"{one.growth:.1f}")
        cells += [f"{figure(one.at(n / 2))}{'' if n / 2 in one.engines else ' *'}" for n in GPUS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "* from the fit"])


def draw(found: Sequence[Fit], path: Path) -> None:
    """Draw the CPU seconds of the largest parts, and the memory of the processes."""
    canvas = Figure(figsize=(11, 4.2), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(canvas)
    left, right = canvas.subplots(1, 2)
    largest = sorted(
        (one for one in found if one.measure == "cpu_s"), key=lambda one: -one.values[-1]
    )
    _lines(left, largest[:SHOWN], "CPU seconds of an iteration", lambda one: one.part)
    memory = [one for one in found if one.measure == "rss_mib"]
    _lines(right, memory, "resident memory, MiB", lambda one: one.process)
    canvas.savefig(path)


def _lines(axes: Axes, fits_of: Sequence[Fit], title: str, name: Callable[[Fit], str]) -> None:
    """Draw measured costs as points and fits as lines, both axes logarithmic."""
    for number, one in enumerate(fits_of):
        colour = COLOURS[number % len(COLOURS)]
        style = "-" if number < len(COLOURS) else "--"
        axes.plot(one.engines, one.values, "o", color=colour, markersize=3.5)
        fitted = [one.a + one.b * n for n in one.engines]
        axes.plot(one.engines, fitted, style, color=colour, linewidth=1.2, label=name(one))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel("engines, and as many ranks", fontsize=9, color=SOFT)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)


def measure(
    home: Path,
    engines: Sequence[int],
    iterations: int,
    *,
    say: Callable[[str], None],
) -> list[Row]:
    """Run all sizes and fit; return the rows of the benchmark. Raises: ResourceError."""
    home.mkdir(parents=True, exist_ok=True)
    for number in engines:
        say(f"{number} engines and ranks")
        one_run(home, number, iterations)
    found = write(home, engines)
    return [
        Row(
            "scale",
            f"{one.part} ({one.process})",
            one.measure,
            (one.values[-1],),
            note=f"{one.engines[-1]} engines; fit {figure(one.a)} + {figure(one.b)} × engines",
        )
        for one in found
    ]


def one_run(home: Path, engines: int, iterations: int) -> None:
    """Run one size in a process of its own. Raises: ResourceError."""
    command = [sys.executable, "-m", "tools.bench.scale_run", "--home", str(home)]
    command += ["--engines", str(engines), "--iterations", str(iterations)]
    log = home / f"scale-{engines}.log"
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise ResourceError(
            "a simulated run failed",
            where=str(log),
            found=f"exit status {done.returncode}; {log.read_text(errors='replace')[-2000:]}",
        )


def write(home: Path, engines: Sequence[int]) -> list[Fit]:
    """Fit the runs of a folder, write JSON and picture, return the fits.

    Raises: DataError if a run is missing.
    """
    paths = [home / f"scale-{number}.json" for number in sorted(engines)]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise DataError(
            "figures of simulated runs are missing",
            where="rlpipe bench scale",
            found=", ".join(missing),
            do="run these sizes, or name the sizes that are there with --engines",
        )
    runs = [json.loads(path.read_text()) for path in paths]
    found = fits(runs)
    loads = {run["engines"]: run["load_average"] for run in runs}
    content = {"loads": loads, "fits": [asdict(one) for one in found]}
    (home / "scale.json").write_text(json.dumps(content, indent=1))
    draw(found, home / "scale.png")
    return found


def main() -> int:
    """Measure, print the table. Exit codes: 0 done, 1 a run failed or is missing."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scale", description=__doc__)
    add_scale(parser)
    parser.add_argument("--home", default="runs/bench/scale", help="folder for all files")
    parser.add_argument("--only-fit", action="store_true", help="read the runs of the folder")
    given = parser.parse_args()
    home = Path(given.home).absolute()

    def say(text: str) -> None:
        print(f"bench scale: {text}", file=sys.stderr, flush=True)

    try:
        if not given.only_fit:
            measure(home, given.engines, given.iterations, say=say)
        print(table(write(home, given.engines)))
    except (DataError, ResourceError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
