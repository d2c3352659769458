"""Who drives a cluster, and what its actors are set up with. Light to import: a flow process needs no torch.

Not here: the specs of single actors, which are made from these (`conductor`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.run import RunConfig


@dataclass(frozen=True)
class Driver:
    """The process that calls: which run it drives, under which epoch."""

    run: str
    epoch: int


@dataclass(frozen=True)
class ClusterSpec:
    """What the actors of a run are set up with."""

    config: RunConfig
    home: str
    model_dir: str
    store_root: str
