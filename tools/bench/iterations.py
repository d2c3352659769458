"""`iteration`: the times of a run's iterations by stage, from its trace, and by part of sync.

The run is a new one of the shape (one optimizer step an iteration, random rewards), started like
`rlpipe train`, or the run of a given folder. The first iterations do not count (kernels
load, caches fill), nor does the last, which saves the run.

    in no stage     share of the time without a running stage: orchestration
    off the GPUs    share without a stage that uses GPUs: orchestration, rewards, commits
    GPU idle        share of nvidia-smi samples without a kernel, pauses inside stages included

The time of an iteration runs from the end of the previous iteration to its own end, so the time
between two iterations counts for the later one. Iterations with an evaluation are left out. For
overlapping iterations (`async_buffer_size` > 0) the shares cover the whole stretch of time.

`sync: PART` are the parts of the sync stage, from its records (`rlpipe.system.parts`): a part
`a/b` is inside the part `a`. With `--against` keys a second run has these keys too, and its values
are the baseline.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from rlpipe.config.text import dump
from rlpipe.errors import DataError, DeadlineExceeded, ResourceError
from rlpipe.observe.trace import FILE, Work, read_trace, works
from rlpipe.store.branches import Branches
from rlpipe.store.nodes import Nodes
from rlpipe.store.objects.files import Files
from rlpipe.store.run_file import get_run, run_path
from rlpipe.system.compile_caches import FOLDER
from rlpipe.types import Stage
from tools.bench.bench import Bench
from tools.bench.measures import Row
from tools.bench.utilisation import Watch, idle, watched

WARMUP_ITERATIONS = 2
RUN = "iteration"
GRACE_S = 90.0
POLL_S = 0.2
ON_GPUS = frozenset({"rollout", "advantage", "train", "sync", "eval"})
"""Stages that use the GPUs. A reward model has its own GPUs; a checkpoint is mostly a commit."""
Span = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """Times of consecutive iterations."""

    iterations: tuple[int, ...]
    seconds: tuple[float, ...]
    """Seconds of each iteration; empty if they overlap."""
    by_stage: dict[str, tuple[float, ...]]
    """Stage → seconds in each iteration."""
    in_no_stage: float
    """Orchestration: share of the time in which no stage ran."""
    off_gpus: float
    """Share of the time in which no stage of ON_GPUS ran."""
    per_iteration_s: float
    """Total time divided by the number of iterations."""
    span: Span
    """Start of the first iteration and end of the last."""


def measure(bench: Bench, folder: Path | None = None, against: Sequence[str] = ()) -> list[Row]:
    """Return the rows of `iteration`.

    `folder`: `{home}/{run}` of an existing run; None: make one. `against`: overrides of a second
    run, the baseline.

    Raises: DataError for too few iterations; ResourceError if the new run fails; DeadlineExceeded
    if it does not start; ConfigError.
    """
    if folder is not None:
        return rows(folder, "")
    found = _new_run(bench)
    if not against:
        return found
    return compared(found, _new_run(bench.with_overrides(against)), " ".join(against))


def compared(ours: Sequence[Row], others: Sequence[Row], against: str) -> list[Row]:
    """Return rows with the values of a second run as the baseline, and rows that only it has."""
    values = {row.what: row.ours for row in others}
    both = [replace(row, baseline=values.get(row.what, ()), against=against) for row in ours]
    names = {row.what for row in ours}
    only_others = [row for row in others if row.what not in names]
    return [
        *both,
        *(replace(row, ours=(), baseline=row.ours, against=against) for row in only_others),
    ]


def _new_run(bench: Bench) -> list[Row]:
    bench.ensure_model()
    rollout = bench.config.rollout
    lengths = f"{bench.shape.prompt_tokens} + {rollout.rollout_max_response_len} tokens"
    folder = bench.home / RUN / bench.config.run
    watch = run(bench, folder)
    samples = f"{rollout.rollout_batch_size} × {rollout.n_samples_per_prompt} samples"
    found = rows(folder, f"{bench.name}, {samples} of {lengths}")
    if seen := watch.within(*of_trace(folder).span):
        found.append(
            Row(
                RUN,
                "GPU idle",
                "%",
                (100 * idle(seen),),
                note=f"{len(seen)} samples in these iterations",
            )
        )
        largest = max(moment.mib for moment in seen) / 1024
        found.append(
            Row(RUN, "GPU memory", "GiB", (largest,), note="largest of a GPU, all processes")
        )
    return found


def of_trace(folder: Path) -> Shares:
    """Return the shares of the iterations that count."""
    return shares(works(read_trace(folder / FILE)[0]), skipped=WARMUP_ITERATIONS)


def shares(found: Sequence[Work], *, skipped: int = 0) -> Shares:
    """Return the shares of the committed iterations.

    An iteration is committed once its checkpoint stage has ended. Left out are the first `skipped`
    iterations, the very first (its start is unknown), the last (it saves the run) and those with an
    evaluation. Raises: DataError if no iteration is left.
    """
    ends = {
        work.iteration: work.end
        for work in found
        if work.iteration is not None and work.stage == "checkpoint"
    }
    order = sorted(ends)
    span_of = {k: (ends[before], ends[k]) for before, k in pairwise(order)}
    evaluations = [(work.begin, work.end) for work in found if work.stage == "eval"]
    chosen = tuple(k for k in order[max(1, skipped) : -1] if not covered(evaluations, span_of[k]))
    if not chosen:
        expected = f"one besides the first {max(1, skipped)}, the last and those with an evaluation"
        raise DataError(
            "too few iterations",
            where="trace.jsonl",
            found=f"{len(order)} that were committed",
            expected=expected,
        )
    stages = [work for work in found if work.iteration in chosen and work.stage != "eval"]
    by_stage = {
        stage: tuple(
            sum(w.end - w.begin for w in stages if (w.stage, w.iteration) == (stage, k))
            for k in chosen
        )
        for stage in dict.fromkeys(work.stage for work in stages)
    }
    overlapping = any(
        a.end > b.begin for a in stages for b in stages if (a.iteration or 0) < (b.iteration or 0)
    )
    spans = (
        [(span_of[chosen[0]][0], ends[chosen[-1]])] if overlapping else [span_of[k] for k in chosen]
    )
    total = sum(end - begin for begin, end in spans)
    busy = [
        [(work.begin, work.end) for work in found if some(work.stage)]
        for some in (lambda _: True, ON_GPUS.__contains__)
    ]
    at_work = [sum(covered(intervals, span) for span in spans) for intervals in busy]
    return Shares(
        chosen,
        () if overlapping else tuple(end - begin for begin, end in spans),
        by_stage,
        1 - at_work[0] / total,
        1 - at_work[1] / total,
        total / (chosen[-1] - chosen[0] + 1 if overlapping else len(chosen)),
        (span_of[chosen[0]][0], ends[chosen[-1]]),
    )


def covered(intervals: Iterable[Span], span: Span) -> float:
    """Return the seconds of `span` that at least one interval covers."""
    total = 0.0
    reached = span[0]
    for begin, end in sorted(intervals):
        begin = max(begin, reached)
        end = min(end, span[1])
        if end > begin:
            total = total + end - begin
            reached = end
    return total


def rows(folder: Path, note: str) -> list[Row]:
    """Return the rows of a run from its trace."""
    found = of_trace(folder)
    note = f"{note}{', ' if note else ''}iterations {found.iterations[0]} to {found.iterations[-1]}"
    stages = [Row(RUN, stage, "s", seconds) for stage, seconds in found.by_stage.items()]
    return [
        Row(RUN, "iteration", "s", found.seconds or (found.per_iteration_s,), note=note),
        *stages,
        *(
            Row(RUN, f"sync: {part}", "s", seconds)
            for part, seconds in sync_parts(folder, found.iterations).items()
        ),
        Row(RUN, "in no stage", "%", (100 * found.in_no_stage,)),
        Row(RUN, "off the GPUs", "%", (100 * found.off_gpus,)),
    ]


def sync_parts(folder: Path, iterations: Sequence[int]) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each part of the sync stage in each iteration, from the run's store.

    {} if the folder has only the trace of a run.
    """
    if not run_path(folder.parent, folder.name).exists():
        return {}
    store = get_run(folder.parent, folder.name).store
    files = Files(store)
    branches = Branches(files)
    nodes = Nodes(files)
    parts = [
        nodes.get(Stage.SYNC, branches.read(folder.name, k).nodes[Stage.SYNC]).outputs.get("parts")
        or {}
        for k in iterations
    ]
    names = sorted({name for of_one in parts for name in of_one})
    return {name: tuple(of_one.get(name, 0.0) for of_one in parts) for name in names}


