"""Engines on nodes that vanish: `python -m tests.soak.spot --minutes 20 --home runs/spot`.

Starts a Ray of a reserved node and of N spot nodes with one engine each, and a real run on it.
Kills the spot nodes one after another, each at once with all its processes, and adds another node
in its place after a while. Then checks that nothing is lost or trained twice, audits and replays
the run. Prints the throughput by number of engines. Exit code 1 if the proof fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlpipe.store.objects.files import Files
from tests.soak.chaos.drivers import RECIPE
from tests.soak.chaos.processes import Family
from tests.soak.chaos.replay import replay_branch
from tests.soak.chaos.verify import Ledger, Proof, prove
from tests.soak.chaos.watch import Watch
from tests.soak.spot.nodes import RESERVED, SPOT, RayNode

RUN = "spot"
POLL_S = 0.2
STEP_S = 300.0
"""Longest wait for the next thing that the run does."""


class Spots:
    """The spot nodes, and how many there were at each time."""

    def __init__(self, home: Path, head: RayNode, number: int) -> None:
        self._home = home
        self._head = head
        self._nodes: list[RayNode] = []
        self.changes: list[tuple[float, int]] = []
        """(time, number of nodes) after each change."""
        self.kills = 0
        for _ in range(number):
            self.add()

    def add(self) -> None:
        """Start a node."""
        self._nodes.append(RayNode(self._home, SPOT, num_cpus=1, head=self._head.address))
        self._note()

    def kill_oldest(self) -> None:
        """Kill the node that is longest there."""
        self._nodes.pop(0).kill()
        self.kills += 1
        self._note()

    def _note(self) -> None:
        self.changes.append((time.time(), len(self._nodes)))

    def end(self) -> None:
        """Kill all nodes."""
        while self._nodes:
            self._nodes.pop().kill()


def drive(home: Path, arguments: argparse.Namespace) -> tuple[Spots, Watch, Ledger, int]:
    """Run and kill for the given minutes; return what was seen, and the run's exit code."""
    head = RayNode(home, RESERVED, num_cpus=3)
    spots = Spots(home, head, arguments.spots)
    watch = Watch(home / RUN / "trace.jsonl")
    ledger = Ledger(Files(home / "store"))
    command = [sys.executable, "-m", "tools.train", "--home", str(home), "--run", RUN]
    command += ["--recipe", str(RECIPE), f"resources.ray_address={head.address}"]
    command += [f"resources.trainer_labels={json.dumps(RESERVED)}"]
    command += [f"resources.engine_labels={json.dumps(SPOT)}"]
    command += [f"resources.rollout_num_gpus={arguments.spots}", "resources.keep_idle_s=1"]
    with (home / "run.log").open("wb") as log:
        run = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # A shell without job control starts programs in the background without SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        pulse = Pulse(run, watch, ledger, home / "run.log")
        if arguments.kills:
            kill_in_turn(pulse, spots, arguments.kills)
        else:
            kill_by_time(pulse, spots, arguments)
        run.send_signal(signal.SIGINT)
        code = run.wait(180)
    finally:
        if run.poll() is None:
            run.kill()
        spots.end()
        head.kill()
    return spots, watch, ledger, code


@dataclass
class Pulse:
    """What the run has committed and said."""

    run: subprocess.Popen[bytes]
    watch: Watch
    ledger: Ledger
    log: Path

    def wait(self, reached: Callable[[], bool], timeout_s: float = float("inf")) -> None:
        """Wait until `reached`. Raises: RuntimeError if the run ends first; TimeoutError."""
        end_s = time.monotonic() + timeout_s
        while not reached():
            if self.run.poll() is not None:
                raise RuntimeError(f"the run ended with {self.run.returncode}; see {self.log}")
            if time.monotonic() > end_s:
                raise TimeoutError(f"nothing happened for {timeout_s:g} s; see {self.log}")
            time.sleep(POLL_S)
            self.watch.poll()
            self.ledger.look()

    def wait_for_commits(self, number: int) -> None:
        """Wait for further commits."""
        wanted = len(self.watch.commits) + number
        self.wait(lambda: len(self.watch.commits) >= wanted, STEP_S)

    def wait_for_words(self, words: str, times: int) -> None:
        """Wait until the run has said these words so often."""
        self.wait(lambda: self.log.read_text(errors="replace").count(words) >= times, STEP_S)


