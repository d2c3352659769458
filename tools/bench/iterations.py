"""`iteration`: the times of a run's iterations by stage, from its trace. There is no baseline.

The run is a new one of the shape (one optimizer step an iteration, random rewards), started like
`rlpipe train`, or the run of a given folder. The first iterations do not count (kernels
load, caches fill), nor does the last, which saves the run.

    in no stage     share of the time without a running stage: orchestration
    off the GPUs    share without a stage that uses GPUs: orchestration, rewards, commits
    GPU idle        share of nvidia-smi samples without a kernel, pauses inside stages included
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from rlpipe.config.text import dump
from rlpipe.errors import DeadlineExceeded, ResourceError
from rlpipe.observe.trace import FILE, read_trace, works
from tools.bench.bench import Bench
from tools.bench.idle import Shares, shares
from tools.bench.measures import Row
from tools.bench.utilisation import Watch, idle, watched

WARMUP_ITERATIONS = 2
RUN = "iteration"
GRACE_S = 90.0
POLL_S = 0.2


def measure(bench: Bench, folder: Path | None = None) -> list[Row]:
    """Return the rows of `iteration`.

    `folder`: `{home}/{run}` of an existing run; None: make one.

    Raises: DataError for too few iterations; ResourceError if the new run fails; DeadlineExceeded
    if it does not start.
    """
    if folder is not None:
        return rows(folder, "")
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


def rows(folder: Path, note: str) -> list[Row]:
    """Return the rows of a run from its trace."""
    found = of_trace(folder)
    note = f"{note}{', ' if note else ''}iterations {found.iterations[0]} to {found.iterations[-1]}"
    stages = [Row(RUN, stage, "s", seconds) for stage, seconds in found.by_stage.items()]
    return [
        Row(RUN, "iteration", "s", found.seconds or (found.per_iteration_s,), note=note),
        *stages,
        Row(RUN, "in no stage", "%", (100 * found.in_no_stage,)),
        Row(RUN, "off the GPUs", "%", (100 * found.off_gpus,)),
    ]


def run(bench: Bench, folder: Path) -> Watch:
    """Run until the end or until the iterations have taken `bench.seconds`, and sample the GPUs.

    Raises: ResourceError, DeadlineExceeded.
    """
    say = bench.progress(RUN)
    home = folder.parent
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
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
    if process.returncode not in (0, 143):
        raise ResourceError(
            "the run failed",
            where=str(log),
            found=f"exit status {process.returncode}; {_tail(log)}",
        )
    say(f"the run ended, exit status {process.returncode}, see {folder}")
    return watch


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
