"""The pairs of victim and stage: how often each was hit, and which one is next."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

STAGES = ("rollout", "reward", "advantage", "train", "sync", "checkpoint")
TITLES = {
    "flow": (),
    "iteration": (),
    "worker": (),
    "generator": ("ray::Generator",),
    "trainer": ("ray::TrainerRank",),
    "engine": (
        "rlpipe.engines.sglang.launch",
        "rlpipe.engines.sglang.cpu_launch",
        "sglang::scheduler",
        "sglang::detokenizer",
    ),
    "engine-actor": ("ray::EngineActor",),
    "router": ("sglang::router",),
    "router-actor": ("ray::RouterActor",),
    "conductor": ("ray::Conductor",),
    "raylet": ("raylet/raylet ",),
    "gcs": ("gcs/gcs_server ",),
    "s3": (),
    "prefect": (),
}
"""Victim → texts in the command line of its process. The others are found in other ways;
`iteration` and `worker` exist only with a Prefect worker."""
MAX_MISSES = 12


class Pair(NamedTuple):
    """A victim, and the stage in which it is killed."""

    victim: str
    stage: str

    def __str__(self) -> str:
        return f"{self.victim}@{self.stage}"


def pairs_of(victims: Sequence[str], stages: Sequence[str], only: Sequence[str] = ()) -> list[Pair]:
    """Return all combinations, or the given ones (`victim@stage`).

    Raises: ValueError for an unknown pair.
    """
    chosen = [Pair(*text.split("@", 1)) for text in only] or [
        Pair(victim, stage) for victim in victims for stage in stages
    ]
    for pair in chosen:
        if pair.victim not in TITLES or pair.stage not in STAGES:
            raise ValueError(
                f"{pair} is not victim@stage: victims are {', '.join(TITLES)}; "
                f"stages are {', '.join(STAGES)}"
            )
    return chosen


class Tally:
    """Hits of each pair, and attempts without a hit."""

    def __init__(self, pairs: Sequence[Pair], hits: int) -> None:
        self._pairs = list(pairs)
        self._wanted = hits
        self.hits: Counter[Pair] = Counter()
        self.misses: Counter[Pair] = Counter()
        self._seen: set[str] = set()

    def next(self, present: Collection[str], chance: random.Random) -> Pair | None:
        """Return the pair with the fewest hits whose victim exists; None if all pairs are done.

        Ties go to the pair with fewer misses, then to chance.
        """
        self._seen |= set(present)
        open_pairs = [
            pair
            for pair in self._pairs
            if pair.victim in present
            and self.hits[pair] < self._wanted
            and self.misses[pair] < MAX_MISSES
        ]
        if not open_pairs:
            return None
        least = min((self.hits[pair], self.misses[pair]) for pair in open_pairs)
        return chance.choice(
            [pair for pair in open_pairs if (self.hits[pair], self.misses[pair]) == least]
        )

    @property
    def short(self) -> list[Pair]:
        """Pairs with too few hits, of victims that this run has."""
        return [
            pair
            for pair in self._pairs
            if pair.victim in self._seen and self.hits[pair] < self._wanted
        ]