def run(bench: Bench, folder: Path) -> Watch:
    """Run until the end or until the iterations have taken `bench.seconds`, and sample the GPUs.

    Raises: ResourceError, DeadlineExceeded.
    """
    say = bench.progress(RUN)
    home = folder.parent
    _clear(home)
    recipe = home / "recipe.yaml"
    log = home / "train.log"
    recipe.write_text(dump(bench.config.model_dump(mode="json")))
    command = [
        sys.executable,
        "-m",
        "tools.train",
        "--recipe",
        str(recipe),
        "--home",
        str(home),
        "--run",
        bench.config.run,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            _until_started(
                process,
                folder / FILE,
                log,
                time.monotonic() + 2 * bench.config.resources.start_timeout_s,
            )
            say("the first stage has started")
            with watched() as watch:
                _until_over(process, bench.until_s(), say)
        finally:
            _stop(process)
    # -SIGTERM: the run was at its end and no longer handled the signal.
    if process.returncode not in (0, 143, -signal.SIGTERM):
        raise ResourceError(
            "the run failed",
            where=str(log),
            found=f"exit status {process.returncode}; {_tail(log)}",
        )
    say(f"the run ended, exit status {process.returncode}, see {folder}")
    return watch


def _clear(home: Path) -> None:
    """Remove the run before, but not its compiled kernels: the first start takes minutes more."""
    home.mkdir(parents=True, exist_ok=True)
    for path in home.iterdir():
        if path.name == FOLDER:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _until_started(
    process: subprocess.Popen[bytes], trace: Path, log: Path, deadline_s: float
) -> None:
    # Engines start before the first iteration; their events have no iteration.
    while all(event.iteration is None for event in read_trace(trace)[0]):
        if process.poll() is not None:
            raise ResourceError(
                "the run ended before its first stage", where=str(log), found=_tail(log)
            )
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded("the run does not start", where=str(log), found=_tail(log))
        time.sleep(POLL_S)


def _until_over(process: subprocess.Popen[bytes], until_s: float, say) -> None:
    while process.poll() is None:
        if time.monotonic() > until_s:
            say("the time limit is reached")
            return
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log: Path) -> str:
    return f"it ends:\n{log.read_text(errors='replace')[-2000:]}"
