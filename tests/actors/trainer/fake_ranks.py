"""A fake rank: behaves towards its group as `TrainerRank`, without a model and with few imports."""

from __future__ import annotations

import os
import time
from collections import Counter
from functools import wraps
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rlpipe.actors.ray.calls import kill_actors
from rlpipe.actors.trainer.group import STATUS
from rlpipe.errors import TrainerError
from rlpipe.lineage.states import Lineage
from rlpipe.types import Stage


def busy(method: Any) -> Any:
    """Report the call in `status`, as `rlpipe.actors.trainer.rank.collective`."""

    @wraps(method)
    def call(self: Rank, *arguments: Any, **keywords: Any) -> Any:
        name = method.__name__
        self.busy = name
        self.failed = None
        self.calls[name] += 1
        try:
            return method(self, *arguments, **keywords)
        except Exception:
            self.failed = name
            raise
        finally:
            self.busy = None

    return call


class Rank:
    """A rank that holds the name of a state.

    A collective that one rank does not join leaves the other waiting.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.held: str | None = None
        self.dirty = self.ready = False
        self.fresh = True
        self.busy: str | None = None
        self.failed: str | None = None
        self.calls: Counter[str] = Counter()
        self.deterministic: bool | None = None
        self.received: list[str] = []

    def renew(self) -> None:
        """Become as a new rank, for the next test. Raises: TrainerError if a call runs."""
        if self.busy is not None:
            raise TrainerError(f"{self.busy} is running", where=f"trainer/{self.rank}")
        Rank.__init__(self, self.rank)

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 29500 + self.rank

    def status(self) -> dict[str, Any]:
        state = {"held": self.held, "dirty": self.dirty, "fresh": self.fresh, "ready": self.ready}
        work = {"busy": self.busy, "calls": dict(self.calls), "failed": self.failed}
        return {
            "rank": self.rank,
            **state,
            **work,
            "deterministic": self.deterministic,
            "pid": os.getpid(),
        }

    def setup(
        self, spec: Any, master: tuple[str, int], critic_exchange: tuple[str, int] | None = None
    ) -> None:
        exchange = f" and {critic_exchange[0]}:{critic_exchange[1]}" if critic_exchange else ""
        self.received.append(f"setup {spec.model_dir} {master[0]}:{master[1]}{exchange}")
        self.ready = True
        self.deterministic = spec.deterministic

    def initialise(
        self, key: str, start_from: str | None, adapter: str | None = None
    ) -> dict[str, Any]:
        if self.held or self.dirty:
            raise TrainerError("first weights into a trained engine", where=f"trainer/{self.rank}")
        self.received.append(f"initialise from {start_from}")
        self.held = key
        return {"state_digest": f"state of {key}"}

    def restore(self, lineage: Lineage) -> dict[str, Any]:
        if not self.ready:
            raise TrainerError("this rank has not been set up", where=f"trainer/{self.rank}")
        if lineage.base_stage is Stage.INIT and not self.fresh:
            raise TrainerError("first weights into a trained engine", where=f"trainer/{self.rank}")
        self.received.append("restore")
        self.held = lineage.target
        self.dirty = False
        self.fresh = False
        return {"replayed": len(lineage.replay), "mismatch": None, "rank": self.rank}

    @busy
    def train(self, key: str, *, dies: int | None = None, raises: int | None = None) -> str:
        if self.rank == raises:
            raise TrainerError("no such batch", where=f"trainer/{self.rank}")
        self.dirty = True
        self.held = None
        self.fresh = False
        if self.rank == dies:
            os._exit(1)
        if (dies, raises) != (None, None):
            time.sleep(600)
        self.held = key
        self.dirty = False
        return f"{key} on {self.rank}"

    @busy
    def push(self, alone: int, seconds: float) -> None:
        """Let one rank work longer than the others, as the rank that talks to engines does."""
        if self.rank == alone:
            time.sleep(seconds)

    def become(self, rank: int, **state: Any) -> None:
        if rank == self.rank:
            vars(self).update(state)

    def note(self, name: str, seconds: float = 0.0) -> None:
        self.received.append(f"begin {name}")
        time.sleep(seconds)
        self.received.append(f"end {name}")

    def remembers(self) -> str:
        return f"weights of {self.rank}"

    def uploading(self) -> str:
        return f"prefix of {self.rank}"

    def divide_by_zero(self) -> float:
        return 1 / 0

    def fill_the_gpu(self) -> None:
        """Raise torch's error on the last rank, which imports torch for it."""
        if self.rank == 0:
            return
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.27 GiB")

    def log(self) -> list[str]:
        return self.received


def renew(rank: Any) -> None:
    """Make a rank as good as new; end it if it has died or is in a call that does not end.

    Two new processes for each test cost two CPU seconds, more than the rest of the test.
    """
    try:
        ray.get(rank.renew.options(concurrency_group=STATUS).remote(), timeout=10.0)
    except (GetTimeoutError, RayError):
        kill_actors([rank])


def start(rank: int) -> Any:
    """Find or start the rank of this number."""
    make: Any = ray.remote
    remote = make(concurrency_groups={STATUS: 1})(Rank)
    identity = {"name": f"trainer-{rank}", "lifetime": "detached", "get_if_exists": True}
    return remote.options(num_cpus=0, **identity).remote(rank)
