"""`python -m tools.bench.long_tails`: whole runs on two GPUs with the lengths of reasoning models.

Responses have forced lengths: log-normal with the given median, and 8 medians as the 99th
percentile and as the longest. The length follows from prompt and sample, so each run samples the
same responses. One synchronous run shares both GPUs between trainer and engines. The others have
one GPU for the trainer and one for an engine, and sample ahead.

| column        | meaning                                                          |
|---------------|------------------------------------------------------------------|
| samples/s     | trained samples, after the first iterations                      |
| ratio         | to the first row                                                 |
| busy          | share of the time in which a kernel runs, for each GPU           |
| stale tokens  | share of the finished tokens that were dropped as too old        |
| staleness     | mean over the trained tokens                                     |

Writes `{home}/long_tails.json` and `long_tails.png`, a picture of both GPUs over time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlpipe.errors import DataError, RlpipeError
from rlpipe.observe.trace import FILE, read_trace, works
from rlpipe.rollout.slime_rollout import generate as generate_response
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.shards import read_rows
from rlpipe.store.run_file import get_run
from rlpipe.types import Stage
from tools.bench import iterations
from tools.bench.bench import Bench, open_bench
from tools.bench.shapes import SHAPES
from tools.bench.utilisation import Moment

SIGMA = math.log(8) / 2.326
"""Of the logarithm of a length: the 99th percentile is 8 medians."""
LONGEST = 8
"""Longest response, in medians."""
WARMUP_ITERATIONS = 2
"""First iterations of a run, which do not count."""
SMOOTHED_S = 1.0
"""Width of the mean in the picture."""


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Sample a response of the forced length (`rollout.custom_generate_function_path`)."""
    longest = sampling_params["max_new_tokens"]
    length = response_length(sample.prompt, sample.index, longest // LONGEST)
    return await generate_response(args, sample, {**sampling_params, "max_new_tokens": length})


def response_length(prompt: str, index: int, median: int) -> int:
    """Return the length of a response in tokens."""
    normal = random.Random(f"{prompt}/{index}").gauss(0.0, SIGMA)
    return max(1, min(LONGEST * median, round(median * math.exp(normal))))


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    overrides: tuple[str, ...]


SHARED = ("resources.colocate=true", "resources.actor_num_gpus_per_node=2")
SEPARATE = (
    "resources.colocate=false",
    "resources.actor_num_gpus_per_node=1",
    "resources.rollout_num_gpus=1",
    "sync.transport=distributed",
    "train.loss.use_tis=true",
)
CASES = (
    Case("synchronous", SHARED),
    Case("S = 1, planned", (*SEPARATE, "async_buffer_size=1")),
    Case("S = 2, planned", (*SEPARATE, "async_buffer_size=2")),
    Case(
        "S = 4, first_finished",
        (*SEPARATE, "async_buffer_size=4", "rollout.selection=first_finished"),
    ),
)


def main() -> int:
    """Run the cases one after another and print the table. A failed case is a line of its own."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.long_tails", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--median", type=int, default=1024, help="median length in tokens")
    parser.add_argument("--iterations", type=int, default=12, help="iterations of each run")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of each run")
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--home", default="runs/bench", help="folder of all files")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of all runs")
    given = parser.parse_intermixed_args()
    home = Path(given.home).absolute()
    overrides = [
        f"rollout.rollout_max_response_len={LONGEST * given.median}",
        "rollout.custom_generate_function_path=tools.bench.long_tails.generate",
        f"num_rollout={given.iterations}",
        *given.overrides,
    ]
    bench = open_bench(home, given.shape, overrides, seconds=given.seconds, repeats=1)
    bench.ensure_model()
    rows: list[dict[str, Any]] = []
    busy: dict[str, Sequence[Moment]] = {}
    for case in (CASES[number] for number in given.cases):
        try:
            figures, busy[case.name] = measure(bench.with_overrides(case.overrides))
        except RlpipeError as error:
            print(f"{case.name} failed: {type(error).__name__}: {error}", flush=True)
            continue
        rows.append({"case": case.name, **asdict(case), **figures})
        rows[-1]["ratio"] = figures["samples_per_s"] / rows[0]["samples_per_s"]
        print(line(rows[-1]), flush=True)
        (home / "long_tails.json").write_text(json.dumps(rows, indent=1))
        if all(busy.values()):
            draw(busy, home / "long_tails.png")
    return 0 if len(rows) == len(given.cases) else 1


def measure(bench: Bench) -> tuple[dict[str, Any], list[Moment]]:
    """Run one case; return its figures, and the GPUs in the iterations that count.

    Raises: as `tools.bench.iterations.run`; DataError for too few iterations.
    """
    folder = bench.home / "long_tails" / bench.config.run
    watch = iterations.run(bench, folder)
    ends = {
        work.iteration: work.end
        for work in works(read_trace(folder / FILE)[0])
        if work.stage == "checkpoint" and work.iteration is not None
    }
    counted = counted_iterations(sorted(ends), bench.config.async_buffer_size)
    begin = ends[counted[0] - 1]
    end = ends[counted[-1]]
    moments = watch.within(begin, end)
    rollout = bench.config.rollout
    samples = len(counted) * rollout.rollout_batch_size * rollout.n_samples_per_prompt
    return {
        "iterations": len(counted),
        "seconds": end - begin,
        "samples_per_s": samples / (end - begin),
        "busy": {
            gpu: statistics.fmean(one.percent > 0 for one in moments if one.gpu == gpu)
            for gpu in sorted({one.gpu for one in moments})
        },
        **of_store(folder, bench.config.run, counted),
    }, moments


def counted_iterations(committed: Sequence[int], ahead: int) -> Sequence[int]:
    """Return the iterations that count: without the first ones and those at the end.

    The last iteration saves the run. During the `ahead` ones before it no new rollout starts.
    Raises: DataError if none is left.
    """
    counted = committed[WARMUP_ITERATIONS : -(1 + ahead)]
    if not counted:
        raise DataError(
            "too few iterations",
            where="long_tails --iterations",
            found=f"{len(committed)} that were committed",
            expected=f"more than {WARMUP_ITERATIONS + 1 + ahead}",
        )
    return counted


def of_store(folder: Path, run: str, counted: Sequence[int]) -> dict[str, float]:
    """Return the share of stale tokens and the mean staleness, from the store of a run."""
    files = Files(get_run(folder.parent, folder.name).store)
    nodes = Nodes(files)
    branches = Branches(files)
    finished = 0
    stale = 0
    trained = 0
    aged = 0
    for k in counted:
        node = nodes.get(Stage.ROLLOUT, branches.read(run, k).nodes[Stage.ROLLOUT])
        table = read_rows(files, node.files, ["group_id", "weight_versions"])
        accepted = set(node.outputs["accepted"])
        dropped = node.outputs["dropped"]
        for row in table.to_pylist():
            group_id = row["group_id"]
            length = sum(span["tokens"] for span in row["weight_versions"])
            if group_id in accepted:
                trained += length
                aged += sum(
                    span["tokens"] * (k - span["version"]) for span in row["weight_versions"]
                )
            stale += length if dropped.get(group_id) == "stale" else 0
            finished += length if group_id in accepted or group_id in dropped else 0
    return {"stale_tokens": stale / finished, "staleness": aged / trained}


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    busy = ", ".join(f"{share:.0%}" for share in row["busy"].values())
    return (
        f"{row['case']:24} {row['iterations']} iterations  {row['samples_per_s']:6.2f} samples/s  "
        f"ratio {row['ratio']:.2f}  busy {busy}  stale tokens {row['stale_tokens']:.1%}  "
        f"staleness {row['staleness']:.2f}"
    )


def draw(cases: dict[str, Sequence[Moment]], path: Path) -> None:
    """Draw the utilisation of each GPU over time, one row of the picture for each case."""
    figure = Figure(figsize=(11, 1.7 * len(cases) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(cases), squeeze=False, sharex=True)[:, 0]
    for axis, (name, moments) in zip(axes, cases.items(), strict=True):
        for gpu in sorted({one.gpu for one in moments}):
            own = [one for one in moments if one.gpu == gpu]
            start = moments[0].time
            times = [one.time - start for one in own]
            axis.plot(times, smoothed(own), label=f"GPU {gpu}", linewidth=1.2)
        axis.set_ylim(0, 105)
        axis.set_ylabel("busy, %")
        axis.set_title(name, loc="left", fontsize=10)
    axes[0].legend(loc="lower right", fontsize=8, ncols=2)
    axes[-1].set_xlabel("seconds since the first iteration that counts")
    figure.savefig(path, dpi=120)


def smoothed(moments: Sequence[Moment]) -> list[float]:
    """Return the mean utilisation of the SMOOTHED_S around each sample, in %."""
    half = SMOOTHED_S / 2
    return [
        statistics.fmean(one.percent for one in moments if abs(one.time - moment.time) <= half)
        for moment in moments
    ]


if __name__ == "__main__":
    raise SystemExit(main())
