"""Fake engine, router and generator actors: behave as the real ones, without servers and with few
imports.

tests/flows use the real actors with real servers.
"""

from __future__ import annotations

import os
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from rlpipe.errors import DataError, EngineUnavailable


class FakeEngine:
    """An engine with a server until it is ended. Each start has another URL."""

    def __init__(self, number: int, node: int = 0) -> None:
        self.number = number
        self.node = node
        self.starts = 0
        self.met: str | None = None
        self.brought: list[str] = []
        self.waits_s = 0.0
        self.generating = True
        self.alive = self.refuses = False
        self.stamp: str | None = None
        self.unknown = True
        self.stuck = False
        self.hangs_s = self.marks_s = 0.0
        self.log_to: str | None = None
        self.in_memory_tags = {"weights", "kv_cache", "cuda_graph"}

    def renew(self) -> None:
        """Become as a new actor, for the next test."""
        FakeEngine.__init__(self, self.number, self.node)

    def start(self, spec: Any, rendezvous: str | None = None) -> str:
        if self.refuses:
            raise EngineUnavailable("it ended at once", where=f"engine/{self.number}")
        time.sleep(self.waits_s)
        if not self.alive:
            self.starts = self.starts + 1
            self.met = rendezvous
            self.alive = True
            self.generating = True
            self.stamp = None
            self.unknown = True
        return self.url()

    def rendezvous(self, spec: Any) -> str | None:
        return self.met if self.alive else None

    def new_rendezvous(self) -> str:
        return f"here:{self.starts}"

    def fetch_weights(
        self, root: str, stamp: str, folder: str, timeout_s: float, *, before: str | None = None
    ) -> str:
        self.brought.append(stamp)
        return folder

    def was_brought(self) -> list[str]:
        return self.brought

    def url(self) -> str:
        return f"http://engine-{self.number}/{self.starts}"

    def status(self) -> dict[str, Any]:
        time.sleep(self.hangs_s)
        stamp = None if self.unknown or not self.alive else self.stamp
        url = self.url() if self.alive else None
        state = {"url": url, "alive": self.alive, "stamp": stamp, "pid": os.getpid()}
        return {
            "number": self.number,
            **state,
            "facts": {"starts": self.starts},
            "load": None,
            "gpus": [],
        }

    def generates(self, timeout_s: float) -> bool:
        return self.alive and self.generating

    def mark(self, *, unknown: bool) -> None:
        time.sleep(self.marks_s)
        self.unknown = unknown

    def release_memory(self, keep: Any) -> None:
        if self.stuck:
            raise EngineUnavailable("it does not answer", where=f"engine/{self.number}")
        self.in_memory_tags &= set(keep)
        self.unknown = self.unknown or "weights" not in self.in_memory_tags

    def resume_memory(self, tags: Any) -> None:
        self.in_memory_tags |= set(tags)

    def in_memory(self) -> list[str]:
        return sorted(self.in_memory_tags)

    def hand_back(self) -> None:
        if self.log_to:
            ray.get(ray.get_actor(self.log_to).note.remote("hand back", [self.url()]))

    def stop(self) -> None:
        self.alive = False

    def become(self, **state: Any) -> None:
        vars(self).update(state)


class FakeRouter:
    """A router that records its calls."""

    def __init__(self) -> None:
        self.alive = False
        self.starts = 0
        self.silent = False
        self.routed: list[str] = []
        self.log: list[tuple[str, list[str]]] = []

    def renew(self) -> None:
        """Become as a new actor, for the next test."""
        FakeRouter.__init__(self)

    def start(self, engine: Any, resources: Any, logs: str, engines: list[str]) -> str:
        if not self.alive:
            self.alive = True
            self.routed = []
            self.starts += 1
        self.routed = [url for url in self.routed if url in engines]
        return "http://router"

    def workers(self) -> list[str] | None:
        if self.silent:
            raise EngineUnavailable("no answer", where="router")
        return list(self.routed) if self.alive else None

    def admit(self, workers: list[str]) -> None:
        self.log.append(("admit", workers))
        self.routed = sorted({*self.routed, *workers})

    def remove(self, workers: list[str]) -> None:
        self.log.append(("remove", workers))
        self.routed = [url for url in self.routed if url not in workers]

    def become(self, **state: Any) -> None:
        vars(self).update(state)

    def note(self, event: str, urls: list[str]) -> None:
        self.log.append((event, urls))

    def history(self) -> list[tuple[str, list[str]]]:
        return self.log


class FakeGenerator:
    """A generator that accepts its set-up, unless a row is wrong."""

    def __init__(self) -> None:
        self.wrong = False

    def renew(self) -> None:
        """Become as a new actor, for the next test."""
        FakeGenerator.__init__(self)

    def become(self, *, wrong: bool) -> None:
        self.wrong = wrong

    def setup(self, driver: Any, spec: Any) -> dict[str, int]:
        if self.wrong:
            raise DataError("no prompt", where="a.jsonl:3")
        return {"rows": 1}


def find_or_start(kind: type, name: str, *arguments: Any) -> Any:
    """Find or start the actor of this name."""
    make: Any = ray.remote
    identity = {"name": name, "lifetime": "detached", "get_if_exists": True}
    return make(kind).options(num_cpus=0, **identity).remote(*arguments)


def renew(actor: Any) -> None:
    """Make an actor as good as new; end it if it has died or does not answer.

    A new process for each actor of each test costs more than all the rest of these tests.
    """
    try:
        ray.get(actor.renew.remote(), timeout=1.0)
    except (GetTimeoutError, RayActorError):
        ray.kill(actor)
