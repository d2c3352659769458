"""One run of `tools.bench.scale`: a train flow with N simulated engines and N simulated ranks.

    python -m tools.bench.scale_run --engines 8 --iterations 12 --home runs/bench/scale

Prefect, Ray, conductor, fleet, generator, router, store, rewards, batches and commits are real; see
`simulated_cluster` for the rest. Between the commits of two iterations every process is read: CPU
seconds, resident memory and the counts of its parts. After the last of these iterations the run
rests for some seconds, so that the cost of the checks of its engines is seen alone.
Writes `{home}/scale-{N}.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from rlpipe.actors.ray.local_ray import connect
from rlpipe.actors.ray.named import namespace
from rlpipe.config.load import load_run, use_home
from rlpipe.config.text import dump
from rlpipe.observe.trace import FILE, read_trace, works
from tools.bench import probes
from tools.bench.empty_dag import listener
from tools.bench.shapes import SHAPES, make_directory
from tools.bench.simulated_cluster import CHECK_INTERVAL, measured_actors, start_conductor
from tools.bench.simulated_server import served
from tools.train import finish

WARM_UP = 2
"""Iterations before the first measured one."""
IDLE_S = 6.0
SERVERS_PER_PROCESS = 512
PROMPT_CHARACTERS = 32
BATCHES = 4
"""Batches in the prompt file."""
MIB = 2**20
FLOW_PARTS = {
    "tasks.reward:read_samples": "reward: read samples",
    "tasks.reward:score": "reward: score",
    "tasks.reward:write_rewards": "reward: write",
    "tasks.checkpoint:_record": "commit",
    "tasks.checkpoint:save": "checkpoint: save",
    "tasks.checkpoint:settle": "checkpoint: settle",
    "tasks.observe:Observer.iteration": "observe",
}


@dataclass(frozen=True)
class Snapshot:
    """State of all processes at one moment. `cpu_s` and `rss_mib`: by name of the process."""

    time_s: float
    cpu_s: dict[str, float]
    rss_mib: dict[str, float]
    parts: dict[str, dict[str, float]]
    """Counts by part, of all processes together."""


@dataclass(frozen=True)
class Load:
    """Work of an iteration for each engine."""

    groups: int
    samples: int
    """Samples of a group."""
    median: int


class Readings:
    """Takes snapshots when certain iterations are committed."""

    def __init__(self, config: Any, simulated: Sequence[int], first: int, last: int) -> None:
        """`simulated`: processes of simulated engines. `first`, `last`: the measured iterations."""
        self._config = config
        self._simulated = simulated
        self._first = first
        self._last = last
        self.taken: list[Snapshot] = []

    def committed(self, iteration: int) -> None:
        """Take a snapshot before the first and after the last measured iteration, then rest."""
        if iteration == self._first - 1:
            self.taken.append(self.take())
        elif iteration == self._last:
            self.taken.append(self.take())
            time.sleep(max(IDLE_S, float(os.environ[CHECK_INTERVAL])))
            self.taken.append(self.take())

    def take(self) -> Snapshot:
        """Return a snapshot."""
        actors = measured_actors(self._config)
        names = {answer["pid"]: name.partition("-")[0] for name, answer in actors.items()}
        names[os.getpid()] = "flow"
        names[listener(os.environ["PREFECT_API_URL"]).pid] = "prefect server"
        names |= dict.fromkeys(self._simulated, "simulated engines")
        cpu_s: dict[str, float] = {}
        rss_mib: dict[str, float] = {}
        family = psutil.Process().children(recursive=True)
        for process in [psutil.Process(pid) for pid in names if not _is_in(pid, family)] + family:
            with_name = names.get(process.pid) or _title(process)
            if with_name is None:
                continue
            times = process.cpu_times()
            cpu_s[with_name] = cpu_s.get(with_name, 0.0) + times.user + times.system
            rss = process.memory_info().rss / MIB
            rss_mib[with_name] = rss_mib.get(with_name, 0.0) + rss
        parts: dict[str, dict[str, float]] = {}
        for counts in [probes.totals(), *(answer["parts"] for answer in actors.values())]:
            for part, values in counts.items():
                mine = parts.setdefault(part, {})
                for name, value in values.items():
                    mine[name] = mine.get(name, 0.0) + value
        return Snapshot(time.perf_counter(), cpu_s, rss_mib, parts)


def _is_in(pid: int, processes: Sequence[psutil.Process]) -> bool:
    return any(process.pid == pid for process in processes)


def _title(process: psutil.Process) -> str | None:
    """Return the name of a process of Ray or of the router; None for helpers."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return None
    titles = {"gcs_server": "ray gcs", "raylet/raylet": "raylet", "sglang::router": "router"}
    return next((name for text, name in titles.items() if text in command), None)


