"""Who drives a cluster, and what its actors are set up with. Light to import: a flow process needs
no torch.

Not here: the specs of single actors, which are made from these (`conductor`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.run import RunConfig
from rlpipe.errors import Fenced


@dataclass(frozen=True)
class Driver:
    """The process that calls: which run it drives, under which epoch."""

    run: str
    epoch: int

    def require(self, now: Driver | None, *, where: str) -> None:
        """An actor's guard: is the caller (this) the driver that it works for now? Raises:
        Fenced."""
        if self != now:
            raise Fenced(
                "another driver uses the cluster's actors",
                where=where,
                found=f"run {now.run} in epoch {now.epoch}" if now else "no run",
                expected=f"run {self.run} in epoch {self.epoch}, which is ours",
                do="leave the run to it, or stop it and start this one again",
            )


@dataclass(frozen=True)
class ClusterSpec:
    """What the actors of a run are set up with."""

    config: RunConfig
    home: str
    model_dir: str
    store_root: str

    @property
    def branch(self) -> tuple[str, str]:
        """The store and the run in it: what two specs of one run have in common."""
        return self.store_root, self.config.run


@dataclass(frozen=True)
class GeneratorSpec:
    """What a generator is set up with. An equal spec needs no second set-up."""

    config: RunConfig
    model_dir: str
    store_root: str