def kill_by_time(pulse: Pulse, spots: Spots, arguments: argparse.Namespace) -> None:
    """Kill and add nodes in turn until the time is over."""
    pulse.wait_for_commits(1)
    end_s = time.monotonic() + 60 * arguments.minutes
    change, seconds = spots.kill_oldest, arguments.every_s
    while (now_s := time.monotonic()) < end_s:
        next_s = min(end_s, now_s + seconds)
        pulse.wait(lambda until_s=next_s: time.monotonic() >= until_s)
        if next_s < end_s:
            change()
        is_away = change == spots.kill_oldest
        change = spots.add if is_away else spots.kill_oldest
        seconds = arguments.away_s if is_away else arguments.every_s


def kill_in_turn(pulse: Pulse, spots: Spots, kills: int) -> None:
    """Kill nodes one after another, each once its predecessor's place is taken."""
    for number in range(1, kills + 1):
        pulse.wait_for_commits(2)
        spots.kill_oldest()
        pulse.wait_for_words("waits for room in the Ray cluster", number)
        pulse.wait_for_commits(1)
        spots.add()
        pulse.wait_for_words("has room again", number)
    pulse.wait_for_commits(2)


def throughput(watch: Watch, spots: Spots) -> dict[int, tuple[int, float]]:
    """Return number of nodes → (iterations, seconds) from the first commit on."""
    commits = sorted(watch.commits.values())
    seen: dict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    if not commits:
        return seen
    begins = [max(time_s, commits[0]) for time_s, _ in spots.changes]
    ends = [*begins[1:], commits[-1]]
    for (_, number), begin, end in zip(spots.changes, begins, ends, strict=True):
        if end > begin:
            iterations, seconds = seen[number]
            inside = sum(begin < commit <= end for commit in commits)
            seen[number] = (iterations + inside, seconds + end - begin)
    return seen


def report(spots: Spots, watch: Watch, proof: Proof, code: int) -> str:
    """Return the result as text."""
    lines = [f"{spots.kills} nodes killed; {proof.iterations} iterations; exit code {code}"]
    for number, (iterations, seconds) in sorted(throughput(watch, spots).items()):
        rate = 60 * iterations / seconds if seconds else 0.0
        lines.append(f"{number} spot nodes: {iterations} in {seconds:.0f} s, {rate:.1f} a minute")
    lines.append(f"{proof.groups_seen} finished groups seen, {len(proof.lost)} lost")
    lines.append(f"{len(proof.twice)} groups trained twice; audit: {len(proof.findings)} findings")
    if proof.replay is not None:
        lines.append(f"replay of {proof.replay.versions} states: equal {proof.replay.equal}")
    problems = [*proof.lost, *proof.twice, *proof.findings, *filter(None, [proof.error])]
    return "\n".join([*lines, *(f"VIOLATED {problem}" for problem in problems[:20])])


def main() -> int:
    """Run, kill, prove."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.spot", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="minutes of kills")
    parser.add_argument("--kills", type=int, default=0, help="end after this number of kills")
    parser.add_argument("--spots", type=int, default=2, help="spot nodes, with one engine each")
    parser.add_argument("--every-s", type=float, default=35.0, help="seconds with all nodes")
    parser.add_argument("--away-s", type=float, default=25.0, help="seconds with one node less")
    parser.add_argument("--home", default="runs/spot", help="folder for all files")
    arguments = parser.parse_args()
    home = Path(arguments.home).absolute()
    home.mkdir(parents=True, exist_ok=True)
    family = Family()
    try:
        spots, watch, ledger, code = drive(home, arguments)
        proof = prove(Files(home / "store"), RUN, ledger, partial(replay_branch, home=home))
    finally:
        family.end()
    text = report(spots, watch, proof, code)
    print(text)
    figures = {
        "kills": spots.kills,
        "throughput": {str(n): pair for n, pair in throughput(watch, spots).items()},
        "proof": proof.record(),
        "exit_code": code,
    }
    (home / "summary.json").write_text(json.dumps(figures, indent=1))
    return 0 if proof.clean else 1


if __name__ == "__main__":
    sys.exit(main())