def settings(
    model_dir: Path, prompts: Path, urls: Sequence[str], load: Load, iterations: int
) -> dict[str, Any]:
    """Return the configuration of a run, as plain data."""
    return {
        "num_rollout": iterations,
        "model": {
            "source": {"type": "huggingface", "hf_checkpoint": str(model_dir)},
            "dtype": "bfloat16",
        },
        "data": {"prompts": {"type": "file", "paths": [str(prompts)]}},
        "rollout": {
            "rollout_batch_size": load.groups * len(urls),
            "n_samples_per_prompt": load.samples,
            "rollout_max_response_len": 8 * load.median,
        },
        "reward": {"function": {"type": "random"}},
        "train": {"max_tokens_per_gpu": 8192, "optimizer": {"lr": 1e-6}},
        "resources": {
            "actor_num_gpus_per_node": len(urls),
            "external_engines": list(urls),
        },
        "checkpoint": {"save_interval": 4},
        "observe": {"tensorboard": False},
    }


def write_prompts(path: Path, rows: int) -> Path:
    """Write different prompts: a number in letters, padded to PROMPT_CHARACTERS."""
    lines = []
    for row in range(rows):
        word = "".join(chr(ord("a") + int(digit)) for digit in str(row))
        lines.append(json.dumps({"prompt": word.ljust(PROMPT_CHARACTERS, "z"), "label": "0"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def count_flow(readings: Readings) -> None:
    """Count the parts of this process, and take the readings at commits."""
    # After `finish` has set Prefect's folder: the stages import Prefect.
    from tasks import checkpoint

    probes.install(FLOW_PARTS, elsewhere="flow: rest")
    record = checkpoint._record

    def recorded(ctx: Any, k: int, nodes: Any) -> Any:
        commit = record(ctx, k, nodes)
        readings.committed(k)
        return commit

    checkpoint._record = recorded


def run(home: Path, engines: int, iterations: int, load: Load, overrides: Sequence[str]) -> Any:
    """Run a train flow; return its figures. Raises: RuntimeError if the flow fails."""
    from tools.bench.simulated_trainer import PUSH_S, WORKING_RANKS

    home.mkdir(parents=True, exist_ok=True)
    use_home(str(home))
    name = f"scale-{engines}"
    for folder in (home / name, home / "store"):
        shutil.rmtree(folder, ignore_errors=True)
    model_dir = home / "models" / "tiny"
    if not model_dir.is_dir():
        model_dir.parent.mkdir(parents=True, exist_ok=True)
        make_directory(SHAPES["tiny"], model_dir)
    prompts = write_prompts(home / f"{name}.jsonl", BATCHES * load.groups * engines)
    # 32 engines are checked in 2 s. More engines get more time here: their actors share a process.
    check_interval_s = max(2.0, engines / 16)
    os.environ[CHECK_INTERVAL] = str(check_interval_s)
    with served(
        engines,
        model_dir,
        per_process=SERVERS_PER_PROCESS,
        median=load.median,
        push_s=PUSH_S,
    ) as (urls, processes):
        recipe = home / f"{name}.yaml"
        recipe.write_text(dump(settings(model_dir, prompts, urls, load, iterations)))
        config = load_run(str(recipe), overrides, name)
        last = iterations - 2  # the last iteration saves the run
        pids = [process.pid for process in processes]
        readings = Readings(config, pids, first=WARM_UP, last=last)

        def start() -> Awaitable[dict[str, Any]]:
            from flows.train import train

            count_flow(readings)
            connect(config.resources, home, namespace=namespace(config.cluster))
            start_conductor(config)
            return train(str(recipe), overrides, name)

        started_s = time.perf_counter()
        code, summary = finish(start)
        seconds = time.perf_counter() - started_s
    if code or summary is None:
        raise RuntimeError(f"the run ended with exit status {code}")
    return {
        "engines": engines,
        "ranks": engines,
        "working_ranks": min(engines, WORKING_RANKS),
        "check_interval_s": check_interval_s,
        "load": asdict(load),
        "iterations": last - WARM_UP + 1,
        "total_s": seconds,
        "load_average": os.getloadavg(),
        "stages": stages(home / name / FILE, WARM_UP, last),
        "objects": sum(1 for path in (home / "store").rglob("*") if path.is_file()),
        "snapshots": [asdict(snapshot) for snapshot in readings.taken],
    }


def stages(trace: Path, first: int, last: int) -> dict[str, list[float]]:
    """Return stage → seconds in each measured iteration."""
    found: dict[str, list[float]] = {}
    for work in works(read_trace(trace)[0]):
        if work.iteration is not None and first <= work.iteration <= last:
            found.setdefault(work.stage, []).append(work.end - work.begin)
    return found


def main() -> int:
    """Run once and write the figures. Exit codes: 0 done, 1 the run failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scale_run", description=__doc__)
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--groups", type=int, default=4, help="groups an engine and iteration")
    parser.add_argument("--samples", type=int, default=8, help="samples of a group")
    parser.add_argument("--median", type=int, default=64, help="median response in tokens")
    parser.add_argument("--home", default="runs/bench/scale")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    home = Path(given.home).absolute()
    load = Load(given.groups, given.samples, given.median)
    try:
        figures = run(home, given.engines, given.iterations, load, given.overrides)
    except RuntimeError as error:
        print(f"scale with {given.engines} engines failed: {error}", file=sys.stderr)
        return 1
    (home / f"scale-{given.engines}.json").write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
