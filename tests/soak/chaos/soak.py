"""The soak of one layout: wait for a stage, kill a process in it, wait for the recovery, repeat.

A hit counts for a stage only if the victim ran when the signal was sent and the stage had not ended
by then, as the trace tells.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from rlpipe.observe.trace import Event
from tests.soak.chaos.measure import Hit, recovery_s, undisturbed_s
from tests.soak.chaos.pairs import TITLES, Pair, Tally
from tests.soak.chaos.processes import kill_now, runs, title
from tests.soak.chaos.stack import Stack
from tests.soak.chaos.stuck import dump
from tests.soak.chaos.verify import Ledger
from tests.soak.chaos.watch import Watch

POLL_S = 0.004
QUIET_ITERATIONS = 5
"""Undisturbed iterations at the start, after one that warms up."""
START_TIMEOUT_S = 600.0
MAX_QUICK_ENDS = 6
"""Ends in a row soon after the start after which the soak gives up."""


class Over(Exception):
    """The time is up, or a person asked to end."""


@dataclass
class Soak:
    """The soak of one layout. `over` returns True when to stop."""

    stack: Stack
    watch: Watch
    tally: Tally
    ledger: Ledger
    chance: random.Random
    stuck_s: float
    over: Callable[[], bool]
    say: Callable[[str], None]
    hits: list[Hit] = field(default_factory=list)
    undisturbed: float | None = None
    dead: bool = False
    """True if the run was stuck and a restart of everything did not help."""

    def run(self) -> None:
        """Run until `over`, or until every pair has its hits.

        `hits` has the results, also after an exception.
        """
        try:
            self._warm_up()
            while not self.dead and (pair := self.tally.next(self._present(), self.chance)):
                if hit := self._strike(pair):
                    self._settle(hit)
        except Over:
            return

    def _warm_up(self) -> None:
        first = self._wait(lambda: self.watch.newest >= 0, START_TIMEOUT_S)
        if not first or not self._wait(
            lambda: self.watch.newest > QUIET_ITERATIONS, QUIET_ITERATIONS * self.stuck_s
        ):
            self.dead = True
            dump(self.stack, "start")
            return
        self.undisturbed = undisturbed_s(self.watch.commits, range(2, self.watch.newest + 1))
        stages = {
            stage: round(self.watch.typical_s(stage), 3)
            for stage in ("rollout", "reward", "advantage", "train", "sync")
        }
        self.say(f"an undisturbed iteration takes {self.undisturbed:.2f} s; stages {stages}")

    def _present(self) -> set[str]:
        present = {victim for victim in TITLES if self.stack.victims(victim)}
        return present | ({"iteration"} if self.stack.layout.worker else set())

    def _strike(self, pair: Pair) -> Hit | None:
        """Kill the victim at a random moment in the next run of the stage.

        Return None if victim or stage had ended by then.
        """
        self.tally.misses[pair] += 1
        self.ledger.look()
        victims = self.stack.victims(pair.victim)
        newest = self.watch.newest
        if not self._wait(lambda: self._fresh(pair.stage, newest) is not None, 3 * self.stuck_s):
            return None
        begun = self._fresh(pair.stage, newest)
        if pair.victim == "iteration" and begun is not None:
            victims = [psutil.Process(begun.pid)]
        if begun is None or not victims:
            return None
        victim = self.chance.choice(victims)
        wait_s = self.chance.random() * self.watch.typical_s(pair.stage)
        name = title(victim)[:100]
        until = time.time() + wait_s
        while time.time() < until:
            time.sleep(min(POLL_S, max(0.0, until - time.time())))
        self.watch.poll()
        if self.watch.ended(begun) or not runs(victim):
            return None
        sent_s = time.time()
        if not kill_now(victim):
            return None
        if pair.victim != "s3":
            self.ledger.look()
        self.watch.poll()
        ended_s = self.watch.ended(begun)
        counted = ended_s is None or ended_s > sent_s
        hit = Hit(
            s=self.stack.layout.s,
            victim=pair.victim,
            stage=pair.stage if counted else f"after {pair.stage}",
            iteration=begun.iteration or 0,
            time=sent_s,
            pid=victim.pid,
            title=name,
        )
        if counted:
            self.tally.misses[pair] -= 1
            self.tally.hits[pair] += 1
        self.hits.append(hit)
        return hit

    def _settle(self, hit: Hit) -> None:
        """Wait until the hit iteration and the next one are committed, and record the cost."""
        exits = len(self.stack.exits)
        target = hit.iteration + 1
        if not self._wait(lambda: self.watch.newest >= target, 2 * self.stuck_s):
            hit.stuck = True
            folder = dump(self.stack, f"stuck-{hit.victim}-{hit.stage}-{hit.iteration}")
            where = f"{hit.victim}@{hit.stage} in iteration {hit.iteration}"
            self.say(f"STUCK after {where}: see {folder}")
            self.stack.kill_flow()
            if not self._wait(lambda: self.watch.newest >= target, START_TIMEOUT_S):
                self.dead = True
                dump(self.stack, f"dead-{hit.victim}-{hit.stage}-{hit.iteration}")
                return
        self.stack.count_orphans()
        commits = self.watch.commits
        hit.flow_restarts = max(0, len(self.stack.exits) - exits - (hit.victim == "flow"))
        hit.failures = self.watch.failures(
            hit.time, commits[target] if target in commits else time.time()
        )
        if self.undisturbed is not None and not hit.stuck:
            hit.recovery_s = recovery_s(commits, hit.iteration, self.undisturbed)
        if (trained := self.watch.trained_after(hit.time)) is not None:
            hit.training_again_s = max(0.0, trained - hit.time - self.watch.typical_s("train"))
        lost = "?" if hit.recovery_s is None else f"{hit.recovery_s:.1f}"
        self.say(
            f"{hit.victim}@{hit.stage} in iteration {hit.iteration}: {lost} s lost, "
            f"{hit.flow_restarts} restarts of the flow, "
            f"failed: {', '.join(hit.failures) or 'nothing'}"
        )

    def _fresh(self, stage: str, newest: int) -> Event | None:
        """Return a run of the stage that started just now, in an iteration after `newest`."""
        return next(
            (event for event in self.watch.running(stage) if (event.iteration or 0) > newest), None
        )

    def _wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Poll until `reached`; return False after the timeout. Raises: Over."""
        until = time.monotonic() + timeout_s
        while True:
            self.stack.tick()
            self.watch.poll()
            if reached():
                return True
            if self.over():
                raise Over
            if time.monotonic() > until or self.stack.failures >= MAX_QUICK_ENDS:
                return False
            time.sleep(POLL_S)
